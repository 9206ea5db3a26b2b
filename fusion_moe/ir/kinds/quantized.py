"""Values in an encoding: packed from stored parts, quantized from floats, unpacked, or relaid
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...encodings import (
    ENCODINGS,
    FP8_COLUMNS,
    FP8_E8M0,
    Encoding,
    Quantized,
    Scale,
    check_finite,
    check_matrix_scales,
    check_rule,
    dequantize,
    find,
    matrix_scale_of,
    quantize,
)
from ...errors import ShapeError, need_one_of
from ...layouts import LAYOUTS, SF128x4, as_bytes
from ...target import ROWS
from ..core import Need, Op, OpKind, Value
from ..sizes import ceildiv
from ..types import DTYPES, FLOATS, Dim, TensorType, dtype_name, plain
from .eight_bits import TRAINED
from .rules import Types, known, need, need_dtype, need_partition, need_rank, need_tensor
from .runs import (
    IN_TILES,
    dequantize_runs,
    in_runs,
    part_shape,
    quantize_runs,
    transpose_row_blocks,
    untranspose_row_blocks,
)

ENCODED_FROM = ("f32", "bf16", "f16")


def encoded() -> tuple[str, ...]:
    """The dtypes of the IR that stand for several tensors, codes and scales ("nvfp4"), not for one
    ("bf16").
    """
    return tuple(name for name in ENCODINGS if name not in DTYPES)


def _pack_type(*parts: TensorType, encoding: str, layout: str, transposed: bool = False) -> Types:
    """The parts of an encoding -> a value of it: codes u8[..., N, K/2], block_scale f8e4m3[..., N,
    K/16], decode_scale f32[...] or [..., S] -> nvfp4[..., N, K]; w bf16[..., N, K] -> bf16[..., N,
    K]@layout

    layout: how the parts are stored, each in the shape of its storage. transposed: the elements are
    [..., K/2, N], strided so that the two codes of a byte still run along K and no byte has to
    move.
    """
    descriptor = find(encoding)
    if len(parts) != len(descriptor.parts):
        raise ShapeError(
            f"{len(parts)} parts of {encoding}",
            expected=", ".join(part.name for part in descriptor.parts),
        )
    for part, type in zip(descriptor.parts, parts, strict=True):
        need_dtype(part.name, type, dtype_name(part.dtype))
    if layout not in LAYOUTS:
        raise ShapeError(f"layout {layout!r}", expected=f"one of {', '.join(LAYOUTS)}")
    if len(parts[0].shape) < 2:
        raise ShapeError(f"{descriptor.parts[0].name} {parts[0]}", expected="[..., N, K]")
    *lead, n, packed_k = parts[0].shape
    if transposed:
        n, packed_k = packed_k, n
    k = descriptor.elements(known(packed_k))
    _need_layout(layout, n, k, descriptor)
    for part, type in zip(descriptor.parts[1:], parts[1:], strict=True):
        assert part.scale is not None
        if part.scale.block:
            stored = _stored(part_shape(descriptor, part, (*lead, n, k)), layout)
            if type.shape != stored:
                want = (
                    f"{list(stored)}, one scale for {part.scale.block} codes of "
                    f"{list(parts[0].shape)}"
                )
                within = f" in the layout {layout}" if layout != "linear" else ""
                raise ShapeError(f"{part.name} {list(type.shape)}", expected=want + within)
        else:
            _need_matrix_scale(part.scale, type, tuple(lead), n)
    return (TensorType((*lead, n, k), encoding, layout),)


def _need_layout(layout: str, n: Dim, k: int, encoding: Encoding) -> None:
    """ShapeError unless a layout can store a matrix [N, K] in an encoding."""
    rows = plain(n)
    if layout != "linear" and (
        why := LAYOUTS[layout].why_not(rows if isinstance(rows, int) else 0, k, encoding)
    ):
        raise ShapeError(
            why,
            expected=f"a weight that the layout {layout} can store",
            todo="keep the linear layout",
            where=layout,
        )


def _stored(shape: tuple[Dim, ...], layout: str) -> tuple[Dim, ...]:
    """The shape in which a layout stores block scales [..., N, K/16]."""
    return shape if layout == "linear" else LAYOUTS[layout].storage_shape(tuple(map(known, shape)))


def _pack(*parts: torch.Tensor, encoding: str, layout: str, transposed: bool = False) -> tuple[Any]:
    descriptor = find(encoding)
    elements = parts[0].mT if transposed else parts[0]
    return (elements if descriptor.plain else Quantized(elements, *parts[1:], encoding=descriptor),)


def _need_matrices(x: TensorType, encoding: Encoding) -> None:
    """Raises unless x is f32, bf16 or f16 [..., N, K] with K, or N if blocks lie along N, in whole
    blocks.
    """
    need_dtype("x", x, *ENCODED_FROM)
    if len(x.shape) < 2:
        raise ShapeError(f"x {x}", expected="[..., N, K]")
    encoding.need_whole(known(x.shape[encoding.axis]))


def _need_matrix_scale(scale: Scale, type: TensorType, lead: tuple, n: object) -> None:
    need_dtype(scale.part, type, dtype_name(scale.dtype))
    shape, rank = type.shape, len(lead)
    runs = shape[rank] if len(shape) == rank + 1 else 1
    fits = isinstance(runs, int) and runs > 0 and not (isinstance(n, int) and n % runs)
    if shape[:rank] != lead or len(shape) > rank + 1 or not fits:
        want = [f"[{', '.join(map(str, s))}]" for s in (lead, (*lead, "S"))]
        raise ShapeError(
            f"{scale.part} {list(shape)}",
            expected=f"{want[0]}, or {want[1]} with S dividing N = {n}",
        )


def _runs_divide(n: Dim, matrix_scale: TensorType, rank: int) -> Iterator[Need]:
    """A scale for each of S runs of rows: S must divide N, which may be known only at launch."""
    runs = matrix_scale.shape[rank] if len(matrix_scale.shape) > rank else 1
    if isinstance(runs, int):
        yield (
            plain(n) + ceildiv(plain(n), runs) * -runs,
            f"decode_scale {matrix_scale} for N = {n}, which {runs} does not divide",
        )


def _pack_needs(
    *parts: TensorType, encoding: str, layout: str, transposed: bool = False
) -> Iterator[Need]:
    for part, type in zip(find(encoding).parts, parts, strict=True):
        if part.of_matrix:
            yield from _runs_divide(
                parts[0].shape[-1 if transposed else -2], type, len(parts[0].shape) - 2
            )


def _matrix_scales(encoding: Encoding) -> tuple[Scale, ...]:
    return tuple(s for s in encoding.scales if not s.block)


def _quantize_needs(
    x: TensorType, *beside: TensorType, encoding: str, scales: str = "max"
) -> Iterator[Need]:
    for type in () if in_runs(find(encoding), x.shape) else beside:
        yield from _runs_divide(x.shape[-2], type, len(x.shape) - 2)


def _quantize_type(x: TensorType, *beside: TensorType, encoding: str, scales: str = "max") -> Types:
    """x float[..., N, K], decode_scale f32[...] or [..., S] if the encoding has one -> nvfp4[...,
    N, K], quantized along K; scales: the rule for those of blocks

    x [M/g, K], ends -> mxfp8_columns[M/g, K]: quantized along the rows of each group (runs.py).
    """
    descriptor = find(encoding)
    check_rule(scales, descriptor)
    if len(need_tensor("x", x).shape) == 2 and in_runs(descriptor, x.shape):
        need_dtype("x", x, *ENCODED_FROM)
        _need_ends(x, beside)
        return (TensorType(x.shape, encoding),)
    _need_matrices(x, descriptor)
    of_matrix = _matrix_scales(descriptor)
    if len(of_matrix) != len(beside):
        raise ShapeError(
            f"{len(beside)} scales of whole matrices for {encoding}",
            expected=f"{len(of_matrix)}" + "".join(f", {s.part}" for s in of_matrix),
        )
    for scale, type in zip(of_matrix, beside, strict=True):
        _need_matrix_scale(scale, need_tensor(scale.part, type), x.shape[:-2], plain(x.shape[-2]))
    return (TensorType(x.shape, encoding),)


def _need_ends(x: TensorType, beside: Sequence[TensorType]) -> None:
    """Checks that x [M/g, K], whose blocks lie along rows of groups, has the ends of these groups
    as the only other operand.
    """
    if len(beside) != 1:
        raise ShapeError(
            f"{len(beside)} operands beside x {x}",
            expected="the ends of its groups, whose rows have blocks of their own",
        )
    need_partition("x", x, beside[0])


def _quantize(
    x: torch.Tensor, *beside: torch.Tensor, encoding: str, scales: str = "max"
) -> tuple[Any]:
    descriptor = find(encoding)
    if beside and not _matrix_scales(descriptor):
        return (quantize_runs(x, beside[0], descriptor),)
    if not x.is_cuda and not descriptor.element.holds_nan:
        check_finite(x, descriptor)  # on CUDA the check would wait for the device
        for scale in beside:
            check_matrix_scales(scale)
    weight = quantize(x, descriptor, next(iter(beside), None), scales)
    return (weight.elements if weight.encoding.plain else weight,)


def _quantize_grad(fd: Any, op: Op, dy: Value) -> Sequence[Value | None]:
    """Straight-through, as for 8-bit training."""
    if op.attrs["encoding"] not in TRAINED:
        raise NotImplementedError(f"the derivative of quantizing to {op.attrs['encoding']}")
    return [fd.ops.cast(dy, dtype=op.values[0].type.dtype), *[None] * (len(op.values) - 1)]


def _dequantize_type(x: TensorType, *ends: TensorType, dtype: str) -> Types:
    """x mxfp8[..., N, K] -> dtype[..., N, K], rounded once; ends: of its rows, if blocks lie along
    rows of groups
    """
    need_dtype("x", x, *encoded())
    need_dtype("the result", x.with_(dtype=dtype), *FLOATS)
    if x.layout != "linear":
        raise ShapeError(f"x is {x}", expected="the linear layout")
    if in_runs(x.encoding, x.shape):
        _need_ends(x.with_(dtype=dtype), ends)
    elif ends:
        raise ShapeError(
            f"{len(ends)} operands beside x {x}",
            expected="none: its blocks are not those of groups",
        )
    return (x.with_(dtype=dtype),)


def _dequantize(x: Quantized, *ends: torch.Tensor, dtype: str) -> tuple[torch.Tensor]:
    return (
        dequantize_runs(x, ends[0]).to(DTYPES[dtype]) if ends else dequantize(x, DTYPES[dtype]),
    )


def as_rows(fd: Any, a: Value, activation_format: str) -> Value:
    """a float[M/g, K] as a product reads it: in the encoding of its activation_format, if that has
    one.
    """
    if (encoding := ROWS.get(activation_format)) is None:
        return a
    scale = (
        [fd.ops.decode_scale(a, encoding=encoding)] if has_matrix_scale(activation_format) else []
    )
    return fd.ops.quantize(a, *scale, encoding=encoding)


def format_of(rows: TensorType) -> str:
    """The activation_format that a product's rows of this type are in; "bf16" for floats."""
    formats = {encoding: name for name, encoding in ROWS.items()}
    return formats.get(rows.dtype, rows.dtype) if rows.quantized else "bf16"


