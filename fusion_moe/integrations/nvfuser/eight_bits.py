"""MXFP8 in plain nvFuser operations: its own quantizers round scales differently, and its E4M3
product takes no block scales.

Products read the bf16 values of codes and scales, as the program says. A printed definition has six
digits of each constant, so powers of two are built from constants that six digits express exactly.
"""

from __future__ import annotations

from typing import Any

from ...encodings import MXFP8, MXFP8_COLUMNS, Encoding, Scale
from ...ir import Dim, Op, plain
from .library import dtype
from .values import EightBits
from .writer import Writer

NAMES = (MXFP8.name, MXFP8_COLUMNS.name)
_SHARE, _LESS = 9586981, 32  # float32(1 / 448) is _SHARE / 2^_LESS
_STEP = 16  # exponent of the largest power of two in one constant: 65536


def quantized(w: Writer, op: Op, x: Any) -> EightBits:
    """The same as encodings.quantize, bit for bit; nvFuser's cast to e4m3 saturates, as the
    encoding does.
    """
    shape = op.values[0].type.shape
    blocks, at = _in_blocks(op.encoding, shape)
    x = w.reshape(w.to(x, "f32"), w.shape(blocks))
    scale = _power_of_two(w, w.max(w.abs(x), [at + 1]))
    codes = w.cast(w.div(x, _of_elements(w, scale, blocks, at)), dtype=dtype("f8e4m3"))
    return EightBits(w.reshape(codes, w.shape(shape)), scale)


def dequantized(w: Writer, op: Op, x: EightBits) -> Any:
    """Code times scale, rounded once."""
    shape = op.outputs[0].type.shape
    blocks, at = _in_blocks(op.values[0].type.encoding, shape)
    scale = _of_elements(w, w.to(x.block_scale, "f32"), blocks, at)
    numbers = w.mul(w.reshape(w.to(x.codes, "f32"), w.shape(blocks)), scale)
    return w.to(w.reshape(numbers, w.shape(shape)), op.outputs[0].type.dtype)


def unpacked(w: Writer, op: Op, x: EightBits) -> tuple[Any, Any]:
    """The codes and block scales of a copy in 8 bits as values of an nvFuser definition. Scales are
    cast to e8m0 only if the program returns them.
    """
    leaves = op.outputs[1] in w.fusion.outputs
    return x.codes, w.to(x.block_scale, "f8e8m0") if leaves else x.block_scale


def _in_blocks(encoding: Encoding, shape: tuple[Dim, ...]) -> tuple[tuple[Dim, ...], int]:
    """[..., K] -> [..., K/32, 32], or the same along N; and the dimension that counts blocks."""
    at = len(shape) + encoding.axis
    scale: Scale = encoding.scales[0]
    count = plain(shape[at]) // scale.block  # type: ignore[operator]  # a number, or the type rule would have refused it
    return (*map(plain, shape[:at]), count, scale.block, *map(plain, shape[at + 1 :])), at


def _of_elements(w: Writer, scale: Any, blocks: tuple[Dim, ...], at: int) -> Any:
    """For each element, the scale of its block, in the shape of blocks."""
    return w.spread(scale, blocks, *(i for i in range(len(blocks)) if i != at + 1))


def _power_of_two(w: Writer, amax: Any) -> Any:
    """amax f32 * float32(1/448) -> the smallest power of two that is not below it, in [2^-127,
    2^127]; NaN stays NaN.

    nvFuser cannot read a float's bits. Its logarithm may miss the exponent by one, which a
    comparison detects; its power of two, rounded to bf16, is exact. Uses few operations, since
    nvFuser takes long to divide a definition with many.
    """
    one = w.constant(1.0, "f32")
    wanted = w.mul(amax, _times(w, w.cast(w.constant(_SHARE, "i64"), dtype=dtype("f32")), -_LESS))
    power = w.to(w.to(w.exp2(w.ceil(w.log2(wanted))), "bf16"), "f32")
    half = w.mul(power, 0.5)
    power = w.where(
        w.ge(half, wanted), half, w.where(w.lt(power, wanted), w.mul(power, 2.0), power)
    )
    return w.minimum(w.maximum(power, _times(w, one, -127)), _times(w, one, 127))


def _times(w: Writer, x: Any, exponent: int) -> Any:
    """x * 2^exponent, exact if x's dtype can hold the result."""
    by = w.mul if exponent > 0 else w.div
    left = abs(exponent)
    while left:
        step = min(left, _STEP)
        x, left = by(x, w.constant(float(1 << step), "f32")), left - step
    return x
