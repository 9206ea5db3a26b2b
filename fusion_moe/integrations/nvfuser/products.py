"""Quantized values and grouped products.

16-bit activations: the weight is decoded to their type, `code * (float32(block_scale) *
decode_scale)` as everywhere, rounded once, and passed to nvFuser's grouped_mm, which takes group
ends. 4-bit activations: both operands are passed to cutlass_nvfp4_grouped_mm, which takes group
starts, swizzled block scales, and one factor for each group: decode scales that differ along N are
multiplied afterwards.

M rows, G groups, N out-features, K in-features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...encodings import NVFP4
from ...ir import Op
from ...layouts import SF128X4, ceil_to
from ...schedule.product import GroupedProduct
from . import eight_bits
from .library import dtype
from .rows import group_count, inside, of_groups, of_their_group
from .values import E2M1, WORDS, EightBits, Encoded, Packed
from .writer import Writer

_ALIGN, _BLOCK_SCALE = SF128X4.rows, NVFP4.scales[0]
Matrices = tuple[int, int, int]  # G, N, K


def decoded(w: Writer, packed: Packed, shape: Matrices, to: str) -> Any:
    """nvfp4[G, N, K] -> [G, N, K] in dtype `to`: the values of encodings.dequantize, rounded
    once.
    """
    g, n, k = shape
    words, eight = (g, n, k // 8, 8), packed.codes.form(WORDS)
    shift = w.spread(w.mul(w.count(8), 4), words, 3)
    code = w.bitwise_and(w.bitwise_right_shift(w.spread(eight, words, 0, 1, 2), shift), 15)
    code = w.reshape(code, w.shape((g, n, k // NVFP4.block, NVFP4.block)))
    step = w.mul(w.to(_linear_scale(w, packed, shape), "f32"), _per_block(w, packed, shape))
    value = w.mul(
        _e2m1_value(w, code), w.spread(step, (g, n, k // NVFP4.block, NVFP4.block), 0, 1, 2)
    )
    return w.to(w.reshape(value, w.shape(shape)), to)


def _e2m1_value(w: Writer, code: Any) -> Any:
    """i32 codes -> f32: magnitudes below 2 are halves of the code, others (2 + last bit) <<
    exponent; bit 3 is the sign.
    """
    size = w.bitwise_and(code, 7)
    high = w.bitwise_left_shift(
        w.add(w.bitwise_and(size, 1), 2), w.maximum(w.sub(w.bitwise_right_shift(size, 1), 1), 0)
    )
    magnitude = w.mul(w.to(w.where(w.lt(size, 4), size, high), "f32"), 0.5)
    return w.where(w.lt(code, 8), magnitude, w.neg(magnitude))


def _linear_scale(w: Writer, packed: Packed, shape: Matrices) -> Any:
    """block_scale f8e4m3[G, N, K/16] in linear order."""
    if packed.layout == "linear":
        return packed.block_scale
    g, n, k = shape
    rows, columns = ceil_to(n, _ALIGN), ceil_to(k // NVFP4.block, 4)
    tiles = w.reshape(packed.block_scale, [g, rows // _ALIGN, columns // 4, 32, 4, 4])
    whole = w.reshape(w.permute(tiles, [0, 1, 4, 3, 2, 5]), [g, rows, columns])
    return w.part(whole, [0, 0, 0], [g, n, k // NVFP4.block])


def _swizzled_scale(w: Writer, packed: Packed, shape: Matrices) -> Any:
    """block_scale f8e4m3[G, N, K/16] with each matrix in the order of layouts.SF128x4; N is a
    multiple of 128, K of 64.
    """
    g, n, k = shape
    c = k // NVFP4.block
    if packed.layout != "linear":
        return packed.block_scale
    tiles = w.reshape(packed.block_scale, w.shape((g, n // _ALIGN, 4, 32, c // 4, 4)))
    return w.reshape(w.permute(tiles, [0, 1, 4, 3, 2, 5]), w.shape((g, n, c)))


def _per_block(w: Writer, packed: Packed, shape: Matrices) -> Any:
    """decode_scale f32[G] or [G, S] -> f32[G, N, K/16]."""
    g, n, k = shape
    blocks = (g, n, k // NVFP4.block)
    if packed.runs == 0:
        return w.spread(packed.decode_scale, blocks, 0)
    rows = w.reshape(
        w.spread(packed.decode_scale, (g, packed.runs, n // packed.runs), 0, 1), w.shape((g, n))
    )
    return w.spread(rows, blocks, 0, 1)


def _pack(
    w: Writer, op: Op, codes: Any, block_scale: Any, decode_scale: Any = None
) -> Packed | EightBits:
    if op.attrs["encoding"] in eight_bits.NAMES:
        return EightBits(codes, block_scale)
    codes_type, decode_type = op.values[0].type, op.values[2].type
    runs = decode_type.shape[-1] if len(decode_type.shape) == len(codes_type.shape) - 1 else 0
    return Packed(codes, block_scale, decode_scale, op.attrs["layout"], runs)  # type: ignore[arg-type]


def _decode_scale(w: Writer, op: Op, x: Any) -> Any:
    rank = len(op.values[0].type.shape)
    largest = w.to(w.max(w.abs(w.to(x, "f32")), [rank - 2, rank - 1]), "f32")
    return w.div(largest, NVFP4.element.maximum * _BLOCK_SCALE.maximum)


def _quantize(w: Writer, op: Op, x: Any, decode_scale: Any = None) -> Encoded | EightBits:
    """The same as encodings.quantize, operation by operation; nvFuser's nv_block_quantize
    multiplies by rounded reciprocals instead.
    """
    if op.attrs["encoding"] in eight_bits.NAMES:
        return eight_bits.quantized(w, op, x)
    *lead, n, k = op.values[0].type.shape
    assert isinstance(k, int)
    blocks, each = (*lead, n, k // NVFP4.block, NVFP4.block), tuple(range(len(lead)))
    scales, ranks = blocks[:-1], tuple(range(len(lead) + 2))
    x = w.reshape(w.to(x, "f32"), w.shape(blocks))
    decode = w.spread(decode_scale, scales, *each)
    amax = w.max(w.abs(x), [len(blocks) - 1])
    zero = w.eq(amax, 0.0)
    wanted = w.where(zero, 1.0, w.div(amax, w.mul(decode, NVFP4.element.maximum)))
    block_scale = w.cast(
        w.minimum(w.maximum(wanted, _BLOCK_SCALE.minimum), _BLOCK_SCALE.maximum),
        dtype=dtype("f8e4m3"),
    )
    step = w.where(zero, 1.0, w.mul(w.to(block_scale, "f32"), decode))
    x = w.where(w.eq(x, 0.0), 0.0, x)  # -0.0 has the code of 0.0
    codes = w.cast(w.div(x, w.spread(step, blocks, *ranks)), dtype=dtype("Float4_e2m1fn"))
    return Encoded(w.reshape(codes, w.shape((*lead, n, k))), block_scale, decode_scale)


def _unpack(w: Writer, op: Op, x: Encoded | EightBits) -> tuple[Any, Any]:
    return eight_bits.unpacked(w, op, x) if isinstance(x, EightBits) else (x.codes, x.block_scale)


def _relayout(w: Writer, op: Op, x: Encoded, ends: Any) -> Encoded:
    return Encoded(x.codes, _grouped_scale(w, x, ends, group_count(op)), x.decode_scale)


def _grouped_scale(w: Writer, x: Encoded, ends: Any, groups: int) -> Any:
    """The block scales of rows in linear order -> in the order of layouts.SF128x4, for each group
    separately; padding is not written.
    """
    return w.preprocess_grouped_matmul_input_sf(
        x.block_scale, _starts(w, ends, groups), _padded_starts(w, ends, groups)
    )


def _grouped_mm(w: Writer, op: Op, a: Any, weight: Any, ends: Any) -> Any:
    """For fprop and dgrad: nvFuser's product contracts the middle axis of its matrices."""
    if isinstance(a, Encoded):
        y = _packed_product(w, op, a, weight, ends)
    else:
        matrices = (
            decoded(w, weight, _matrices(op), op.values[0].type.dtype)
            if isinstance(weight, Packed)
            else weight
        )
        middle = GroupedProduct.of(op).contracted == "N"
        y = _product(w, op, a, matrices if middle else w.permute(matrices, [0, 2, 1]), ends)
    return inside(w, y, op.outputs[0].type.shape, ends, group_count(op))


