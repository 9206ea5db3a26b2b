"""Products over groups: run g of the rows times matrix g. All accumulate in float32; rows past the
last end become zeros.

    grouped_mm     a [M/g, K], w [G, N, K] -> f32[M/g, N]     contracts K
    grouped_mm_t   a [M/g, N], w [G, N, K] -> f32[M/g, K]     contracts N: the gradient of `a`; or a
                                                              product of weights stored [G, K, N]
    grouped_outer  a [M/g, N], b [M/g, K]  -> f32[G, N, K]    contracts rows: the gradient of `w`;
                                                              an empty group is zero
    group_add      y [M/g, N], bias [G, N] -> [M/g, N]
    group_mul      y [M/g, N], scale [G, N] -> [M/g, N]
    group_sum      y [M/g, N]              -> f32[G, N]       the sum of each group's rows: the
                                                              gradient of `bias`; zero if empty

No product or sum reads rows past the last end. f64 operands (both, or neither) give f64: for
checks, only on the reference.

w is in any encoding, such as nvfp4[G, N, K], or a float tensor; it is dequantized a few groups at a
time. a may be nvfp4[M/g, K]; a_layout and w_layout are the layouts of both operands' block scales.
Both operands of each product may be trained in 8 bits, with blocks along the contracted dimension
(eight_bits.py); those in MXFP8 count as their exact bf16 values. With operands="int8" grouped_mm
rounds both to int8 (int8.py); its derivative is that of the unrounded product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...encodings import Quantized, dequantize, find
from ...errors import DtypeError, ShapeError
from ...layouts import check_ends
from ...layouts.groups import row_groups
from ..core import Op, OpKind, Value
from ..types import FLOATS, TensorType, accumulated, dtype_name, elements, plain, wide
from . import eight_bits, int8
from .quantized import encoded, linear
from .rules import Types, need, need_computed, need_dtype, need_partition, need_rank, need_same
from .runs import dequantize_runs, rows_at

_PANEL = 2**21  # how many elements are decoded at once


def _operands(
    a: TensorType, w: TensorType, ends: TensorType, contract: int, w_layout: str, wgrad: str
) -> None:
    need_rank("a", a, 2)
    need_rank("w", w, 3)
    for name, type in (("a", a), ("w", w)):
        need_dtype(name, type, *FLOATS, *encoded())
    rows = need_partition("a", a, ends)
    need_same("group count", "w", w.shape[0], "ends", rows.groups.count)
    need_same("contracted size", f"a {a}", a.shape[1], f"w {w}", w.shape[contract])
    if eight_bits.of_recipe(a, wgrad):
        eight_bits.need_along("a", a, a, -1)
        eight_bits.need_along("w", w, a, contract - 3)
    eight_bits.need_wgrad(a, wgrad)
    if w.layout != w_layout:
        raise ShapeError(f"w is {w}", expected=f"the layout {w_layout}", todo="w_layout states it")


def _summed(a: TensorType, b: TensorType) -> str:
    """The dtype in which a product accumulates."""
    if accumulated(a.dtype) != accumulated(b.dtype):
        raise DtypeError(
            f"the operands are {a} and {b}",
            expected="f64 for both, or for neither",
            todo="cast with fd.ops.cast(x, dtype=...)",
        )
    return accumulated(a.dtype)


def _mm_type(
    a: TensorType,
    w: TensorType,
    ends: TensorType,
    a_layout: str = "linear",
    w_layout: str = "linear",
    wgrad: str = "",
    operands: str = "",
) -> Types:
    """a [M/g, K], w [G, N, K] of any encoding -> f32[M/g, N]: each row times its group's matrix.
    Layouts: how a and w are stored.

    wgrad: for trained operands in 8 bits, what the gradient of w is made from: "mxfp8" or "fp8",
    their own encodings, or "bf16". operands: "int8" rounds floats a and E2M1 codes w.
    """
    _operands(a, w, ends, 2, w_layout, wgrad)
    int8.need_operands(operands, a, w)
    if a.layout != a_layout:
        raise ShapeError(
            f"a is {a}",
            expected=f"the layout {a_layout}",
            todo="fd.ops.relayout changes it, a_layout states it",
        )
    return (TensorType((a.shape[0], w.shape[1]), _summed(a, w)),)


def _mm_t_type(
    a: TensorType, w: TensorType, ends: TensorType, w_layout: str = "linear", wgrad: str = ""
) -> Types:
    """a [M/g, N], w [G, N, K] of any encoding -> f32[M/g, K]: each row times the transposed matrix
    of its group. wgrad: see grouped_mm.
    """
    _operands(a, w, ends, 1, w_layout, wgrad)
    if a.quantized and not wgrad:
        raise DtypeError(
            f"a is {a}", expected="floats: the blocks of a run along N, which is contracted"
        )
    return (TensorType((a.shape[0], w.shape[2]), _summed(a, w)),)


def _outer_type(a: TensorType, b: TensorType, ends: TensorType) -> Types:
    """a [M/g, N], b [M/g, K] -> f32[G, N, K]: the outer products of each group's rows, added; an
    empty group is zero.
    """
    rows = need_partition("a", a, ends)
    need_partition("b", b, ends)
    if eight_bits.family_of(a):
        eight_bits.need_along("a", a, a, -2)
        eight_bits.need_along("b", b, a, -2)
    else:
        need_dtype("a", a, *FLOATS)
        need_dtype("b", b, *FLOATS)
    return (TensorType((rows.groups.count, a.shape[1], b.shape[1]), _summed(a, b)),)


def _add_type(y: TensorType, bias: TensorType, ends: TensorType) -> Types:
    """y [M/g, N] plus bias [G, N] of each row's group; rows past the last end stay unchanged."""
    return _per_group(y, "bias", bias, ends)


