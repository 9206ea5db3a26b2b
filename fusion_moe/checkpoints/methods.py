"""Which quantization methods are supported, by a directory's configuration, and the error message
for each that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..encodings import INTEGERS, ROW
from ..errors import UnsupportedError
from .headers import shown
from .integers import Packing

# for each method an entry of its configuration, with those around it, and the values that it may
# have
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "modelopt": (
        "quant_algo",
        (
            "NVFP4",
            "W4A16_NVFP4",
            "FP8",
            "FP8_PER_CHANNEL_PER_TOKEN",
            "FP8_PB_WO",
            "MIXED_PRECISION",
        ),
    ),
    "compressed-tensors": (
        "format",
        (
            "nvfp4-pack-quantized",
            "mxfp4-pack-quantized",
            "pack-quantized",
            "float-quantized",
            "mixed-precision",
        ),
    ),
    "mxfp4": ("", ("None",)),
    "fp8": ("weight_block_size", ("[128, 128]", "None")),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2", "None")),
    "awq": ("version", ("gemm", "None")),
    "auto-round": (
        "packing_format",
        ("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq"),
    ),
    "quark": ("global_quant_config.weight.dtype", ("fp4", "fp8_e4m3", "None")),
    "bitsandbytes": ("bnb_4bit_quant_type", ("nf4",)),
}
# entries about rotations, of weights or of activations
_ROTATIONS = ("transform_config", "rotation_config", "spinquant_config", "algo_config")
_SPELLINGS = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
    "intel/auto-round": "auto-round",
}


def method_of(quantization: Mapping[str, Any], where: str = "") -> str:
    """The `quant_method`, one of METHODS; "" if nothing is quantized. UnsupportedError for another
    one, or for unsupported settings.

    The tensors decide how each weight is stored. A method only says what they leave open, such as
    the size of FP8's blocks.
    """
    if not quantization:
        return ""
    method = quantization.get("quant_method")
    if method is None and "producer" in quantization:  # early versions of ModelOpt wrote none
        method = "modelopt"
    method = _spelled(method)
    if method not in [*METHODS]:
        why = ": GGUF is another kind of file" if "gguf" in str(method).lower() else ""
        raise UnsupportedError(
            f"quant_method {shown(method)}{why}",
            expected=f"one of {', '.join(METHODS)}",
            todo="take the checkpoint in one of these, or in bfloat16, and quantize that",
            where=where,
        )
    key, values = METHODS[str(method)]
    value: Any = quantization
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else value
    if str(value).lower() not in [known.lower() for known in values]:
        known = ", ".join(known for known in values if known != "None")
        raise UnsupportedError(f"{key} {shown(value)}", expected=f"one of {known}", where=where)
    for weights in _integers(quantization):
        _check_integers(weights, where)
    if rotations := [entry for entry in _ROTATIONS if _rotates(quantization.get(entry))]:
        raise UnsupportedError(
            f"{rotations[0]} {shown(quantization[rotations[0]])}",
            expected="no rotation of activations: only those of weights are in their numbers",
            todo="take a checkpoint that was made without, or quantize the model in floats",
            where=where,
        )
    return str(method)


def _spelled(method: Any) -> Any:
    """A `quant_method` as METHODS has it."""
    return _SPELLINGS.get(method, method) if isinstance(method, str) else method


def _rotates(entry: Any) -> bool:
    """Whether an entry asks for rotations of activations while a model runs: where
    compressed-tensors does not say `weight_input` or `weight_output`, and of Quark's and
    AutoRound's R1 to R4 those that are not merged into weights.
    """
    left = [entry]
    while left:  # no recursion: a configuration may be nested as deep as Python reads
        value = left.pop()
        pairs = list(value.items()) if isinstance(value, Mapping) else []
        left += [inner for _, inner in pairs] + (value if isinstance(value, list) else [])
        for key, inner in pairs:
            online = inner is True and (key in ("r3", "r4") or key.startswith("online"))
            place = key == "location" and not str(inner).startswith("weight_")
            if online or place or key == "hadamard_type":
                return True
    return False


def packing_of(quantization: Mapping[str, Any]) -> Packing:
    """What a configuration that `method_of` takes says of integers."""
    groups = [(w["num_bits"], _group(w)) for w in _integers(quantization)]
    bits, size = (quantization.get(key) for key in ("bits", "group_size"))
    if not groups and type(bits) is int and type(size) is int:
        groups = [(bits, size if size > 0 else ROW)]
    first = quantization.get("checkpoint_format") in (None, "gptq") and quantization.get(
        "packing_format"
    ) in (None, "auto_round:auto_gptq")
    method = _spelled(quantization.get("source", quantization.get("quant_method")))
    awq = "awq" in f"{method} {quantization.get('packing_format')}"
    return Packing(
        tuple(groups) or Packing.groups,
        quantization.get("sym") is True,
        int(first),
        awq if method in ("awq", "gptq", "auto-round") else None,
    )


def _integers(quantization: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What compressed-tensors says of each group of modules with weights in integers."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type") == "int":
            yield weights


def _group(weights: Mapping[str, Any]) -> Any:
    return ROW if weights.get("strategy") == "channel" else weights.get("group_size")


def _check_integers(weights: Mapping[str, Any], where: str) -> None:
    bits, group, symmetric = weights.get("num_bits"), _group(weights), weights.get("symmetric")
    name = f"{'' if symmetric in (True, None) else 'u'}int{bits}"
    if not any((name, group) == known[:2] for known in INTEGERS):
        actual = ", ".join(
            f"{key} {shown(weights.get(key))}"
            for key in ("num_bits", "strategy", "group_size", "symmetric")
        )
        raise UnsupportedError(
            f"integers with {actual}",
            expected="4 bits, or 8 symmetric ones, in groups of 32, 64, 128 or for channels",
            where=where,
        )
