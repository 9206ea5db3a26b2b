"""Checks that layers which are trained make of a call's tensors, beside those of nn/checks.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ..ir.effects import overlap
from ..nn.checks import need_device, need_float


def are_alike(entries: Sequence[object], dims: int) -> bool:
    """Whether entries of a state dict can be stacked: plain tensors with this many dimensions, all
    of one dtype, shape and device.
    """
    kinds = {
        (t.layout, t.dim(), t.dtype, t.shape, t.device) if isinstance(t, Tensor) else None
        for t in entries
    }
    return len(kinds) == 1 and all(kind and kind[:2] == (torch.strided, dims) for kind in kinds)


def need_scales(scales: Tensor | None, x: Tensor, where: str) -> Tensor:
    """scales float[...], one for each row of x [..., K] -> [M]. Raises ShapeError, DtypeError or
    DeviceError.
    """
    lead, flat = x.shape[:-1], (x.numel() // x.shape[-1],)
    if scales is None or (scales.shape != lead and scales.shape != flat):
        raise ShapeError(
            "no scales" if scales is None else f"scales {list(scales.shape)}",
            expected=f"{list(lead)}, one for each row",
            where=where,
        )
    need_float("scales", scales, where)
    need_device("scales", scales, x.device, where)
    return scales.reshape(-1)


def need_buffer(
    name: str,
    buffer: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    where: str,
) -> None:
    """Raises unless a caller's buffer can be written: ShapeError, DtypeError, DeviceError;
    UnsupportedError if autograd tracks it.
    """
    if tuple(buffer.shape) != tuple(shape):
        raise ShapeError(f"{name} {list(buffer.shape)}", expected=str(list(shape)), where=where)
    if buffer.dtype != dtype:
        raise DtypeError(f"{name} is {buffer.dtype}", expected=str(dtype), where=where)
    if buffer.device != device:
        raise DeviceError(f"{name} on {buffer.device}", expected=str(device), where=where)
    if not buffer.is_contiguous():
        raise ShapeError(
            f"{name} {list(buffer.shape)} with strides {list(buffer.stride())}",
            expected="a contiguous tensor",
            where=where,
        )
    if buffer.requires_grad:
        raise UnsupportedError(
            f"{name} requires a gradient",
            expected="memory that autograd does not track",
            todo="detach it",
            where=where,
        )


def need_apart(
    buffers: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]], where: str
) -> None:
    """ShapeError if a buffer overlaps another tensor or an earlier buffer."""
    before = list(others)
    for name, buffer in buffers:
        for other, t in before:
            if overlap(buffer, t):
                raise ShapeError(
                    f"{name} overlaps {other}", expected="memory of its own", where=where
                )
        before.append((name, buffer))
