"""When two ways of running a graph agree: the same error of ours, or the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_moe.errors import Error

_ROUGHLY = {
    torch.float64: 2.0**-10,
    torch.float32: 2.0**-10,
    torch.float16: 2.0**-7,
    torch.bfloat16: 2.0**-5,
}


def outcome(f: Callable[[], Any]) -> Any:
    """What a function gives, or the exception that it raises."""
    try:
        return f()
    except Exception as error:
        return error


def difference(found: Any, want: Any, rough: Sequence[bool]) -> str:
    """What differs between two outcomes, in a few words; "" if they agree. 0.0 is -0.0: torch's
    clamp leaves open which it gives.
    """
    if isinstance(found, Exception) or isinstance(want, Exception):
        return _of_errors(found, want)
    for i, (a, b, r) in enumerate(zip(found, want, rough, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"output {i} is {a.dtype} {list(a.shape)}, not {b.dtype} {list(b.shape)}"
        if not (_close(a, b) if r else _same(a, b)):
            return f"output {i} differs"
    return ""


def _of_errors(found: Any, want: Any) -> str:
    """Both must raise; one of our errors must be of the same class in both."""
    names = [_name(v) for v in (found, want)]
    ours = any(isinstance(v, Error) for v in (found, want))
    if names[0] == names[1] or not (ours or "returns" in names):
        return ""
    said = "; ".join(
        f"{type(v).__name__}: {str(v)[:300]}" for v in (found, want) if isinstance(v, Exception)
    )
    return f"{names[0]} where {names[1]} is right ({said})"


def _name(v: Any) -> str:
    if not isinstance(v, Exception):
        return "returns"
    return next(
        (c.__name__ for c in type(v).__mro__ if c.__module__ == "fusion_moe.errors"),
        type(v).__name__,
    )


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or a.dtype == torch.float8_e4m3fn:
        return _same(a, b) or not a.is_floating_point()
    a, b, by = a.double(), b.double(), _ROUGHLY[a.dtype]
    both = a.isfinite() & b.isfinite()
    most = float(b[both].abs().max()) if both.any() else 0.0
    return bool(((a - b).abs()[both] <= by * max(1.0, most)).all())
