"""Which quantization methods are supported, by a directory's configuration, and the error message
for each that is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedError
from .headers import shown

METHODS = ("modelopt", "compressed-tensors", "mxfp4", "fp8")
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")  # quant_algo of ModelOpt
# format of compressed-tensors
FORMATS = ("nvfp4-pack-quantized", "pack-quantized", "float-quantized", "mixed-precision")
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
    if method not in METHODS:
        why = next((why for name, why in _REFUSED.items() if name in str(method).lower()), "")
        found = f"quant_method {shown(method)}{f': {why}' if why else ''}"
        todo = "take the checkpoint in one of these, or in bfloat16, and quantize that"
        raise UnsupportedError(
            found, expected=f"one of {', '.join(METHODS)}", todo=todo, where=where
        )
    checks = {
        "modelopt": _check_modelopt,
        "compressed-tensors": _check_compressed,
        "fp8": _check_fp8,
    }
    if method in checks:
        checks[method](quantization, where)
    return str(method)


def _check_modelopt(quantization: Mapping[str, Any], where: str) -> None:
    algorithm = quantization.get("quant_algo")
    _check(
        "quant_algo",
        algorithm,
        algorithm.upper() if isinstance(algorithm, str) else algorithm,
        ALGORITHMS,
        where,
    )


def _check_compressed(quantization: Mapping[str, Any], where: str) -> None:
    _check("format", quantization.get("format"), quantization.get("format"), FORMATS, where)
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type") == "int":
            found = {key: weights.get(key) for key in _INT4}
            if found != _INT4:
                said = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
                raise UnsupportedError(
                    f"integers with {said}", expected="4 bits, groups of 32, symmetric", where=where
                )


def _check_fp8(quantization: Mapping[str, Any], where: str) -> None:
    size = quantization.get("weight_block_size") or [128, 128]
    if size != [128, 128]:
        raise UnsupportedError(
            f"FP8 with weight_block_size {shown(size)}", expected="[128, 128]", where=where
        )


def _check(what: str, found: Any, means: Any, known: tuple[str, ...], where: str) -> None:
    if means not in known:
        raise UnsupportedError(
            f"{what} {shown(found)}", expected=f"one of {', '.join(known)}", where=where
        )
