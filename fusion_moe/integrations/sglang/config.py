"""The quantization "fusion_moe": which of SGLang's configurations reads a checkpoint, with this
library's experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import sglang
from sglang.srt.layers import quantization
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import get_device
from sglang.srt.server_args import QUANTIZATION_CHOICES

from ...errors import UnsupportedError
from ..serving import NAME, AnyDtype, Chooser
from .experts import FusionMoeModelOptMethod, FusionMoeMxfp4Method

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_TESTED = "0.5.23"
logger = logging.getLogger(__name__)


class FusionMoeModelOptConfig(AnyDtype, ModelOptFp4Config):
    """SGLang's configuration of ModelOpt's NVFP4, with this library's experts. It keeps SGLang's
    name, which SGLang's weight loader checks.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """SGLang's own method, except for experts. UnsupportedError for an NVFP4 linear layer on a
        CPU.
        """
        if isinstance(layer, FusedMoE):
            return None if self.is_layer_excluded(prefix) else FusionMoeModelOptMethod(self)
        method = super().get_quant_method(layer, prefix)
        if (
            isinstance(layer, LinearBase)
            and not isinstance(method, UnquantizedLinearMethod)
            and get_device().device == "cpu"
        ):
            actual, todo = "a linear layer in NVFP4 on a CPU", "quantize experts alone"
            raise UnsupportedError(
                actual, expected="one in floats, or a GPU", todo=todo, where=prefix
            )
        return method


class FusionMoeMxfp4Config(AnyDtype, Mxfp4Config):
    """SGLang's configuration of MXFP4, with this library's experts. It keeps SGLang's name, which
    SGLang's model of gpt-oss checks.
    """

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """SGLang's own method, except for experts."""
        if isinstance(layer, FusedMoE):
            return FusionMoeMxfp4Method(prefix)
        return super().get_quant_method(layer, prefix)


class FusionMoeConfig(Chooser, QuantizationConfig):
    """What SGLang finds under the name "fusion_moe". `from_config` returns the checkpoint method's
    configuration, and SGLang asks that one everything else.
    """

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None
    ) -> str | None:
        """The name, if the user gave it: SGLang's own methods keep all other checkpoints."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationConfig:
        """The configuration of a checkpoint; UnsupportedError for an unsupported method."""
        if sglang.__version__ != _TESTED:
            logger.warning(
                "fusion_moe was tested with SGLang %s, not with %s", _TESTED, sglang.__version__
            )
        method = config.get("quant_method") or "modelopt"  # hf_quant_config.json has none
        algorithm = str(config.get("quantization", config).get("quant_algo", "")).upper()
        if method.startswith("modelopt") and algorithm in _ALGORITHMS:
            return FusionMoeModelOptConfig.from_config(dict(config))
        if method == "mxfp4":
            return FusionMoeMxfp4Config.from_config(dict(config))
        actual = f"quant_method {method!r}" + (f", quant_algo {algorithm}" if algorithm else "")
        raise UnsupportedError(
            actual,
            expected="ModelOpt's NVFP4 or W4A16_NVFP4, or MXFP4",
            todo=f"leave out --quantization {NAME}",
            where="SGLang",
        )

    @staticmethod
    def get_config_filenames() -> list[str]:
        """What older exports of ModelOpt have beside config.json."""
        return ["hf_quant_config.json"]

    def get_scaled_act_names(self) -> Any:
        """Never asked."""
        raise NotImplementedError


def register_config() -> None:
    """Registers the quantization with SGLang; may be called more than once in a process.

    It comes first: SGLang takes the first method that wants a checkpoint, and ModelOpt's wants its
    own whatever the user says.
    """
    for methods in quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS:
        others = {name: method for name, method in methods.items() if name != NAME}
        methods.clear()
        methods.update({NAME: FusionMoeConfig, **others})
    if NAME not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append(NAME)
