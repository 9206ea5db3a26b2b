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


def agree(found: Any, want: Any, rough: Sequence[bool]) -> None:
    """Asserts that two outcomes are the same: the same error of ours, or outputs of equal types and
    numbers, but for the last bits of those that are rough. 0.0 is -0.0: torch's clamp leaves open
    which it gives.
    """
    if isinstance(found, Exception) or isinstance(want, Exception):
        same = _name(found) == _name(want)
        ours = any(isinstance(v, Error) for v in (found, want))
        assert same or not (ours or "returns" in (_name(found), _name(want))), (found, want)
        return
    for i, (a, b, r) in enumerate(zip(found, want, rough, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"output {i}"
        assert _close(a, b) if r else _same(a, b), f"output {i}: {a} is not {b}"


def _name(v: Any) -> str:
    """The class of an error, for one of ours the one that users know."""
    if not isinstance(v, Exception):
        return "returns"
    known = (c.__name__ for c in type(v).__mro__ if c.__module__ == "fusion_moe.errors")
    return next(known, type(v).__name__)


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
