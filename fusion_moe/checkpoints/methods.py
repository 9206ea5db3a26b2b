"""Which quantization methods are supported, by a directory's configuration, and the error message
for each that is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedError
from .headers import shown

# for each method an entry of its configuration, and the values that it may have
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "modelopt": ("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")),
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
}
_SPELLINGS = {
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "compressed_tensors": "compressed-tensors",
}
_INT4 = {"num_bits": 4, "group_size": 32, "symmetric": True}  # the weights of pack-quantized
_REFUSED = {
    "awq": "AWQ has groups of 128 with zero points",
    "gptq": "GPTQ has groups with zero points, of columns in an order of their own",
    "bitsandbytes": "bitsandbytes has tables of 4-bit codes and scales that are quantized "
    "themselves",
    "gguf": "GGUF is another kind of file",
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
    method = _SPELLINGS.get(method, method) if isinstance(method, str) else method
    if method not in [*METHODS]:
        why = next((why for name, why in _REFUSED.items() if name in str(method).lower()), "")
        found = f"quant_method {shown(method)}{f': {why}' if why else ''}"
        todo = "take the checkpoint in one of these, or in bfloat16, and quantize that"
        raise UnsupportedError(
            found, expected=f"one of {', '.join(METHODS)}", todo=todo, where=where
        )
    key, values = METHODS[str(method)]
    value = quantization.get(key)
    if str(value).lower() not in [known.lower() for known in values]:
        known = ", ".join(known for known in values if known != "None")
        raise UnsupportedError(f"{key} {shown(value)}", expected=f"one of {known}", where=where)
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type") == "int":
            entries = {key: weights.get(key) for key in _INT4}
            if entries != _INT4:
                found = ", ".join(f"{key} {shown(value)}" for key, value in entries.items())
                raise UnsupportedError(
                    f"integers with {found}",
                    expected="4 bits, groups of 32, symmetric",
                    where=where,
                )
    return str(method)
