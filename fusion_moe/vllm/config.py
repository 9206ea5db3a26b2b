"""The quantization "fusion_moe": which of vLLM's configurations reads a checkpoint, and whether the
user asked for it.

Registering imports little of vLLM: its quantization modules are imported once one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..errors import UnsupportedError
from ..serving import NAME, Chooser
from .log import logger

_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")  # vLLM renames gpt-oss's
_TESTED = ("0.32", "0.33")
_READ = (
    "ModelOpt's NVFP4, W4A16_NVFP4, FP8 and MIXED_PRECISION, compressed-tensors, MXFP4, FP8, or "
    "DeepSeek-V4"
)


class FusionMoeConfig(Chooser, QuantizationConfig):
    """What vLLM finds under the name "fusion_moe". `from_config` returns the checkpoint method's
    configuration.
    """

    def __init__(self) -> None:
        """UnsupportedError: vLLM makes one for a directory that says nothing of quantization."""
        raise UnsupportedError(
            "a directory in floating point",
            expected=_READ,
            todo="quantize it first: fusion-moe quantize DIRECTORY OUTPUT",
            where=f"vLLM with --quantization {NAME}",
        )

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name, if the user gave it: vLLM's own methods keep all other checkpoints. Logs a line
        if vLLM lacks a method for it.
        """
        if user_quant == NAME:
            _complete(hf_config)
            return NAME
        if user_quant is None and _nvfp4_on_cpu(hf_quant_cfg):
            logger.info(
                "vLLM has no NVFP4 experts for CPUs; fusion_moe has: --quantization fusion_moe"
            )
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The configuration of a checkpoint; UnsupportedError for an unsupported method."""
        if not vllm.__version__.startswith(tuple(f"{version}." for version in _TESTED)):
            tested = " and ".join(_TESTED)
            logger.warning_once(
                "fusion_moe was tested with vLLM %s, not with %s", tested, vllm.__version__
            )
        # hf_quant_config.json has none
        method = config.get("quant_method") or ("modelopt" if "quantization" in config else None)
        if method == "compressed-tensors":
            from .compressed_tensors import FusionMoeCompressedTensorsConfig

            return FusionMoeCompressedTensorsConfig.from_config(dict(config))
        if method == "modelopt":
            from .modelopt import (
                ALGORITHMS,
                FusionMoeMixedConfig,
                FusionMoeModelOptConfig,
                FusionMoeModelOptFp8Config,
            )

            if _algorithm(config) in ALGORITHMS:
                return FusionMoeModelOptConfig.from_config(dict(config))
            if _algorithm(config) == "MIXED_PRECISION":
                return FusionMoeMixedConfig.from_config(dict(config))
            if _algorithm(config) == "FP8":
                return FusionMoeModelOptFp8Config.from_config(dict(config))
        if method == "fp8":
            from .fp8 import FusionMoeFp8Config

            return FusionMoeFp8Config.from_config(dict(config))
        if method in _MXFP4:
            from .mxfp4 import FusionMoeGptOssConfig, FusionMoeMxfp4Config

            made = FusionMoeMxfp4Config if method == "mxfp4" else FusionMoeGptOssConfig
            return made.from_config(config)
        if method == "deepseek_v4_fp8":  # vLLM renames DeepSeek-V4's "fp8"
            from .deepseek_v4 import FusionMoeDeepseekV4Config

            return FusionMoeDeepseekV4Config.from_config(dict(config))
        found = f"quant_method {method!r}" + (
            f", quant_algo {_algorithm(config)}" if method == "modelopt" else ""
        )
        raise UnsupportedError(
            found, expected=_READ, todo="leave out --quantization fusion_moe", where="vLLM"
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: vLLM itself reads the file that older exports of ModelOpt have."""
        return []


def register_config() -> None:
    """Registers the quantization with vLLM; may be called more than once in a process."""
    register_quantization_config(NAME)(FusionMoeConfig)


def _complete(hf_config: Any) -> None:
    """Adds what transformers leaves out when it writes DeepSeek-V3's configuration: without it
    vLLM has no selection bias.
    """
    if getattr(hf_config, "model_type", None) == "deepseek_v3":
        hf_config.topk_method = getattr(hf_config, "topk_method", "noaux_tc")


def _algorithm(config: Mapping[str, Any]) -> str:
    """ModelOpt's quant_algo, from config.json or hf_quant_config.json."""
    return str(config.get("quantization", config).get("quant_algo", "")).upper()


def _nvfp4_on_cpu(config: Mapping[str, Any]) -> bool:
    from vllm.platforms import current_platform

    named = _algorithm(config), str(config.get("format", "")).upper()
    return current_platform.is_cpu() and any("NVFP4" in name for name in named)