def has_matrix_scale(activation_format: str) -> bool:
    """Whether all rows share a scale in the encoding of this activation_format."""
    rows = ROWS.get(activation_format)
    return rows is not None and bool(_matrix_scales(find(rows)))


def _decode_scale_type(x: TensorType, encoding: str) -> Types:
    """x float[..., N, K] -> f32[...]: the scale that each matrix gets in an encoding; for NVFP4
    amax / 2688.
    """
    descriptor = find(encoding)
    _need_matrices(x, descriptor)
    scales = _matrix_scales(descriptor)
    if not scales:
        raise ShapeError(
            f"decode_scale of {encoding}, which has none",
            expected="an encoding with a scale for a whole matrix",
        )
    return (TensorType(x.shape[:-2], dtype_name(scales[-1].dtype)),)


def _decode_scale(x: torch.Tensor, encoding: str) -> tuple[torch.Tensor]:
    """Zeros if there are no rows whose largest element could be taken."""
    return (
        matrix_scale_of(x, find(encoding))
        if x.numel()
        else x.new_zeros(x.shape[:-2], dtype=torch.float32),
    )


def _unpack_type(x: TensorType) -> Types:
    """nvfp4[..., N, K] -> codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16]: all parts except
    the scales of whole matrices
    """
    need_dtype("x", x, *encoded())
    encoding, shape = x.encoding, (*x.shape[:-1], known(x.shape[-1]))
    parts = (p for p in encoding.parts if not p.of_matrix)
    return tuple(
        x.with_(shape=part_shape(encoding, p, shape), dtype=dtype_name(p.dtype)) for p in parts
    )


