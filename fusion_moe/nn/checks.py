"""Checks that layers over groups make of a call's tensors before they touch memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ..ir import DTYPES, FLOATS
from ..ir.effects import overlap

FLOAT_DTYPES = tuple(DTYPES[name] for name in FLOATS)


def are_alike(entries: Sequence[object], dims: int) -> bool:
    """Whether entries of a state dict can be stacked: plain tensors with this many dimensions, all
    of one dtype, shape and device.
    """
    kinds = {
        (t.layout, t.dim(), t.dtype, t.shape, t.device) if isinstance(t, Tensor) else None
        for t in entries
    }
    return len(kinds) == 1 and all(kind and kind[:2] == (torch.strided, dims) for kind in kinds)


def need_rows(name: str, x: Tensor, width: int, where: str) -> None:
    """ShapeError or DtypeError unless x is float[..., width]."""
    if x.dim() < 1 or x.shape[-1] != width:
        raise ShapeError(
            f"{name} has {x.shape[-1]} features" if x.dim() else f"{name} has no dimensions",
            expected=f"{width}, the in-features of the weights",
            where=where,
        )
    need_float(name, x, where)


def need_narrow_rows(name: str, x: Tensor, width: int, where: str) -> None:
    """As `need_rows`; also DtypeError for float64, by which no quantized weight can be
    multiplied.
    """
    need_rows(name, x, width, where)
    if x.dtype == torch.float64:
        raise DtypeError(
            f"{name} is torch.float64",
            expected="torch.bfloat16, torch.float16 or torch.float32 beside quantized weights",
            todo=f"pass {name}.to(torch.bfloat16)",
            where=where,
        )


def need_slots(x: Tensor, ids: Tensor, w: Tensor, where: str) -> None:
    """Raises unless ids [T, k] and w float[T, k] can be the experts of rows x [T, H] and the
    router's weights for them.
    """
    tokens = {1: 1, 2: ids.shape[0]}.get(ids.dim(), x.shape[0])
    if tokens != x.shape[0] or ids.shape != w.shape:
        raise ShapeError(
            f"top_k_index {list(ids.shape)} and top_k_weights {list(w.shape)} for "
            f"{x.shape[0]} tokens",
            expected="[T, k] each, a row for each token",
            where=where,
        )
    need_float("top_k_weights", w, where)
    for name, t in (("top_k_index", ids), ("top_k_weights", w)):
        need_device(name, t, x.device, where)


def need_float(name: str, t: Tensor, where: str) -> None:
    """DtypeError unless products take the float dtype of t."""
    if t.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"{name} is {t.dtype}",
            expected=f"one of {', '.join(map(str, FLOAT_DTYPES))}",
            todo="quantized weights are frozen: fusion_moe.nn.NVFP4GroupedLinear takes them"
            if name.startswith("weight")
            else "",
            where=where,
        )


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


def need_device(name: str, t: Tensor, device: torch.device, where: str) -> None:
    """DeviceError unless a tensor is on the device of the rows."""
    if t.device != device:
        raise DeviceError(
            f"{name} on {t.device}, rows on {device}",
            expected="one device",
            todo="move it with .to(device)",
            where=where,
        )


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
