"""The installed nvFuser. It is imported at first use, never with fusion_moe."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from ...errors import UnsupportedError
from ...messages import install

# The IR's dtypes by nvFuser's names. There are no 8-bit integers.
DTYPES = {
    "f64": "Double",
    "f32": "Float",
    "bf16": "BFloat16",
    "f16": "Half",
    "f8e4m3": "Float8_e4m3fn",
    "f8e5m2": "Float8_e5m2",
    "f8e8m0": "Float8_e8m0fnu",
    "i64": "Int",
    "i32": "Int32",
    "bool": "Bool",
}


def installed() -> bool:
    """Whether nvFuser can be found; nothing is imported."""
    return find_spec("nvfuser_direct") is not None


@cache
def nvfuser() -> Any:
    """The module nvfuser_direct. UnsupportedError, with what to install, where it is missing or
    does not fit the installed torch.
    """
    todo = f"{install('nvfuser')} (Linux, Python 3.10 or 3.12, torch 2.10)"
    if not installed():
        raise UnsupportedError("nvFuser is not installed", todo=todo)
    try:
        import nvfuser_direct
    except ImportError as error:  # an undefined symbol: it was built for another torch
        raise UnsupportedError(
            f"nvFuser does not load: {error}", expected="a build for the installed torch", todo=todo
        ) from error
    return nvfuser_direct


def why_missing() -> str:
    """Why nvFuser cannot print definitions; "" if it can."""
    try:
        nvfuser()
    except UnsupportedError as error:
        return str(error)
    return ""


def dtype(name: str) -> Any:
    """nvFuser's data type of a dtype of the IR, or by its own name."""
    return getattr(nvfuser().DataType, DTYPES.get(name, name))