def _unpack(x: Quantized) -> tuple[torch.Tensor, ...]:
    return tuple(t for p, t in x.named() if not p.of_matrix)


# how a product is differentiated whose weight has a master: see straight_through
STRAIGHT_THROUGH = ("exact", "float", "saved")


def _straight_type(w: TensorType, master: TensorType, *turned: TensorType, how: str) -> Types:
    """w nvfp4[..., N, K] in any layout, master float[..., N, K] -> w, whose gradient the master
    gets: w was rounded from it. turned: the same of the transposed matrices, for the backward.

    how: "exact": the forward is that of w alone, and the backward computes again what it reads;
    "float": so too, but the gradients of activations are products with the master; "saved": the
    forward saves products for the backward.
    """
    need_dtype("w", w, *encoded())
    need_dtype("the master", master, *FLOATS)
    need_one_of("straight_through", how, STRAIGHT_THROUGH)
    if master.shape != w.shape:
        raise ShapeError(f"master {master}", expected=f"the shape of the weight {w}")
    wanted = w.with_(shape=(*w.shape[:-2], *w.shape[:-3:-1]))
    if turned not in ((), (wanted,)):
        raise ShapeError(" and ".join(map(str, turned)), expected=f"one of {wanted}, or none")
    return (w,)


def _transpose_blocks_type(codes: TensorType, scales: TensorType) -> Types:
    """The parts of matrices in blocks of 128 x 128, codes f8e4m3[G, N, K] and the scale of each
    row of a block [G, N, K/128], -> those of the transposed matrices, [G, K, N] and [G, K, N/128];
    N and K multiples of 32, last blocks may be short
    """
    need("the codes", codes, 3, "f8e4m3")
    need_dtype("the scales", scales, "f8e8m0", "f32")
    (groups, *sizes), block = codes.shape, FP8_E8M0.block
    n, k = map(known, sizes)
    if n % IN_TILES or k % IN_TILES or scales.shape != (groups, n, -(-k // block)):
        raise ShapeError(
            f"codes {codes}, scales {scales}",
            expected=f"blocks of {block} x {block}, of multiples of {IN_TILES} rows and columns",
        )
    return codes.with_(shape=(groups, k, n)), scales.with_(shape=(groups, k, -(-n // block)))


def _transpose_blocks(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    block, turned = FP8_E8M0.block, as_bytes(codes).mT.contiguous()
    of_blocks = as_bytes(scales)[:, ::block].mT.repeat_interleave(block, 1)[:, : turned.shape[1]]
    return turned.view(codes.dtype), of_blocks.contiguous().view(scales.dtype)


def _transpose_row_blocks_type(codes: TensorType, ends: TensorType) -> Types:
    """codes f8e4m3[M/g, K] in blocks of 128 rows of each group, K a multiple of 32 ->
    f8e4m3[ceil(M/128) + G, K, 128]: those of each column of a block follow each other, columns in
    the order that `runs.transpose_row_blocks` has
    """
    need("the codes", codes, 2, "f8e4m3")
    if known(codes.shape[1]) % IN_TILES:
        raise ShapeError(f"codes {codes}", expected=f"a multiple of {IN_TILES} columns")
    rows, block = need_partition("the codes", codes, ends), FP8_COLUMNS.block
    blocks = ceildiv(rows.total, block) + rows.groups.count
    return (TensorType((blocks, codes.shape[1], block), codes.dtype),)


def _untranspose_row_blocks_type(turned: TensorType, ends: TensorType, rows: Dim) -> Types:
    """The result of transpose_row_blocks -> its codes f8e4m3[M/g, K]; rows: M/g"""
    need_rank("the codes", turned, 3)
    codes = TensorType((rows, turned.shape[1]), turned.dtype)
    (wanted,) = _transpose_row_blocks_type(codes, ends)
    if turned.shape != wanted.shape:
        raise ShapeError(f"codes {turned} of {rows} rows", expected=str(wanted))
    return (codes,)


def _swizzle_type(x: TensorType, ends: TensorType, layout: str) -> Types:
    """x f8e4m3[M/g, K/16] -> f8e4m3[M/g%128, K/16]@sf128x4: each group is stored separately in the
    layout
    """
    need("x", x, 2, *DTYPES)
    rows, scales = need_partition("x", x, ends), _scale_layout(layout)
    return (need_tensor("x", x).with_(shape=(rows % scales.rows, *x.shape[1:]), layout=layout),)


def _scale_layout(layout: str) -> SF128x4:
    """The layout of block scales that is called `layout`."""
    scales = LAYOUTS.get(layout)
    if not isinstance(scales, SF128x4):
        raise ShapeError(f"layout {layout!r}", expected="a layout of block scales: sf128x4")
    return scales


def _relayout_type(x: TensorType, *ends: TensorType, layout: str) -> Types:
    """x nvfp4[M/g, K], ends -> nvfp4[M/g, K]@sf128x4: the same value, its block scales stored in
    another layout

    x nvfp4[..., N, K] -> nvfp4[..., N, K]@w16x64: a weight in a layout of weights.
    """
    need_dtype("x", x, *encoded())
    if x.layout != "linear" or x.encoding.axis != -1:
        raise ShapeError(f"x is {x}", expected="the linear layout, and blocks along K")
    if len(ends) == 1:
        need_partition("x", x, ends[0])
        return (x.with_(layout=_scale_layout(layout).name),)
    if ends or layout not in LAYOUTS or isinstance(LAYOUTS[layout], SF128x4):
        raise ShapeError(
            f"layout {layout!r} and {len(ends)} operands beside x {x}",
            expected="sf128x4 and ends, or a layout of weights",
        )
    _need_layout(layout, known(x.shape[-2]), known(x.shape[-1]), x.encoding)
    return (x.with_(layout=layout),)


def _relayout(x: Quantized, *ends: torch.Tensor, layout: str) -> tuple[Quantized]:
    if not ends:
        return (x.of(LAYOUTS[layout].pack(*x, encoding=x.encoding)),)
    return (x.of(_scale_layout(layout).pack(*x, encoding=x.encoding, ends=ends[0])),)


def linear(x: Any, encoding: Encoding, layout: str, ends: torch.Tensor | None = None) -> Any:
    """A value in linear order, whatever `layout` it is stored in; ends: of the groups in which its
    rows are stored.
    """
    if layout == "linear":
        return x
    stored = LAYOUTS[layout]
    if not isinstance(x, Quantized):
        return stored.unpack(x, encoding=encoding)[0]
    if ends is None:
        return x.of(stored.unpack(*x, encoding=encoding))
    return x.of(_scale_layout(layout).unpack(*x, encoding=encoding, ends=ends))


TABLE = (
    OpKind("pack", _pack_type, _pack, needs=_pack_needs, view=True, role="view"),
    OpKind("unpack", _unpack_type, _unpack, role="view", outputs=None),
    OpKind(
        "straight_through",
        _straight_type,
        lambda w, master, *turned, how: (w,),
        lambda fd, op, dy: [None, dy, *[None] * len(op.values[2:])],
        view=True,
        role="view",
    ),
    OpKind("decode_scale", _decode_scale_type, _decode_scale, role="reduce"),
    OpKind(
        "quantize",
        _quantize_type,
        _quantize,
        _quantize_grad,
        needs=_quantize_needs,
        role="quantize",
    ),
    OpKind("dequantize", _dequantize_type, _dequantize, role="quantize"),
    OpKind("transpose_blocks", _transpose_blocks_type, _transpose_blocks, role="layout", outputs=2),
    OpKind(
        "transpose_row_blocks",
        _transpose_row_blocks_type,
        lambda codes, ends: (transpose_row_blocks(codes, ends, FP8_COLUMNS),),
        role="layout",
    ),
    OpKind(
        "untranspose_row_blocks",
        _untranspose_row_blocks_type,
        lambda turned, ends, rows: (untranspose_row_blocks(turned, ends, rows, FP8_COLUMNS),),
        view=True,
        role="view",
    ),
    OpKind(
        "grouped_swizzle",
        _swizzle_type,
        lambda x, ends, layout: (_scale_layout(layout).forward(x, ends),),
        role="layout",
    ),
    OpKind("relayout", _relayout_type, _relayout, role="layout"),
)
