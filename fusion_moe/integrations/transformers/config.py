"""Quantization configurations in transformers' form: from a dictionary in config.json, or given by
the caller who loads a model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoints import TEXT_MODEL, own_entries
from ...checkpoints.configurations import QUANTIZATION
from ...encodings import FP8
from ...errors import CheckpointError, UnsupportedError
from ...messages import CONFIG
from ...nn import config as nn_config

# entries about a token's experts, their number, and LongCat's experts without weights
_OF_EXPERTS = (
    *("num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts"),
    "zero_expert_num",
)
IN_4BIT = "load_in_4bit"  # an entry of bitsandbytes' directories


class ModelOptConfig(QuantizationConfigMixin):
    """The `quantization_config` of a directory, kept unchanged. The directory's tensors decide what
    is quantized.
    """

    def __init__(self, quant_method: str = "modelopt", **entries: Any):
        self.quant_method = quant_method
        self.__dict__.update(entries)

    @property
    def method(self) -> str:
        """The quantization method, which decides the tensor names in the files."""
        return self.__dict__.get("source", self.quant_method)

    def original(self) -> dict[str, Any]:
        """The configuration as the directory has it, even if another `quant_method` led to this
        class.
        """
        return {
            **{k: v for k, v in self.to_dict().items() if k not in ("source", "experts_config")},
            "quant_method": self.method,
            **({IN_4BIT: True} if self.method == "bitsandbytes" else {}),
        }

    @property
    def quantizes(self) -> bool:
        """Whether experts in 8-bit floats are rounded to fewer bits: if the caller says how experts
        are computed, and not that they are read as FP8.
        """
        asked = self.experts if "experts_config" in self.__dict__ else None
        return asked is not None and asked.weights == "packed" and asked.encoding != FP8

    @property
    def scales_in_files(self) -> str:
        """The rule by which scales in the directory were chosen, as far as it says."""
        return str(own_entries(self.__dict__).get("scales", "max"))

    @property
    def experts(self) -> nn_config.QuantizationConfig:
        """How experts are computed: as the caller says, else as the directory says."""
        texts = dict(self.__dict__.get("experts_config", own_entries(self.__dict__)))
        return nn_config.CONFIGS[texts.pop("encoding", "nvfp4")](**texts)


class NVFP4Config(nn_config.NVFP4Config, QuantizationConfigMixin):
    """`quantization_config=NVFP4Config()` quantizes experts while a model in floating point is
    loaded, and linear layers with linear=True, bit for bit as `quantize_`.
    """


class MXFP4Config(nn_config.MXFP4Config, QuantizationConfigMixin):
    """As this module's NVFP4Config, for MXFP4: in place, or as a model is loaded."""


class INT4Config(nn_config.INT4Config, QuantizationConfigMixin):
    """As this module's NVFP4Config, for INT4: in place, or as a model is loaded."""


class FP8Config(nn_config.FP8Config, QuantizationConfigMixin):
    """As this module's NVFP4Config, for FP8: in place, or as a model is loaded."""


def in_transformers_form(config: nn_config.QuantizationConfig) -> QuantizationConfigMixin:
    """A configuration of ours as an object of the class that transformers wants."""
    classes: tuple[Any, ...] = (NVFP4Config, MXFP4Config, INT4Config, FP8Config)
    cls = next(cls for cls in classes if isinstance(config, cls.__mro__[1]))
    result: QuantizationConfigMixin = cls(**asdict(config))
    return result


def experts_config(asked: Any) -> dict[str, Any] | None:
    """What the caller's `quantization_config` says about the experts of an encoded directory: ours,
    or transformers' FineGrainedFP8Config, by its fields. None for any other.

    UnsupportedError for other blocks than 128 x 128, for scales of activations that a file has, for
    weights that are to become floats, and for skip and linear.
    """
    if isinstance(asked, nn_config.QuantizationConfig):
        if asked.skip or asked.linear:
            raise UnsupportedError(
                "skip or linear for weights that are encoded already",
                expected="them for a model in floats alone",
                where=type(asked).__name__,
            )
        return {"encoding": asked.encoding.name, **asdict(asked)}
    if not hasattr(asked, "activation_scheme") or not hasattr(asked, "weight_block_size"):
        return None
    fields = {"weight_block_size": (128, 128), "activation_scheme": "dynamic", "dequantize": False}
    for name, value in fields.items():
        actual = getattr(asked, name)
        if (tuple(actual) if isinstance(actual, list) else actual) != value:
            raise UnsupportedError(
                f"{name} = {actual!r}", expected=repr(value), where=type(asked).__name__
            )
    return asdict(nn_config.NVFP4Config("fp8", "fp8"))


def check_experts_per_token(model: type, config: Any) -> None:
    """CheckpointError for a configuration by which a token has more experts than there are, or
    none: transformers' routers would say it in torch's words, or choose nothing. model: its class;
    one from elsewhere may choose by other entries.
    """
    if not all(of.__module__.startswith("transformers.") for of in (model, type(config))):
        return
    for part in (config, *(vars(config).get(name) for name in TEXT_MODEL)):
        if not isinstance(part, PreTrainedConfig):
            continue
        there = {name: vars(part).get(part.attribute_map.get(name, name)) for name in _OF_EXPERTS}
        k, *counts, identities = (n if isinstance(n, int) else None for n in there.values())
        experts = next(filter(None, counts), 0) + (identities or 0)
        if experts and k is not None and not 1 <= k <= experts:
            raise CheckpointError(
                f"num_experts_per_tok = {k}", expected=f"1 to {experts}, the experts", where=CONFIG
            )


def set_quantization(config: Any, entry: Any) -> None:
    """Makes `entry` all that a configuration of transformers says about quantization: it goes
    before what the text model's part says.
    """
    for part in (config, *(vars(config).get(name) for name in TEXT_MODEL)):
        for key in QUANTIZATION if isinstance(part, dict) or hasattr(part, "__dict__") else ():
            (part if isinstance(part, dict) else vars(part)).pop(key, None)
    config.quantization_config = entry