def _product(w: Writer, op: Op, a: Any, matrices: Any, ends: Any) -> Any:
    """-> f32[M, ...]. nvFuser's groups must cover all rows: the last group takes the remaining
    ones, which the caller sets to zero.
    """
    groups = group_count(op)
    last = w.eq(w.count(groups), groups - 1)
    covering = w.to(w.where(last, w.size(op.values[0].type.shape[0]), ends), "i32")
    return w.to(w.grouped_mm(a, matrices, covering), "f32")


def _packed_product(w: Writer, op: Op, a: Encoded, weight: Packed, ends: Any) -> Any:
    """-> f32[M, N]: the 4-bit product rounded to 16 bits, times the decode scales that differ along
    N.
    """
    g, n, k = _matrices(op)
    alpha, rest = _factors(w, a.decode_scale, weight, (g, n))
    scale = (
        a.block_scale if op.attrs.get("a_layout") == SF128X4.name else _grouped_scale(w, a, ends, g)
    )
    y = w.cutlass_nvfp4_grouped_mm(
        a.codes,
        weight.codes.form(E2M1),
        scale,
        _swizzled_scale(w, weight, (g, n, k)),
        alpha,
        _problem_sizes(w, ends, g, n, k),
        _starts(w, ends, g),
        _padded_starts(w, ends, g),
        dtype=dtype(w.stored(op.outputs[0])),
    )
    y = w.to(y, "f32")
    return (
        y if rest is None else w.mul(y, of_their_group(w, rest, op.outputs[0].type.shape, ends, g))
    )