def _mul_type(y: TensorType, scale: TensorType, ends: TensorType) -> Types:
    """y [M/g, N] times scale [G, N] of each row's group; rows past the last end stay unchanged."""
    return _per_group(y, "scale", scale, ends)


def _per_group(y: TensorType, name: str, table: TensorType, ends: TensorType) -> Types:
    need_rank("y", y, 2)
    need_rank(name, table, 2)
    need_computed("y", y)
    need_dtype(name, table, y.dtype)
    rows = need_partition("y", y, ends)
    need_same("group count", name, table.shape[0], "ends", rows.groups.count)
    need_same("N", f"{name} {table}", table.shape[1], f"y {y}", y.shape[1])
    return (y,)


def _sum_type(y: TensorType, ends: TensorType) -> Types:
    """y [M/g, N] -> f32[G, N]: the sum of each group's rows; zero for an empty group."""
    need("y", y, 2, *FLOATS)
    rows = need_partition("y", y, ends)
    return (TensorType((rows.groups.count, y.shape[1]), accumulated(y.dtype)),)


def _runs(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row after the last) for every run that is not empty. Reads the ends: only
    for the reference.
    """
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, start, end
        start = end


def _matrices(w: Any, groups: Sequence[int], layout: str) -> Iterator[torch.Tensor]:
    """The matrices of these groups in the accumulation dtype, decoded a few at a time: never all of
    a large weight at once.
    """
    if not isinstance(w, Quantized):
        yield from (wide(_plain(w[group], layout)) for group in groups)
        return
    step = max(1, _PANEL // (w.shape[-2] * w.shape[-1]))
    for first in range(0, len(groups), step):
        panel = torch.tensor(groups[first : first + step], device=w.device)
        panels = linear(w.of(rows_at(t, panel) for t in w), w.encoding, layout)
        yield from wide(dequantize(panels, eight_bits.computed(w.encoding)))


def _plain(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    return linear(matrix, find(dtype_name(matrix.dtype)), layout) if layout != "linear" else matrix


def _mm(
    a: Any,
    w: Any,
    ends: torch.Tensor,
    *,
    transposed: bool,
    a_layout: str = "linear",
    w_layout: str = "linear",
    wgrad: str = "",
    operands: str = "",
) -> tuple[torch.Tensor]:
    if isinstance(a, Quantized):
        a = dequantize(linear(a, a.encoding, a_layout, ends), eight_bits.computed(a.encoding))
    check_ends(ends, a.shape[0], "ends")
    _, n, k = w.shape
    out = wide(a.new_zeros(a.shape[0], k if transposed else n))
    runs = list(_runs(ends))
    if operands == int8.NAME:
        for group, start, end in runs:
            matrix = linear(w.of(t[group : group + 1] for t in w), w.encoding, w_layout)
            out[start:end] = int8.product(int8.rows(a[start:end]), int8.matrices(matrix))
        return (out,)
    for (_, start, end), matrix in zip(
        runs, _matrices(w, [group for group, *_ in runs], w_layout), strict=True
    ):
        out[start:end] = wide(a[start:end]) @ (matrix if transposed else matrix.T)
    return (out,)


def _outer(a: Any, b: Any, ends: torch.Tensor) -> tuple[torch.Tensor]:
    check_ends(ends, a.shape[0], "ends")
    a, b = (
        dequantize_runs(t, ends).to(eight_bits.computed(t.encoding))
        if isinstance(t, Quantized)
        else t
        for t in (a, b)
    )
    out = wide(a.new_zeros(len(ends), a.shape[1], b.shape[1]))
    for group, start, end in _runs(ends):
        out[group] = wide(a[start:end]).T @ wide(b[start:end])
    return (out,)


def _of_each_row(
    table: torch.Tensor, ends: torch.Tensor, rows: int, outside: float
) -> torch.Tensor:
    """table [G, N] -> [M, N]: for each row, its group's; `outside` past the last end."""
    padded = torch.cat([table, table.new_full((1, table.shape[1]), outside)])
    return padded.index_select(0, row_groups(ends, rows))


