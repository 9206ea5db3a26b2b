"""ModelOpt's NVFP4, alone or beside other formats: vLLM reads the configuration and loads the
weights, this library multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptFp8MoEMethod,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)

from ...checkpoints import FP8_OF_MATRIX, MODELOPT, MODELOPT_FUSED
from ...errors import CheckpointError
from .experts import ExpertsMethod
from .fp8 import Fp8ExpertsMethod, load_codes
from .linear import is_linear_on_cpu, linear_method
from .loading import LoadsExperts
from .names import name_in_files

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class FusionMoeModelOptMethod(ExpertsMethod, ModelOptNvFp4FusedMoE):
    """Experts in ModelOpt's NVFP4. vLLM's loader keeps separate scales of gate and up because the
    class name contains "ModelOpt".
    """

    scheme = MODELOPT
    unread = ("input_scale",)

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: Any):
        """quant_config: of the checkpoint; moe_config: of the layer."""
        # the rows of gate and up take turns in gpt-oss's tensors
        self.interleave = int(moe_config.activation.value == "swigluoai")
        super().__init__(moe_config)
        self.quant_config = quant_config
        # scales of activations are loaded only for this rank's experts, and not read
        self.use_global_sf = False

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """As of all experts. When vLLM reloads, it puts loaders of its own around these."""
        super().create_weights(layer, *sizes, **attributes)
        for name in (*self.loaded, "w13_bias", "w2_bias") if self.interleave else ():
            getattr(layer, name).weight_loader = MethodType(_fill, layer)
        for name in () if self.interleave else ("w13_weight", "w2_weight"):
            getattr(layer, name).weight_loader = MethodType(load_codes, layer)

    def loads(self, layer: Any, name: str) -> bool:
        """Whether this method loads the tensor of a name itself, instead of vLLM's loader: beside
        what every method does, Llama-4's tensors with all experts.
        """
        fused = name.startswith(("gate_up_proj", "down_proj"))
        return (fused and layer.apply_router_weight_on_input) or super().loads(layer, name)

    def load(self, layer: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads this rank's shares of tensors, each of all experts. CheckpointError for other names
        than ModelOpt's.
        """
        if not self.interleave:
            super().load(layer, _of_each(tensors, self.moe.num_experts))
            return
        transposed = {part.suffix: part.transposed for part in MODELOPT_FUSED.parts}
        for name, t in tensors:
            projection, result, suffix = name.partition("_proj")
            into = f"{'w2' if projection == 'down' else 'w13'}{suffix or '_weight'}"
            if not result or "." in name or not hasattr(layer, into):
                raise CheckpointError(
                    f"a tensor {name!r} of experts",
                    expected="gate_up_proj and down_proj, of all experts, as ModelOpt writes them",
                    where=layer.layer_name,
                )
            param = getattr(layer, into)
            param.weight_loader(param, t.mT if transposed.get(suffix) else t)


# methods of a layer, from which vLLM takes the layer while it keeps them
def _fill(layer: Any, param: Tensor, loaded_weight: Tensor) -> None:
    """param [E, ...] of this rank, from a tensor of gpt-oss: of the experts, or of the features,
    that this has more of.
    """
    t, method = loaded_weight, layer.quant_method
    for d, size in enumerate(param.shape if t.dim() else ()):
        first = (method.first_expert or 0) if d == 0 else method.moe.tp_rank * size
        t = t.narrow(d, first if t.shape[d] != size else 0, size)
    param.data.copy_(t.expand(param.shape))


def _of_each(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Llama-4's tensors, transposed, by the names and in the order of those of one expert each; one
    number is for all of them.
    """
    for name, t in tensors:
        projection, _, suffix = name.partition("_proj")
        t = t.mT if t.dim() else t.expand(experts)
        both = zip(("gate", "up"), t.chunk(2, 1) if t.dim() > 1 else (t, t), strict=True)
        for part, of in both if projection == "gate_up" else [(projection, t)]:
            for expert, matrix in enumerate(of):
                yield f"{expert}.{part}_proj.{suffix.removeprefix('_') or 'weight'}", matrix


class FusionMoeModelOptFp8Method(Fp8ExpertsMethod, ModelOptFp8MoEMethod):
    """Experts in ModelOpt's FP8, a scale for each matrix."""

    scheme = FP8_OF_MATRIX
    unread = ("input_scale",)

    def __init__(self, quant_config: ModelOptFp8Config, moe_config: Any):
        """quant_config: of the checkpoint; moe_config: of the layer."""
        super().__init__(moe_config)
        self.quant_config = quant_config


class FusionMoeModelOptConfig(LoadsExperts, ModelOptNvFp4Config):
    """vLLM's configuration of ModelOpt's NVFP4, with this library's experts and, on CPUs, linear
    layers.
    """

    FusedMoEMethodCls = FusionMoeModelOptMethod

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts, and on CPUs for linear layers."""
        prefix = name_in_files(prefix, layer)
        if is_linear_on_cpu(layer) and not self.is_layer_excluded(prefix):
            return linear_method(layer, prefix, MODELOPT, "input_scale")
        return super().get_quant_method(layer, prefix)


class FusionMoeModelOptFp8Config(LoadsExperts, ModelOptFp8Config):
    """vLLM's configuration of ModelOpt's FP8, with this library's experts."""

    FusedMoEMethodCls = FusionMoeModelOptFp8Method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts."""
        return super().get_quant_method(layer, name_in_files(prefix, layer))


class FusionMoeMixedConfig(LoadsExperts, ModelOptMixedPrecisionConfig):
    """vLLM's configuration of a checkpoint that names a format for each layer: this library has
    what is in NVFP4, as with `FusionMoeModelOptConfig`, and experts in FP8; vLLM the rest.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts in NVFP4 or FP8, and on CPUs for linear layers
        in NVFP4.
        """
        prefix = name_in_files(prefix, layer)
        named = None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)
        if named in ALGORITHMS and isinstance(layer, RoutedExperts):
            return FusionMoeModelOptMethod(self.nvfp4_config, layer.moe_config)
        if named == "FP8" and isinstance(layer, RoutedExperts):
            return FusionMoeModelOptFp8Method(self.fp8_config, layer.moe_config)
        if named in ALGORITHMS and is_linear_on_cpu(layer):
            return linear_method(layer, prefix, MODELOPT, "input_scale")
        return super().get_quant_method(layer, prefix)
