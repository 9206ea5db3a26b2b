"""The quantization "fusion_moe": which of vLLM's configurations reads a checkpoint, and whether the
user asked for it.

Registering imports little of vLLM: its quantization modules are imported once one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import vllm
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ...errors import UnsupportedError
from ..serving import NAME, Chooser
from .log import logger

# by quant_method, and by quant_algo in that of ModelOpt
_READERS: dict[tuple[str | None, str], str] = {
    ("compressed-tensors", ""): "compressed_tensors:FusionMoeCompressedTensorsConfig",
    ("modelopt", "NVFP4"): "modelopt:FusionMoeModelOptConfig",
    ("modelopt", "W4A16_NVFP4"): "modelopt:FusionMoeModelOptConfig",
    ("modelopt", "MIXED_PRECISION"): "modelopt:FusionMoeMixedConfig",
    ("modelopt", "FP8"): "modelopt:FusionMoeModelOptFp8Config",
    ("fp8", ""): "fp8:FusionMoeFp8Config",
    ("mxfp4", ""): "mxfp4:FusionMoeMxfp4Config",
    ("gpt_oss_mxfp4", ""): "mxfp4:FusionMoeGptOssConfig",  # vLLM renames gpt-oss's "mxfp4"
    ("deepseek_v4_fp8", ""): "deepseek_v4:FusionMoeDeepseekV4Config",  # and DeepSeek-V4's "fp8"
}
_TESTED = ("0.32", "0.33")
_READ = (
    "ModelOpt's NVFP4, W4A16_NVFP4, FP8 and MIXED_PRECISION, compressed-tensors, MXFP4, FP8, or "
    "DeepSeek-V4"
)


class FusionMoeConfig(Chooser, QuantizationConfig):
    """What vLLM finds under the name "fusion_moe". `from_config` returns the checkpoint method's
    configuration; vLLM makes this one for a directory that says nothing of quantization.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """8.0, as of this library's kernels."""
        return 80

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Experts in floating point by this library, all else by vLLM."""
        from . import floats

        return floats.method(layer)

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
        algorithm = _algorithm(config) if method == "modelopt" else ""
        if reader := _READERS.get((method, algorithm)):
            return resolve_name(f"{__package__}.{reader}").from_config(dict(config))
        actual = f"quant_method {method!r}" + (f", quant_algo {algorithm}" if algorithm else "")
        raise UnsupportedError(
            actual, expected=_READ, todo="leave out --quantization fusion_moe", where="vLLM"
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
    vLLM has no selection bias. vLLM has another name for its layers for multi-token prediction.
    """
    if getattr(hf_config, "model_type", None) in ("deepseek_v3", "deepseek_mtp"):
        hf_config.topk_method = getattr(hf_config, "topk_method", "noaux_tc")


def _algorithm(config: Mapping[str, Any]) -> str:
    """ModelOpt's quant_algo, from config.json or hf_quant_config.json."""
    return str(config.get("quantization", config).get("quant_algo", "")).upper()


def _nvfp4_on_cpu(config: Mapping[str, Any]) -> bool:
    from vllm.platforms import current_platform

    named = _algorithm(config), str(config.get("format", "")).upper()
    return current_platform.is_cpu() and any("NVFP4" in name for name in named)
