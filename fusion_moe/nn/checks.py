"""Checks that layers over groups make of a call's tensors before they touch memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError
from ..ir import DTYPES, FLOATS

FLOAT_DTYPES = tuple(DTYPES[name] for name in FLOATS)


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


def need_device(name: str, t: Tensor, device: torch.device, where: str) -> None:
    """DeviceError unless a tensor is on the device of the rows."""
    if t.device != device:
        raise DeviceError(
            f"{name} on {t.device}, rows on {device}",
            expected="one device",
            todo="move it with .to(device)",
            where=where,
        )
