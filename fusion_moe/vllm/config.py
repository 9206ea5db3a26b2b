"""The quantization "fusion_moe": which of vLLM's configurations reads a checkpoint, and whether it is asked for.

Registering imports little of vLLM: its quantization modules are imported once one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..errors import UnsupportedError
from .log import logger

NAME = "fusion_moe"
_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")  # vLLM renames gpt-oss's
_READ = "ModelOpt's NVFP4 and W4A16_NVFP4, compressed-tensors, or MXFP4"


class FusionMoeConfig(QuantizationConfig):
    """What vLLM asks by the name "fusion_moe". No instance is made: `from_config` returns the configuration of the checkpoint's method."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:  # fmt: skip
        """The name, if the user gave it: no checkpoint is taken from vLLM's own methods. Else a line in the log where those have none."""
        if user_quant == NAME:
            return NAME
        if user_quant is None and _of_experts_on_cpu(hf_quant_cfg):
            logger.info("vLLM has no NVFP4 and MXFP4 experts for CPUs; fusion_moe has: --quantization fusion_moe")
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The configuration of a checkpoint; UnsupportedError for a method that is not read."""
        method = config.get("quant_method") or ("modelopt" if "quantization" in config else None)  # hf_quant_config.json names none
        if method == "compressed-tensors":
            from .compressed_tensors import FusionMoeCompressedTensorsConfig

            return FusionMoeCompressedTensorsConfig.from_config(dict(config))
        if method == "modelopt" and _algorithm(config) in ("NVFP4", "W4A16_NVFP4"):
            from .modelopt import FusionMoeModelOptConfig

            return FusionMoeModelOptConfig.from_config(dict(config))
        if method in _MXFP4:
            from .mxfp4 import FusionMoeGptOssConfig, FusionMoeMxfp4Config

            made = FusionMoeMxfp4Config if method == "mxfp4" else FusionMoeGptOssConfig
            return made.from_config(config)
        found = f"quant_method {method!r}" + (f", quant_algo {_algorithm(config)}" if method == "modelopt" else "")
        raise UnsupportedError(found, expected=_READ, todo="leave out --quantization fusion_moe", where="vLLM")

    @staticmethod
    def get_config_filenames() -> list[str]:
        """What older exports of ModelOpt have in place of a quantization_config in config.json."""
        return ["hf_quant_config.json"]

    @classmethod
    def get_min_capability(cls) -> int:
        """As of `from_config`'s, which are asked."""
        raise NotImplementedError

    def get_name(self) -> str:
        """The name of the quantization."""
        return NAME

    def get_supported_act_dtypes(self) -> Any:
        """As of `from_config`'s, which are asked."""
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """As of `from_config`'s, which are asked."""
        raise NotImplementedError


def register_config() -> None:
    """Registers the quantization with vLLM, once in a process or more often."""
    register_quantization_config(NAME)(FusionMoeConfig)


def _algorithm(config: Mapping[str, Any]) -> str:
    """ModelOpt's quant_algo, of config.json or of hf_quant_config.json."""
    return str(config.get("quantization", config).get("quant_algo", "")).upper()


def _of_experts_on_cpu(config: Mapping[str, Any]) -> bool:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    if config.get("quant_method") in _MXFP4 or "NVFP4" in _algorithm(config):
        return True
    return any(name in str(config.get("format", "")) for name in ("nvfp4", "mxfp4"))
