"""The quantization "fusion_moe": which of vLLM's configurations reads a checkpoint, and whether the
user asked for it.

Registering imports little of vLLM: its quantization modules are imported once one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..errors import UnsupportedError
from .log import NAME, logger

_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")  # vLLM renames gpt-oss's
_READ = "ModelOpt's NVFP4 and W4A16_NVFP4, compressed-tensors, or MXFP4"


class FusionMoeConfig(QuantizationConfig):
    """What vLLM finds under the name "fusion_moe". Never instantiated: `from_config` returns the
    checkpoint method's configuration.
    """

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """The name, if the user gave it: vLLM's own methods keep all other checkpoints. Logs a line
        if vLLM lacks a method for it.
        """
        if user_quant == NAME:
            return NAME
        if user_quant is None and _of_experts_on_cpu(hf_quant_cfg):
            logger.info(
                "vLLM has no NVFP4 and MXFP4 experts for CPUs; fusion_moe has: "
                "--quantization fusion_moe"
            )
        return None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The configuration of a checkpoint; UnsupportedError for an unsupported method."""
        # hf_quant_config.json has none
        method = config.get("quant_method") or ("modelopt" if "quantization" in config else None)
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
        found = f"quant_method {method!r}" + (
            f", quant_algo {_algorithm(config)}" if method == "modelopt" else ""
        )
        raise UnsupportedError(
            found, expected=_READ, todo="leave out --quantization fusion_moe", where="vLLM"
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The file that older exports of ModelOpt have instead of a quantization_config in
        config.json.
        """
        return ["hf_quant_config.json"]

    @classmethod
    def get_min_capability(cls) -> int:
        """Never asked: vLLM asks the result of `from_config`."""
        raise NotImplementedError

    def get_name(self) -> str:
        """The name of the quantization."""
        return NAME

    def get_supported_act_dtypes(self) -> Any:
        """Never asked: vLLM asks the result of `from_config`."""
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Never asked: vLLM asks the result of `from_config`."""
        raise NotImplementedError


def register_config() -> None:
    """Registers the quantization with vLLM; may be called more than once in a process."""
    register_quantization_config(NAME)(FusionMoeConfig)


def _algorithm(config: Mapping[str, Any]) -> str:
    """ModelOpt's quant_algo, from config.json or hf_quant_config.json."""
    return str(config.get("quantization", config).get("quant_algo", "")).upper()


def _of_experts_on_cpu(config: Mapping[str, Any]) -> bool:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    if config.get("quant_method") in _MXFP4 or "NVFP4" in _algorithm(config):
        return True
    return any(name in str(config.get("format", "")) for name in ("nvfp4", "mxfp4"))