def _factors(w: Writer, decode_a: Any, weight: Packed, shape: tuple[int, int]) -> tuple[Any, Any]:
    """decode scales f32[] of the rows and f32[G] or [G, S] of the weight -> alpha f32[G], and the
    remaining factors f32[G, N] if S > 1.
    """
    (g, n), decode_w, runs = shape, weight.decode_scale, weight.runs
    if runs == 0:
        return w.mul(decode_w, w.spread(decode_a, (g,))), None
    largest = w.max(decode_w, [1])
    share = w.where(
        w.gt(w.spread(largest, (g, runs), 0), 0.0),
        w.div(decode_w, w.spread(largest, (g, runs), 0)),
        0.0,
    )
    columns = w.reshape(w.spread(share, (g, runs, n // runs), 0, 1), w.shape((g, n)))
    return w.mul(largest, w.spread(decode_a, (g,))), columns


def _starts(w: Writer, ends: Any, groups: int) -> Any:
    """ends i32[G] -> starts i32[G]: groups.starts."""
    return w.pad(w.part(ends, [0], [groups - 1]), [1, 0]) if groups > 1 else w.sub(ends, ends)


def _sizes(w: Writer, ends: Any, groups: int) -> Any:
    return w.sub(ends, _starts(w, ends, groups))


def _padded_starts(w: Writer, ends: Any, groups: int) -> Any:
    """ends i32[G] -> i32[G]: groups.padded_starts(ends, 128)."""
    if groups == 1:
        return _starts(w, ends, groups)
    padded = w.bitwise_and(w.add(_sizes(w, ends, groups), _ALIGN - 1), -_ALIGN)
    return w.to(w.sum(of_groups(w, padded, groups, w.gt), [1]), "i32")


def _problem_sizes(w: Writer, ends: Any, g: int, n: int, k: int) -> Any:
    """ends i32[G] -> i32[G, 3]: rows, N and K of each group's product."""
    shape = (g, 3)
    column = w.spread(w.count(3), shape, 1)
    sizes = w.spread(_sizes(w, ends, g), shape, 0)
    return w.to(
        w.where(
            w.eq(column, 0),
            sizes,
            w.where(w.eq(column, 1), w.constant(n, "i32"), w.constant(k, "i32")),
        ),
        "i32",
    )


def _matrices(op: Op) -> Matrices:
    """G, N and K of a product's weight: numbers, or pack would have refused them."""
    return op.values[1].type.shape  # type: ignore[return-value]


RULES: dict[str, Callable[..., Any]] = {
    "pack": _pack,
    "unpack": _unpack,
    "decode_scale": _decode_scale,
    "quantize": _quantize,
    "dequantize": eight_bits.dequantized,
    "relayout": _relayout,
    "grouped_mm": _grouped_mm,
    "grouped_mm_t": _grouped_mm,
}
