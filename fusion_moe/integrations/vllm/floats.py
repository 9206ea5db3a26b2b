"""Experts in floating point, of directories that nobody quantized: vLLM loads the weights, this
library multiplies. So answers need not depend on the batch, and adapters share one.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import (
    FusedMoEMethodBase,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from ...checkpoints import Scheme
from ...checkpoints.schemes import StoredPart
from ...encodings import PLAIN
from .experts import ExpertsMethod

_SCHEMES = {
    dtype: Scheme(encoding.name, encoding, (StoredPart("values", ".weight", (dtype,)),))
    for dtype, encoding in PLAIN.items()
}


class _Loaded(FusedMoEMethodBase):
    """vLLM's parameters, without the selection of a kernel of vLLM."""

    create_weights = UnquantizedFusedMoEMethod.create_weights


class FusionMoeFloatMethod(ExpertsMethod, _Loaded):
    """Experts in the dtype that vLLM loads weights as."""

    def __init__(self, moe_config: Any):
        """moe_config: of the layer."""
        # the rows of gate and up take turns in gpt-oss's tensors
        self.interleave = int(moe_config.activation.value == "swigluoai")
        super().__init__(moe_config)
        self.scheme = _SCHEMES[moe_config.in_dtype]

    def loads(self, layer: Any, name: str) -> bool:
        """None: vLLM has names for all of them."""
        return False


def method(layer: Any) -> Any:
    """What computes a layer in floats: our method for experts, vLLM's for linear layers, None (vLLM
    chooses) for all else.
    """
    if isinstance(layer, RoutedExperts):
        return FusionMoeFloatMethod(layer.moe_config)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