def _sum(y: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor]:
    check_ends(ends, y.shape[0], "ends")
    out = wide(y.new_zeros(len(ends), y.shape[1]))
    for group, start, end in _runs(ends):
        out[group] = wide(y[start:end]).sum(0)
    return (out,)


def product_grad(
    fd: Any, op: Op, dy: Value, a: Value, dy_of_weight: Value | None = None
) -> tuple[Value, Value | None]:
    """The gradients of a grouped_mm or grouped_mm_t: of its rows, in float32, and of its weight, in
    the dtype of the weight or of its master; None for a quantized weight without a master, and
    beside quantized rows.

    a, dy_of_weight: the factors of the weight's gradient: the product's rows and dy, or
    replacements for them.
    """
    (_, w, ends), transposed = op.values, op.kind.name == "grouped_mm_t"
    at = {name: layout for name, layout in op.attrs.items() if name == "w_layout"}
    master, read = w, w
    if producer := fd.producer(w, "straight_through"):
        _, master = producer.values
        if producer.attrs["how"] == "float":
            read, at = fd.ops.cast(master, dtype=op.values[0].type.dtype), {}
    da = (fd.ops.grouped_mm if transposed else fd.ops.grouped_mm_t)(dy, read, ends, **at)
    if master.type.quantized or a.type.quantized:
        return da, None
    d = dy if dy_of_weight is None else dy_of_weight
    return da, fd.ops.cast(
        fd.ops.grouped_outer(*((a, d) if transposed else (d, a)), ends), dtype=master.type.dtype
    )


def _mm_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    a = op.values[0]
    if op.attrs.get("wgrad"):
        return eight_bits.gradients(fd, op, dy)
    da, dw = product_grad(fd, op, dy, a)
    return [da if a.type.quantized else fd.ops.cast(da, dtype=a.type.dtype), dw, None]


def _add_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    _, bias, ends = op.values
    return [dy, fd.ops.cast(fd.ops.group_sum(dy, ends), dtype=bias.type.dtype), None]


def _mul_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    y, scale, ends = op.values
    wide = accumulated(y.type.dtype)  # terms of the sum are not rounded
    terms = fd.ops.cast(dy, dtype=wide) * fd.ops.cast(y, dtype=wide)
    dscale = fd.ops.cast(fd.ops.group_sum(terms, ends), dtype=scale.type.dtype)
    return [fd.ops.group_mul(dy, scale, ends), dscale, None]


def bias_rows(fd: Any, bias: Value, ends: Value, like: TensorType) -> Value:
    """bias [G, N] -> [M/g, N], the bias of each row's group, in the dtype and for the rows of
    `like` [M/g, ...]; zeros past the last end
    """
    shape = plain(like.shape[0]), plain(bias.type.shape[1])
    nothing = fd.ops.partition(fd.ops.full(shape=shape, fill_value=0.0, dtype=like.dtype), ends)
    return fd.ops.group_add(nothing, fd.ops.cast(bias, dtype=like.dtype), ends)


def _product_flops(op: Op) -> Any:
    """2 * M * N * K: M rows of the first operand; matrices [N, K] of the second operand or of the
    result.
    """
    a, w = (v.type for v in op.values[:2])
    matrices = w if len(w.shape) == 3 else op.outputs[0].type
    return 2 * plain(a.shape[0]) * elements(matrices.shape[1:])


TABLE = (
    OpKind(
        "grouped_mm",
        _mm_type,
        partial(_mm, transposed=False),
        _mm_grad,
        flops=_product_flops,
        role="grouped",
    ),
    OpKind(
        "grouped_mm_t",
        _mm_t_type,
        partial(_mm, transposed=True),
        _mm_grad,
        flops=_product_flops,
        role="grouped",
    ),
    OpKind("grouped_outer", _outer_type, _outer, flops=_product_flops, role="grouped"),
    OpKind(
        "group_add",
        _add_type,
        lambda y, bias, ends: (y + _of_each_row(bias, ends, y.shape[0], outside=0.0),),
        _add_grad,
        role="per_group",
    ),
    OpKind(
        "group_mul",
        _mul_type,
        lambda y, scale, ends: (y * _of_each_row(scale, ends, y.shape[0], outside=1.0),),
        _mul_grad,
        role="per_group",
    ),
    OpKind(
        "group_sum",
        _sum_type,
        _sum,
        flops=lambda op: elements(op.values[0].type.shape),
        role="grouped_sum",
    ),
)
