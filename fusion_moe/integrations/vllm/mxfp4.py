"""MXFP4: gpt-oss with its biases and clamped SwiGLU, and others; vLLM reads the configuration and
loads the weights.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.quantization.mxfp4 import (
    GptOssMxfp4Config,
    GptOssMxfp4MoEMethod,
    Mxfp4Config,
    Mxfp4MoEMethod,
)
from vllm.utils.math_utils import round_up

from ...checkpoints import PACKED_MXFP4
from ...encodings import MXFP4
from ..serving import AnyDtype
from .experts import ExpertsMethod
from .loading import LoadsExperts


class _Loaded(ExpertsMethod):
    """Experts that vLLM loads as for its own kernels: codes and bytes of exponents."""

    scheme = PACKED_MXFP4
    parts = ("weight", "weight_scale")
    # vLLM's own properties ask its kernel, which does not exist here
    skip_forward_padding = has_unpadded_output = False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **more: Any
    ) -> tuple[int, int]:
        """The sizes unchanged, since no kernel of vLLM is used."""
        return hidden_size, intermediate_size_per_partition


class FusionMoeMxfp4Method(_Loaded, Mxfp4MoEMethod):
    """Experts in MXFP4, gate above up."""

    weight_dtype = "mxfp4"


class FusionMoeGptOssMethod(_Loaded, GptOssMxfp4MoEMethod):
    """gpt-oss's experts: rows of gate and up alternate, and both projections have biases."""

    interleave = 1
    weight_dtype = "gpt_oss_mxfp4"  # vLLM's loader for gpt-oss reads it

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *others: Any, **more: Any
    ) -> tuple[int, int]:
        """A rank's features in whole blocks: vLLM's loader for gpt-oss divides them so, also 2880
        by 4 ranks, and leaves zeros.
        """
        return hidden_size, round_up(intermediate_size_per_partition, MXFP4.block)

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """As of all experts. The features that fill the last block are zeros when vLLM reloads too,
        into memory that nobody has set.
        """
        load = MethodType(_load_beside_zeros, layer)
        super().create_weights(layer, *sizes, **attributes | {"weight_loader": load})


# a method of a layer, from which vLLM takes the layer while it keeps it
def _load_beside_zeros(layer: Any, param: Tensor, *loaded: Any, **named: Any) -> Any:
    param.data.zero_()
    return layer.weight_loader(param, *loaded, **named)


class FusionMoeMxfp4Config(LoadsExperts, Mxfp4Config):
    """vLLM's configuration of MXFP4, with this library's experts."""

    def _make_moe_method(self, moe: Any) -> FusionMoeMxfp4Method:
        return FusionMoeMxfp4Method(moe)


class FusionMoeGptOssConfig(AnyDtype, GptOssMxfp4Config):
    """vLLM's configuration of gpt-oss, with this library's experts. It keeps vLLM's name, which
    vLLM's weight loader checks.
    """

    def _make_moe_method(self, moe: Any) -> FusionMoeGptOssMethod:
        return FusionMoeGptOssMethod(moe)
