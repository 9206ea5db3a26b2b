"""ModelOpt's NVFP4, alone or beside other formats: vLLM reads the configuration and loads the
weights, this library multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)

from ..checkpoints.schemes import MODELOPT
from ..serving import NAME
from .experts import ExpertsMethod
from .linear import is_linear_on_cpu, linear_method

ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class FusionMoeModelOptMethod(ExpertsMethod, ModelOptNvFp4FusedMoE):
    """Experts in ModelOpt's NVFP4. vLLM's loader keeps separate scales of gate and up because the
    class name contains "ModelOpt".
    """

    scheme = MODELOPT
    unread = ("input_scale",)

    def __init__(self, quant_config: ModelOptNvFp4Config, moe_config: Any):
        """quant_config: of the checkpoint; moe_config: of the layer."""
        super().__init__(moe_config)
        self.quant_config = quant_config
        # scales of activations are loaded only for this rank's experts, and not read
        self.use_global_sf = False


class _Config:
    """What both configurations say instead of vLLM's."""

    def get_name(self) -> str:
        """The name of the quantization."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that activations may have."""
        return [torch.bfloat16, torch.float16, torch.float32]


class FusionMoeModelOptConfig(_Config, ModelOptNvFp4Config):
    """vLLM's configuration of ModelOpt's NVFP4, with this library's experts and, on CPUs, linear
    layers.
    """

    FusedMoEMethodCls = FusionMoeModelOptMethod

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts, and on CPUs for linear layers."""
        if is_linear_on_cpu(layer) and not self.is_layer_excluded(prefix):
            return linear_method(layer, prefix, MODELOPT, "input_scale")
        return super().get_quant_method(layer, prefix)


class FusionMoeMixedConfig(_Config, ModelOptMixedPrecisionConfig):
    """vLLM's configuration of a checkpoint that names a format for each layer: this library has
    what is in NVFP4, as with `FusionMoeModelOptConfig`; vLLM the rest, experts in FP8 too.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """vLLM's own method, except for experts in NVFP4, and on CPUs for such linear layers."""
        named = None if self.is_layer_excluded(prefix) else self._resolve_quant_algo(prefix)
        if named in ALGORITHMS and isinstance(layer, RoutedExperts):
            return FusionMoeModelOptMethod(self.nvfp4_config, layer.moe_config)
        if named in ALGORITHMS and is_linear_on_cpu(layer):
            return linear_method(layer, prefix, MODELOPT, "input_scale")
        return super().get_quant_method(layer, prefix)
