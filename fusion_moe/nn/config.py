"""How models are converted: a configuration for each format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..encodings import ENCODINGS, FP8, INT4, MXFP4, NVFP4, Encoding, check_rule
from ..encodings.search import usual_rule
from ..errors import OptionError, need_one_of
from ..messages import check_skip
from ..target import ACTIVATION_FORMATS

WEIGHTS = ("packed", "fp8", "both")


@dataclass(frozen=True)
class QuantizationConfig:
    """How weights are quantized and computed; each format has its own class.

    Args:
        activation_format: "bf16", "nvfp4" (compute capability 10.0 only, weights in NVFP4), "int8"
            (CPUs only, weights in NVFP4 or MXFP4) or "fp8" (compute capability 8.9 or higher; where
            weights are read in FP8, rows of 16 bits elsewhere).
        weights: what kernels read: "packed", the weights as they are stored; "fp8", weights that
            are requantized to FP8 once; or "both", as `prepare_` says.
        scales: how the scale of a block is chosen: "max", from its largest magnitude, the bytes of
            nvidia-modelopt in NVFP4; "four_over_six" (NVFP4), that one or 6/4 of it; or "mse"
            (NVFP4, MXFP4, INT4), that one or one of its neighbours. The last two take what has the
            least squared error. `update_weights_` rounds by the same rule.
        skip, linear: which parts of a model are quantized, as in `quantize_`; also while it is
            loaded.

    Raises:
        OptionError: for any other activation_format, weights or scales, or a skip that is no list.
        UnsupportedError: for scales that the format does not have.
    """

    # by which transformers finds the quantizer for a quantization_config
    quant_method: ClassVar[str] = "fusion_moe"
    encoding: ClassVar[Encoding]

    activation_format: str = "bf16"
    weights: str = "packed"
    scales: str = "max"
    skip: Sequence[str] = ()
    linear: bool = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_skip(self.skip, None, where)
        object.__setattr__(self, "skip", tuple(self.skip))
        need_one_of("activation_format", self.activation_format, ACTIVATION_FORMATS, where=where)
        need_one_of("weights", self.weights, WEIGHTS, where=where)
        check_rule(self.scales, self.encoding, where)

    def to_dict(self) -> dict[str, Any]:
        """The entries for config.json."""
        return {"quant_method": self.quant_method, "encoding": self.encoding.name, **asdict(self)}


@dataclass(frozen=True)
class NVFP4Config(QuantizationConfig):
    """NVFP4: 4.5 bits a weight. Arguments as of `QuantizationConfig`."""

    encoding = NVFP4
    scales: str = usual_rule(NVFP4)


@dataclass(frozen=True)
class MXFP4Config(QuantizationConfig):
    """MXFP4: 4.25 bits a weight. Arguments as of `QuantizationConfig`."""

    encoding = MXFP4
    scales: str = usual_rule(MXFP4)


@dataclass(frozen=True)
class INT4Config(QuantizationConfig):
    """INT4 in groups of 32: 4.5 bits a weight. Arguments as of `QuantizationConfig`."""

    encoding = INT4
    scales: str = usual_rule(INT4)


@dataclass(frozen=True)
class FP8Config(QuantizationConfig):
    """FP8 (E4M3) with a scale for 128 x 128 weights: 8 bits a weight. Arguments as of
    `QuantizationConfig`.
    """

    encoding = FP8
    scales: str = usual_rule(FP8)


CONFIGS: dict[str, type[QuantizationConfig]] = {
    cls.encoding.name: cls for cls in (NVFP4Config, MXFP4Config, INT4Config, FP8Config)
}


def config_of(argument: str | QuantizationConfig, where: str) -> QuantizationConfig:
    """The configuration for a format's name, or the one that is given. OptionError for others."""
    if isinstance(argument, QuantizationConfig):
        return argument
    if not isinstance(argument, str):
        known = (*CONFIGS, *(f"{cls.__name__}()" for cls in CONFIGS.values()))
        raise OptionError(
            f"config = {argument!r}", expected=f"one of {', '.join(known)}", where=where
        )
    if argument in ENCODINGS and argument not in CONFIGS:
        raise OptionError(
            f"config = {argument!r}",
            expected=f"one of {', '.join(CONFIGS)}",
            todo="subclass fusion_moe.nn.QuantizationConfig for it, and pass that",
            where=where,
        )
    need_one_of("config", argument, CONFIGS, where=where)
    return CONFIGS[argument]()
