"""NVFP4, MXFP4, FP8 and INT4 of compressed-tensors: vLLM reads the configuration and loads the
weights, this library multiplies.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A4Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)

from ...checkpoints import PACKED_INT4, PACKED_MXFP4, PACKED_NVFP4
from ...encodings import INT4
from ...errors import DtypeError, UnsupportedError
from ..serving import LEAVE
from .experts import ExpertsMethod
from .fp8 import FusionMoePackedFp8Method, packed_scheme
from .linear import is_linear_on_cpu, linear_method
from .loading import LoadsExperts
from .log import logger
from .names import name_in_files


class FusionMoeNvFp4Method(ExpertsMethod, CompressedTensorsW4A4Nvfp4MoEMethod):
    """Experts in compressed-tensors' NVFP4, whose global scales are divisors."""

    scheme = PACKED_NVFP4
    group_size = 16
    unread = ("input_global_scale",)


class FusionMoePackedMxfp4Method(ExpertsMethod, CompressedTensorsW4A4Mxfp4MoEMethod):
    """Experts in compressed-tensors' MXFP4."""

    scheme = PACKED_MXFP4
    group_size = 32


class FusionMoeInt4Method(ExpertsMethod, CompressedTensorsWNA16MoEMethod):
    """Experts in symmetric INT4 with groups of 32, packed in int32 words."""

    scheme = PACKED_INT4
    strategy, symmetric, num_bits, group_size = "group", True, 4, INT4.block
    packed_factor = Fraction(32, 4)
    unread = ("weight_shape",)

    def __init__(self, moe: Any):
        """moe: vLLM's configuration of the layer. DtypeError for float16, to which vLLM would round
        the files' bfloat16 scales.
        """
        super().__init__(moe)
        if moe.in_dtype == torch.float16:
            raise DtypeError(
                "INT4 in a model in float16",
                expected="bfloat16 or float32",
                todo="--dtype bfloat16",
                where="vLLM",
            )


class FusionMoeCompressedTensorsConfig(LoadsExperts, CompressedTensorsConfig):
    """vLLM's configuration of compressed-tensors, with this library's experts and, on CPUs, NVFP4
    linear layers.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own, except for experts in 4 bits or FP8, and on CPUs for NVFP4 linear layers.
        None for experts that the checkpoint leaves in floats.
        """
        prefix = name_in_files(prefix, layer)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if is_linear_on_cpu(layer) and self._is_nvfp4_format(
            (self.get_scheme_dict(layer, prefix) or {}).get("weights")
        ):
            return linear_method(layer, prefix, PACKED_NVFP4, "input_global_scale")
        return super().get_quant_method(layer, prefix)

    def _experts_method(self, layer: Any, prefix: str) -> Any:
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        gate, *others = (
            self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name
        )
        if any(other != gate for other in others):
            raise UnsupportedError(
                "projections in several formats", expected="one", todo=LEAVE, where=prefix
            )
        if gate is None:
            return None
        weights = gate["weights"]
        if self._is_nvfp4_format(weights):
            return FusionMoeNvFp4Method(layer.moe_config)
        if self._is_mxfp4(weights):
            return FusionMoePackedMxfp4Method(layer.moe_config)
        if _is_int4(weights, gate["input_activations"]):
            return FusionMoeInt4Method(layer.moe_config)
        if (scheme := packed_scheme(weights)) is not None:
            return FusionMoePackedFp8Method(
                scheme, weights, gate["input_activations"], layer.moe_config
            )
        return self._by_vllm(layer, prefix, gate)

    def _by_vllm(self, layer: Any, prefix: str, scheme: Any) -> Any:
        """vLLM's own method for experts; UnsupportedError if it has none."""
        actual = f"experts in {scheme['format']}"
        try:
            method = super().get_quant_method(layer, prefix)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            expected = f"NVFP4, MXFP4, FP8, symmetric INT4 in groups of {INT4.block}, or vLLM's"
            todo = f"quantize them so; vLLM says: {error}"
            raise UnsupportedError(actual, expected=expected, todo=todo, where=prefix) from error
        logger.info_once("%s are served by vLLM: %s", actual, type(method).__name__)
        return method


def _is_int4(weights: Any, activations: Any) -> bool:
    entries = "num_bits", "type", "strategy", "group_size", "symmetric", "actorder"
    values = [getattr(weights, entry) for entry in entries]
    return values == [4, "int", "group", INT4.block, True, None] and activations is None
