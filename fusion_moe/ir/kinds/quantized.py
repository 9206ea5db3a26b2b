"""Values of a block-scaled format: packed from their stored tensors, made from floats, taken apart, laid out anew."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import ShapeError
from ...formats import FORMATS, Quantized, check_decode_scales, check_finite, decode_scale_of, quantize
from ...layouts import LAYOUTS, W16X64, SF128x4
from ..core import Need, OpKind
from ..sizes import ceildiv
from ..types import DTYPES, Dim, TensorType, plain
from .rules import Types, need_cut, need_dtype, need_float, need_rank, need_tensor


def _pack_type(
    codes: TensorType, block_scale: TensorType, decode_scale: TensorType, fmt: str, layout: str, transposed: bool = False
) -> Types:
    """codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16], decode_scale f32[...] or [..., S] -> nvfp4[..., N, K]

    layout: how the block scales are stored, in the shape of its storage. transposed: codes are u8[..., K/2, N], strided so that the
    two codes of a byte still run along K and no byte has to move.
    """
    format = FORMATS[fmt]
    need_dtype("codes", codes, "u8")
    need_dtype("block_scale", block_scale, "f8e4m3")
    need_dtype("decode_scale", decode_scale, "f32")
    *lead, n, packed_k = codes.shape if not transposed else (*codes.shape[:-2], codes.shape[-1], codes.shape[-2])
    k = format.elements(_known(packed_k))
    stored = _stored((*lead, n, format.blocks(k)), layout)
    if block_scale.shape != stored:
        want = f"{TensorType(stored, 'f8e4m3')}, one scale for {format.block} codes of {codes}"
        raise ShapeError(f"block_scale {block_scale}", expected=want + (f" in the layout {layout}" if layout != "linear" else ""))
    _need_decode_scale(decode_scale, tuple(lead), n)
    return (TensorType((*lead, n, k), fmt, layout),)


def _stored(shape: tuple[Dim, ...], layout: str) -> tuple[Dim, ...]:
    """The shape in which a layout stores the block scales [..., N, K/16] of matrices."""
    if layout not in LAYOUTS:
        raise ShapeError(f"layout {layout!r}", expected=f"one of {', '.join(LAYOUTS)}")
    return shape if layout == "linear" else LAYOUTS[layout].storage_shape(tuple(map(_known, shape)))


def _pack(
    codes: torch.Tensor, block_scale: torch.Tensor, decode_scale: torch.Tensor, fmt: str, layout: str, transposed: bool = False
) -> tuple[Quantized]:
    return (Quantized(codes.mT if transposed else codes, block_scale, decode_scale),)


def _known(k: Dim) -> int:
    size = plain(k)
    if not isinstance(size, int):
        raise ShapeError(f"K = {k}", expected="a number known when compiling")
    return size


def _need_matrices(x: TensorType, fmt: str) -> None:
    """x must be float[..., N, K] with K in whole blocks."""
    need_float("x", x)
    if len(x.shape) < 2:
        raise ShapeError(f"x {x}", expected="[..., N, K]")
    FORMATS[fmt].blocks(_known(x.shape[-1]))


def _need_decode_scale(decode_scale: TensorType, lead: tuple, n: object) -> None:
    shape, rank = decode_scale.shape, len(lead)
    runs = shape[rank] if len(shape) == rank + 1 else 1
    fits = isinstance(runs, int) and runs > 0 and not (isinstance(n, int) and n % runs)
    if shape[:rank] != lead or len(shape) > rank + 1 or not fits:
        want = [f"[{', '.join(map(str, s))}]" for s in (lead, (*lead, "S"))]
        raise ShapeError(f"decode_scale {decode_scale}", expected=f"f32{want[0]}, or f32{want[1]} with S dividing N = {n}")


def _runs_divide(n: Dim, decode_scale: TensorType, rank: int) -> Iterator[Need]:
    """A decode scale for each of S runs of rows: S must divide N, which may be known only at launch."""
    runs = decode_scale.shape[rank] if len(decode_scale.shape) > rank else 1
    if isinstance(runs, int):
        yield plain(n) + ceildiv(plain(n), runs) * -runs, f"decode_scale {decode_scale} for N = {n}, which {runs} does not divide"


def _pack_needs(
    codes: TensorType, block_scale: TensorType, decode_scale: TensorType, fmt: str, layout: str, transposed: bool = False
) -> Iterator[Need]:
    return _runs_divide(codes.shape[-1 if transposed else -2], decode_scale, len(codes.shape) - 2)


def _quantize_needs(x: TensorType, decode_scale: TensorType, fmt: str) -> Iterator[Need]:
    return _runs_divide(x.shape[-2], decode_scale, len(x.shape) - 2)


def _quantize_type(x: TensorType, decode_scale: TensorType, fmt: str) -> Types:
    """x float[..., N, K], decode_scale f32[...] or [..., S] -> nvfp4[..., N, K], quantized along K"""
    _need_matrices(x, fmt)
    need_dtype("decode_scale", decode_scale, "f32")
    _need_decode_scale(decode_scale, x.shape[:-2], plain(x.shape[-2]))
    return (TensorType(x.shape, fmt),)


def _quantize(x: torch.Tensor, decode_scale: torch.Tensor, fmt: str) -> tuple[Quantized]:
    if not x.is_cuda:
        check_finite(x, "x")  # on CUDA looking would wait for the device
        check_decode_scales(decode_scale)
    return (quantize(x, decode_scale, FORMATS[fmt]),)


def _decode_scale_type(x: TensorType, fmt: str) -> Types:
    _need_matrices(x, fmt)
    return (TensorType(x.shape[:-2], "f32"),)


def _decode_scale(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor]:
    """Zeros where there are no rows to take the largest element of."""
    return (decode_scale_of(x, FORMATS[fmt]) if x.numel() else x.new_zeros(x.shape[:-2], dtype=torch.float32),)


def _unpack_type(x: TensorType) -> Types:
    """nvfp4[..., N, K] -> codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16]"""
    need_dtype("x", x, *FORMATS)
    format, lead, k = FORMATS[x.dtype], x.shape[:-1], _known(x.shape[-1])
    return x.with_(shape=(*lead, format.packed(k)), dtype="u8"), x.with_(shape=(*lead, format.blocks(k)), dtype="f8e4m3")


def _swizzle_type(x: TensorType, ends: TensorType, layout: str) -> Types:
    """x f8e4m3[M/g, K/16] -> f8e4m3[M/g%128, K/16]@sf128x4: the layout of each group by itself"""
    need_rank("x", x, 2)
    need_dtype("x", x, *DTYPES)
    rows = need_cut("x", x, ends)
    scales = LAYOUTS.get(layout)
    if not isinstance(scales, SF128x4):
        raise ShapeError(f"layout {layout!r}", expected="a layout of block scales: sf128x4")
    return (need_tensor("x", x).with_(shape=(rows % scales.rows, *x.shape[1:]), layout=layout),)


def _swizzle(x: torch.Tensor, ends: torch.Tensor, layout: str) -> tuple[torch.Tensor]:
    return (LAYOUTS[layout].forward(x, ends),)


def _relayout_type(x: TensorType, ends: TensorType, layout: str) -> Types:
    """x nvfp4[M/g, K] -> nvfp4[M/g, K]@sf128x4: the same value, its block scales stored in another layout"""
    need_dtype("x", x, *FORMATS)
    need_cut("x", x, ends)
    return (x.with_(layout=layout),)


def _relayout(x: Quantized, ends: torch.Tensor, layout: str) -> tuple[Quantized]:
    return (x._replace(block_scale=LAYOUTS[layout].forward(x.block_scale, ends)),)


def linear(x: Quantized, layout: str, ends: torch.Tensor | None = None) -> Quantized:
    """x in linear order, whatever `layout` it is stored in; ends: of the groups that its rows are stored by."""
    if layout == "linear":
        return x
    if layout == W16X64.name:
        return Quantized(*W16X64.unpack(x.codes, x.block_scale), x.decode_scale)
    *lead, k = x.shape
    return x._replace(block_scale=LAYOUTS[layout].inverse(x.block_scale, (*lead, FORMATS["nvfp4"].blocks(k)), ends))


TABLE = (
    OpKind("pack", _pack_type, _pack, needs=_pack_needs, view=True, role="view"),
    OpKind("unpack", _unpack_type, lambda x: (x.codes, x.block_scale), role="view"),
    OpKind("decode_scale", _decode_scale_type, _decode_scale, role="reduce"),
    OpKind("quantize", _quantize_type, _quantize, needs=_quantize_needs, role="quantize"),
    OpKind("grouped_swizzle", _swizzle_type, _swizzle, role="layout"),
    OpKind("relayout", _relayout_type, _relayout, role="layout"),
)
