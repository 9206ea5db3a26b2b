"""Products over groups: run g of the rows with matrix g. All accumulate in float32; rows past the last end come out as zeros.

    grouped_mm     a [M/g, K], w [G, N, K] -> f32[M/g, N]     contracts K
    grouped_mm_t   a [M/g, N], w [G, N, K] -> f32[M/g, K]     contracts N: the gradient of `a`, weights as they are stored
    grouped_outer  a [M/g, N], b [M/g, K]  -> f32[G, N, K]    contracts rows: the gradient of `w`; an empty group is zero
    group_add      y [M/g, N], bias [G, N] -> [M/g, N]

w is of any encoding, nvfp4[G, N, K] say, or a float tensor; it is dequantized a few groups at a time.
a may be nvfp4[M/g, K]; a_layout and w_layout say how the block scales of the two are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...encodings import Quantized, dequantize, find
from ...errors import DtypeError, ShapeError
from ...groups import check_ends, row_groups
from ..core import Op, OpKind, Value
from ..types import TensorType, dtype_name, plain
from .quantized import encoded, linear
from .rules import Types, need_dtype, need_partition, need_rank, need_same
from .shape import elements

_FLOATS = ("f32", "bf16", "f16")  # what float32 holds exactly
_PANEL = 2**21  # elements that are decoded at once


def _operands(a: TensorType, w: TensorType, ends: TensorType, contract: int, w_layout: str) -> None:
    need_rank("a", a, 2)
    need_rank("w", w, 3)
    for name, type in (("a", a), ("w", w)):
        need_dtype(name, type, *_FLOATS, *encoded())
    rows = need_partition("a", a, ends)
    need_same("group count", "w", w.shape[0], "ends", rows.groups.count)
    need_same("contracted size", f"a {a}", a.shape[1], f"w {w}", w.shape[contract])
    if w.layout != w_layout:
        raise ShapeError(f"w is {w}", expected=f"the layout {w_layout}", todo="w_layout states it")


def _mm_type(a: TensorType, w: TensorType, ends: TensorType, a_layout: str = "linear", w_layout: str = "linear") -> Types:
    _operands(a, w, ends, 2, w_layout)
    if a.layout != a_layout:
        raise ShapeError(f"a is {a}", expected=f"the layout {a_layout}", todo="fd.ops.relayout changes it, a_layout states it")
    return (TensorType((a.shape[0], w.shape[1]), "f32"),)


def _mm_t_type(a: TensorType, w: TensorType, ends: TensorType, w_layout: str = "linear") -> Types:
    _operands(a, w, ends, 1, w_layout)
    if a.quantized:
        raise DtypeError(f"a is {a}", expected="floats: the blocks of a run along N, which is contracted")
    return (TensorType((a.shape[0], w.shape[2]), "f32"),)


def _outer_type(a: TensorType, b: TensorType, ends: TensorType) -> Types:
    rows = need_partition("a", a, ends)
    need_partition("b", b, ends)
    need_dtype("a", a, *_FLOATS)
    need_dtype("b", b, *_FLOATS)
    return (TensorType((rows.groups.count, a.shape[1], b.shape[1]), "f32"),)


def _add_type(y: TensorType, bias: TensorType, ends: TensorType) -> Types:
    need_rank("y", y, 2)
    need_rank("bias", bias, 2)
    need_dtype("bias", bias, y.dtype)
    rows = need_partition("y", y, ends)
    need_same("group count", "bias", bias.shape[0], "ends", rows.groups.count)
    need_same("N", f"bias {bias}", bias.shape[1], f"y {y}", y.shape[1])
    return (y,)


def _runs(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row after the last) of every run that is not empty. Reads the ends: this is the reference."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, start, end
        start = end


def _matrices(w: Any, groups: Sequence[int], layout: str) -> Iterator[torch.Tensor]:
    """The matrices of these groups in float32, decoded a panel at a time: never all of a large weight."""
    if not isinstance(w, Quantized):
        yield from (_plain(w[group], layout).float() for group in groups)
        return
    step = max(1, _PANEL // (w.shape[-2] * w.shape[-1]))
    for first in range(0, len(groups), step):
        panel = torch.tensor(groups[first : first + step], device=w.device)
        yield from dequantize(linear(w.of(_rows(t, panel) for t in w), w.encoding, layout))


def _plain(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    return linear(matrix, find(dtype_name(matrix.dtype)), layout) if layout != "linear" else matrix


def _rows(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8).index_select(0, at).view(t.dtype) if t.element_size() == 1 else t.index_select(0, at)


def _mm(a: Any, w: Any, ends: torch.Tensor, *, transposed: bool, a_layout: str = "linear", w_layout: str = "linear") -> tuple[torch.Tensor]:
    if isinstance(a, Quantized):
        a = dequantize(linear(a, a.encoding, a_layout, ends))
    check_ends(ends, a.shape[0], "ends")
    _, n, k = w.shape
    out = torch.zeros(a.shape[0], k if transposed else n, device=a.device)
    runs = list(_runs(ends))
    for (_, start, end), matrix in zip(runs, _matrices(w, [group for group, *_ in runs], w_layout), strict=True):
        out[start:end] = a[start:end].float() @ (matrix if transposed else matrix.T)
    return (out,)


def _outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
    check_ends(ends, a.shape[0], "ends")
    out = torch.zeros(len(ends), a.shape[1], b.shape[1], device=a.device)
    for group, start, end in _runs(ends):
        out[group] = a[start:end].float().T @ b[start:end].float()
    return (out,)


def _add(y: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
    """Rows past the last end stay as they are."""
    padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
    return (y + padded.index_select(0, row_groups(ends, y.shape[0])),)


def _mm_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    a, w, ends = op.values
    at = {name: layout for name, layout in op.attrs.items() if name == "w_layout"}
    da = None if a.type.quantized else fd.ops.cast(fd.ops.grouped_mm_t(dy, w, ends, **at), dtype=a.type.dtype)
    dw = None if w.type.quantized else fd.ops.cast(fd.ops.grouped_outer(dy, a, ends), dtype=w.type.dtype)
    return [da, dw, None]


def _add_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    y, bias, ends = op.values
    ones = fd.ops.partition(fd.ops.full(shape=(plain(y.type.shape[0]), 1), fill_value=1.0, dtype="f32"), ends)
    total = fd.ops.reshape(fd.ops.grouped_outer(ones, dy, ends), new_shape=bias.type.shape)
    return [dy, fd.ops.cast(total, dtype=bias.type.dtype), None]


def _product_flops(op: Op) -> Any:
    """2 * M * N * K: the rows of the first operand, and the matrices of the second operand or of the result."""
    a, w = (v.type for v in op.values[:2])
    matrices = w if len(w.shape) == 3 else op.outputs[0].type
    return 2 * plain(a.shape[0]) * elements(matrices.shape[1:])


TABLE = (
    OpKind("grouped_mm", _mm_type, partial(_mm, transposed=False), _mm_grad, flops=_product_flops, role="grouped"),
    OpKind("grouped_mm_t", _mm_t_type, partial(_mm, transposed=True), flops=_product_flops, role="grouped"),
    OpKind("grouped_outer", _outer_type, _outer, flops=_product_flops, role="grouped"),
    OpKind("group_add", _add_type, _add, _add_grad, role="grouped_add"),
)
