"""DeepSeek-V4 as published: experts in MXFP4 or NVFP4 beside FP8 in blocks; vLLM reads the
configuration and loads the weights.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from ..serving import Named
from .modelopt import FusionMoeModelOptMethod
from .mxfp4 import FusionMoeMxfp4Method

# CUDA and CPUs have classes of their own
_Config: Any = get_quantization_config("deepseek_v4_fp8")


class FusionMoeDeepseekV4Config(Named, _Config):
    """vLLM's configuration of DeepSeek-V4, with this library's experts in 4 bits; vLLM has the
    rest, experts in FP8 too.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """What computes a layer: our method for experts in MXFP4 or NVFP4, vLLM's own for all else.
        prefix: the layer's name in the model.
        """
        if isinstance(layer, RoutedExperts) and self._in_four_bits(prefix):
            if self._in_nvfp4(prefix):
                return FusionMoeModelOptMethod(self._get_nvfp4_config(), layer.moe_config)
            return FusionMoeMxfp4Method(layer.moe_config)
        return super().get_quant_method(layer, prefix)

    def _in_four_bits(self, prefix: str) -> bool:
        skipped = is_layer_skipped(
            prefix=prefix,
            ignored_layers=self.ignored_layers,
            fused_mapping=self.packed_modules_mapping,
        )
        return self.expert_dtype == "fp4" and not skipped

    def _in_nvfp4(self, prefix: str) -> bool:
        if hasattr(self, "_is_nvfp4_expert_layer"):  # CUDA's class: some layers may be in MXFP4
            return bool(self._is_nvfp4_expert_layer(prefix))
        return self.moe_quant_algo == "NVFP4"
