"""The methods of vLLM's experts, whatever the checkpoint: what is refused, and how this library's module takes the place of the weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from .. import options, target
from ..encodings import Encoding, Quantized
from ..errors import ShapeError, UnsupportedError
from ..nn import Experts, prepare_
from .log import logger
from .scales import check_scales

LEAVE = "run without --quantization fusion_moe"


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer, served by `Experts`. Subclasses load the parts of the weights and say where they lie."""

    encoding: Encoding
    loaded: tuple[str, ...]  # the parameters that vLLM loads and that `Experts` takes the place of
    supports_pre_processed_weights = False
    supports_eplb = False

    def __init__(self, moe: Any):
        """moe: vLLM's configuration of the layer. UnsupportedError for what is not served."""
        FusedMoEMethodBase.__init__(self, moe)  # not the next one's: it selects a kernel of vLLM
        need_served(moe)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: the kernels of vLLM that it is for are not used."""

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, params_dtype: Any, **attributes: Any
    ) -> None:
        """vLLM's parameters, which its loader fills. ShapeError for sizes that the encoding does not take."""
        block = self.encoding.block
        for name, size in ("hidden", hidden_size), ("intermediate", intermediate_size_per_partition):
            if size % block:
                todo = "choose another --tensor-parallel-size" if name == "intermediate" else LEAVE
                expected = f"a multiple of {block}, the block of {self.encoding.name}"
                raise ShapeError(f"{name} size {size}", expected=expected, todo=todo, where=layer.layer_name)
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **attributes)

    @abstractmethod
    def weight(self, layer: Any, name: str) -> Quantized:
        """The weight "w13" [E, 2I, H], gate above up, or "w2" [E, H, I] that vLLM loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Puts `Experts` in the place of what was loaded, in the order that kernels read. NonFiniteError for bad scales."""
        w13, w2 = self.weight(layer, "w13"), self.weight(layer, "w2")
        check_scales(layer.layer_name, w13=w13, w2=w2)
        for name in self.loaded:
            delattr(layer, name)
        scale_on = "input" if layer.apply_router_weight_on_input else "output"
        layer.fusion_moe = Experts(w13, w2, scale_on=scale_on, limit=self.moe.swiglu_limit)
        prepare_(layer.fusion_moe)
        on = target.find(options.current().target, w2.device).name
        logger.info_once("fusion_moe serves experts in %s, activations in %s, on %s", self.encoding.name, self.moe.in_dtype, on)

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None, shared_experts_input: Any = None
    ) -> Tensor:
        """x [T, H], topk_weights [T, k], topk_ids int[T, k] -> [T, H]. vLLM computes shared experts by itself."""
        return layer.fusion_moe(x, topk_ids, topk_weights)


def need_served(moe: Any) -> None:
    """UnsupportedError for layers that are not served, by vLLM's configuration of them."""
    if moe.moe_parallel_config.use_ep:
        raise _unsupported("expert parallelism", "all experts on each rank", "run without --enable-expert-parallel")
    if moe.is_lora_enabled:
        raise _unsupported("LoRA", "experts without adapters", "run without --enable-lora, or merge the adapter into the weights first")
    if moe.activation.value != "silu":
        raise _unsupported(f"experts with activation {moe.activation.value!r}", "'silu'", LEAVE)
    if moe.has_bias:
        raise _unsupported("experts with biases", "experts without", LEAVE)


def _unsupported(found: str, expected: str, todo: str) -> UnsupportedError:
    return UnsupportedError(found, expected=expected, todo=todo, where="vLLM with --quantization fusion_moe")
