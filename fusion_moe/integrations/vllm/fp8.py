"""FP8, with scales for blocks of 128 x 128, rows or matrices: vLLM reads the configuration and
loads the weights, this library multiplies. Activations stay in 16 bits.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from ...checkpoints import FP8_OF_MATRIX, Scheme
from ...checkpoints.fp8 import BLOCK
from ...checkpoints.schemes import FP8 as FP8_SCALED, FP8_INVERSE, of_encoding
from ...encodings import FLOATS, FP8, FP8_CHANNEL
from ...errors import DtypeError, UnsupportedError
from ..serving import LEAVE
from .experts import ExpertsMethod
from .loading import LoadsExperts
from .names import name_in_files

# as vLLM has the scales that it loads
_OF_STRATEGY = {
    "tensor": FP8_OF_MATRIX,
    "channel": of_encoding(FP8_SCALED, FP8_CHANNEL, torch.float32, (-1, 1)),
    "block": of_encoding(FP8_SCALED, FP8, torch.float32, (-1, -1)),
}
_IN_BLOCKS = of_encoding(FP8_INVERSE, FP8, torch.float32, (-1, -1))


class Fp8ExpertsMethod(ExpertsMethod):
    """Experts in FP8, of any scales."""

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """As of all experts. DtypeError when numbers are loaded, which vLLM would round to FP8."""
        load = MethodType(load_codes, layer)
        super().create_weights(layer, *sizes, **attributes | {"weight_loader": load})


def load_codes(
    layer: Any, param: Tensor, loaded_weight: Tensor, weight_name: str, *where: Any, **named: Any
) -> Any:
    """vLLM's loader of codes. DtypeError for numbers, which it would cast."""
    if loaded_weight.dtype in FLOATS and param.dtype not in FLOATS:
        raise DtypeError(
            f"{weight_name} in {loaded_weight.dtype}",
            expected=f"{param.dtype}, and scales",
            todo="load it by the names that files have, or quantize it as the experts that were "
            "loaded first",
            where=layer.layer_name,
        )
    return layer.weight_loader(param, loaded_weight, weight_name, *where, **named)


load_codes.supports_moe_loading = True  # type: ignore[attr-defined]


class FusionMoeFp8Method(Fp8ExpertsMethod, Fp8MoEMethod):
    """Experts of `quant_method: fp8`, as DeepSeek-V3, Qwen and GLM publish them."""

    weight_scale_refine = None

    def __init__(self, quant_config: Fp8Config, moe_config: Any):
        """quant_config: of the checkpoint; moe_config: of the layer. UnsupportedError for other
        blocks, and for gpt-oss.
        """
        super().__init__(moe_config)
        if moe_config.activation.value == "swigluoai":  # vLLM would skip its experts
            raise UnsupportedError(
                "gpt-oss in quant_method fp8",
                expected="ModelOpt's or compressed-tensors' FP8",
                todo=LEAVE,
                where="vLLM",
            )
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = block = quant_config.weight_block_size
        if block not in (None, [*BLOCK]):
            raise UnsupportedError(
                f"FP8 in blocks of {block}", expected=f"{[*BLOCK]}", todo=LEAVE, where="vLLM"
            )
        self.block_quant = block is not None
        self.scheme = _IN_BLOCKS if self.block_quant else FP8_OF_MATRIX
        self.weight_scale_name = self.scheme.parts[1].name
        self.unread = ("input_scale",) if quant_config.activation_scheme == "static" else ()


class FusionMoePackedFp8Method(Fp8ExpertsMethod, CompressedTensorsW8A8Fp8MoEMethod):
    """Experts in compressed-tensors' FP8."""

    def __init__(self, scheme: Scheme, weights: Any, activations: Any, moe: Any):
        """scheme: of the weights; weights, activations: as the configuration describes them."""
        super().__init__(moe)
        self.scheme, self.weight_quant, self.input_quant = scheme, weights, activations
        self.block_quant = scheme.encoding is FP8
        self.weight_block_size = [*BLOCK] if self.block_quant else None
        self.static_input_scales = activations is not None and not activations.dynamic
        self.unread = ("input_scale",) if self.static_input_scales else ()


def packed_scheme(weights: Any) -> Scheme | None:
    """The scheme of weights as compressed-tensors describes them; None if they are not in FP8, or
    in other blocks.
    """
    if (weights.num_bits, weights.type, weights.symmetric) != (8, "float", True):
        return None
    blocks = weights.strategy == "block" and [*weights.block_structure] != [*BLOCK]
    return None if blocks else _OF_STRATEGY.get(weights.strategy)


class FusionMoeFp8Config(LoadsExperts, Fp8Config):
    """vLLM's configuration of FP8, with this library's experts."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts in FP8."""
        prefix = name_in_files(prefix)
        if isinstance(layer, RoutedExperts) and not is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
            match_mode=self.ignored_layers_match_mode,
        ):
            return FusionMoeFp8Method(self, layer.moe_config)
        return super().get_quant_method(layer, prefix)
