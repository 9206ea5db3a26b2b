"""Translators of the operations of torch.ops.fusion_moe: what each of them computes is said here and nowhere else.

M rows (T tokens x k slots), K in-features, N out-features, G groups (experts), H hidden, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion_moe.encodings import find
from fusion_moe.errors import DtypeError, OptionError, ShapeError, Untranslatable
from fusion_moe.ir.builder import FusionDefinition, rows_like
from fusion_moe.ir.core import Value
from fusion_moe.ir.kinds.rows import weighted
from fusion_moe.ir.kinds.rules import need_dtype, need_float, need_same
from fusion_moe.ir.kinds.shape import elements, merged, split_dim
from fusion_moe.ir.text import parse
from fusion_moe.ir.types import FLOATS, accumulated, plain
from fusion_moe.translate import translator

ACTIVATION_FORMATS = ("bf16", "nvfp4")
WEIGHT_LAYOUTS = ("linear", "sf128x4", "w16x64")


def flat(fd: FusionDefinition, x: Value, keep: int) -> tuple[Value, Callable[[Value], Value]]:
    """x [..., last `keep` dims] -> [rows, last dims], and the way back for a result [rows, N] -> [..., N]."""
    lead = x.type.shape[: len(x.type.shape) - keep]
    if len(lead) == 1:
        return x, lambda y: y
    rows = fd.ops.reshape(x, new_shape=merged(x.type.shape, keep))
    return rows, lambda y: fd.ops.reshape(y, new_shape=(*lead, *y.type.shape[1:]))


def operand(fd: FusionDefinition, x: Value, ends: Value, activation_format: str) -> Value:
    """x [M, K] -> [M/g, K], to be quantized or not: the one decode scale of its rows may not depend on those that belong to no group."""
    rows = fd.partition_by(x, ends)
    return fd.ops.zero_rest(rows, ends) if activation_format == "nvfp4" else rows


def product(
    fd: FusionDefinition, a: Value, weight: Sequence[Value], ends: Value, activation_format: str, dtype: str,
    weight_format: str = "nvfp4", weight_layout: str = "linear", transposed: bool = False, k_major: bool = False,
) -> Value:  # fmt: skip
    """a [M/g, K], the parts of a weight [G, N, K], ends i32[G]@ends(g) -> dtype[M/g, N]

    transposed: the weight is float[G, K, N]. k_major: its codes are [G, K/2, N], strided so that the two of a byte run along K.
    """
    _one_of("activation_format", activation_format, ACTIVATION_FORMATS)
    w = packed(fd, weight, weight_format, weight_layout, k_major)
    if transposed:
        _check_transposed(w, activation_format)
        return fd.ops.cast(fd.ops.grouped_mm_t(a, w, ends), dtype=dtype)
    stored = {} if weight_layout == "linear" else {"w_layout": weight_layout}
    if activation_format == "nvfp4":
        a = fd.ops.quantize(a, fd.ops.decode_scale(a, encoding="nvfp4"), encoding="nvfp4")
    return fd.ops.cast(fd.ops.grouped_mm(a, w, ends, **stored), dtype=dtype)


def _check_transposed(w: Value, activation_format: str) -> None:
    if w.type.dtype not in FLOATS or w.type.layout != "linear" or activation_format != "bf16":
        raise OptionError(
            f"transposed = True with a weight {w.type} and activation_format = {activation_format!r}",
            expected="floats [G, K, N], and activations as they are",
        )


def packed(fd: FusionDefinition, parts: Sequence[Value], weight_format: str, layout: str, k_major: bool = False) -> Value:
    """The parts of a weight -> the weight; a plain one in row-major order is its only part."""
    _one_of("weight_layout", layout, WEIGHT_LAYOUTS)
    plain_one = weight_format in FLOATS and layout == "linear"
    names = ("values",) if plain_one else tuple(part.name for part in find(weight_format).parts)
    if len(parts) != len(names):
        raise ShapeError(f"{len(parts)} tensors of a weight", expected=f"{len(names)} for {weight_format}: {', '.join(names)}")
    fd.mark_weight(*parts)
    if plain_one:
        need_dtype("the weight", parts[0].type, weight_format)
        return parts[0]
    return fd.ops.pack(*parts, encoding=weight_format, layout=layout, **({"transposed": True} if k_major else {}))


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{name} = {value!r}", expected=f"one of {', '.join(choices)}")


@translator("fusion_moe::nvfp4_quantize")
def nvfp4_quantize(fd: FusionDefinition, x: Value, decode_scale: Value | None = None) -> tuple[Value, ...]:
    """x float[..., N, K] -> codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16], decode_scale f32[...]"""
    made = fd.ops.decode_scale(x, encoding="nvfp4") if decode_scale is None else decode_scale
    codes, block_scale = fd.ops.unpack(fd.ops.quantize(x, made, encoding="nvfp4"))
    # an operation of torch may not return its own input
    return codes, block_scale, made if decode_scale is None else fd.ops.cast(made, dtype="f32")


@translator("fusion_moe::nvfp4_grouped_mm")
def nvfp4_grouped_mm(
    fd: FusionDefinition, a: Value, b_codes: Value, b_block_scale: Value, b_decode_scale: Value, offs: Value,
    activation_format: str = "bf16", weight_layout: str = "linear", out_dtype: str | None = None,
) -> Value:  # fmt: skip
    """a [..., K], weight nvfp4[G, N, K], offs i32[G] -> [..., N]"""
    return grouped_mm(fd, a, (b_codes, b_block_scale, b_decode_scale), offs, "nvfp4", weight_layout, activation_format, out_dtype)


@translator("fusion_moe::grouped_mm")
def grouped_mm(
    fd: FusionDefinition, a: Value, weight: Sequence[Value], offs: Value, weight_format: str = "nvfp4", weight_layout: str = "linear",
    activation_format: str = "bf16", out_dtype: str | None = None, transposed: bool = False,
) -> Value:  # fmt: skip
    """a [..., K], the parts of a weight [G, N, K] in the encoding `weight_format`, offs i32[G] -> [..., N]

    transposed: the weight is float[G, K, N].
    """
    if out_dtype is not None and out_dtype not in FLOATS:
        raise DtypeError(f"out_dtype {out_dtype}", expected=f"one of {', '.join(FLOATS)}")
    rows, restore = flat(fd, a, keep=1)
    ends = fd.groups_of(offs, plain(rows.type.shape[0]))
    rows = operand(fd, rows, ends, activation_format)
    dtype = out_dtype or a.type.dtype
    return restore(product(fd, rows, weight, ends, activation_format, dtype, weight_format, weight_layout, transposed=transposed))


@translator("fusion_moe::grouped_swizzle_block_scale")
def grouped_swizzle_block_scale(fd: FusionDefinition, block_scale: Value, offs: Value) -> Value:
    """block_scale f8e4m3[M, K/16], offs i32[G] -> f8e4m3[M/g%128, K/16]@sf128x4"""
    ends = fd.groups_of(offs, plain(block_scale.type.shape[0]))
    return fd.ops.grouped_swizzle(fd.partition_by(block_scale, ends), ends, layout="sf128x4")


@translator("fusion_moe::scaled_swiglu")
def scaled_swiglu(
    fd: FusionDefinition, x: Value, scale: Value | None = None, interleave: int = 0, limit: float | None = None, alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Value:  # fmt: skip
    """x [..., 2H], scale [...] -> [..., H]: in float32 (f64 in float64), rounded once to the dtype of x"""
    need_float("x", x.type)
    rows, restore = flat(fd, x, keep=1)
    gate, up = (fd.ops.cast(half, dtype=accumulated(x.type.dtype)) for half in _halves(fd, rows, interleave))
    if limit is not None:
        gate = fd.ops.minimum(gate, float(limit))
        up = fd.ops.maximum(fd.ops.minimum(up, float(limit)), -float(limit))
    active = fd.ops.silu(gate) if alpha == 1.0 else fd.ops.mul(gate, fd.ops.sigmoid(fd.ops.mul(gate, float(alpha))))
    y = fd.ops.mul(active, fd.ops.add(up, float(up_offset)) if up_offset else up)
    if scale is not None:
        y = fd.ops.mul(y, _column(fd, scale, y))
    return restore(fd.ops.cast(y, dtype=x.type.dtype))


def _halves(fd: FusionDefinition, x: Value, interleave: int) -> tuple[Value, Value]:
    """x [M, 2H] -> gate [M, H], up [M, H]; interleave 0: gate is the first half, else blocks of `interleave` gate, then up columns"""
    rows, width = x.type.shape
    half = split_dim(plain(width), 2)
    if not isinstance(half, int) or interleave < 0 or half % (interleave or 1):
        raise ShapeError(f"x {x.type} with interleave = {interleave}", expected=f"a last size that is a multiple of 2 * {interleave}")
    if interleave == 0:
        return tuple(fd.ops.slice(x, start_indices=(0, s), end_indices=(rows, s + half)) for s in (0, half))
    block = interleave
    blocks = fd.ops.reshape(x, new_shape=(rows, half // block, 2, block))
    parts = (fd.ops.slice(blocks, start_indices=(0, 0, s, 0), end_indices=(rows, half // block, s + 1, block)) for s in (0, 1))
    return tuple(fd.ops.reshape(part, new_shape=(rows, half)) for part in parts)


def _column(fd: FusionDefinition, scale: Value, like: Value) -> Value:
    """scale [...] with one element for each row of `like` [M, N] -> [M, 1], in its dtype"""
    rows = like.type.shape[0]
    return fd.ops.cast(fd.ops.reshape(scale, new_shape=(rows_like(rows, elements(scale.type.shape)), 1)), dtype=like.type.dtype)


@translator("fusion_moe::route")
def route(fd: FusionDefinition, ids: Value, groups: int) -> tuple[Value, ...]:
    """ids int[T, k] -> ends i32[G]@ends(g), row_of i32[M/g], slot_of i32[T, k]"""
    return fd.ops.route(ids, groups=fd.fresh_groups(groups))


@translator("fusion_moe::combine")
def combine(fd: FusionDefinition, y: Value, slot_of: Value, w: Value) -> Value:
    """y [M, N], slot_of i32[T, k], w [T, k] -> [T, N]"""
    return fd.ops.cast(fd.ops.combine(y, slot_of, w), dtype=y.type.dtype)


@translator("fusion_moe::group_add")
def group_add(fd: FusionDefinition, y: Value, bias: Value, offs: Value) -> Value:
    """y [M, N], bias [G, N], offs i32[G] -> [M, N]"""
    ends = fd.groups_of(offs, plain(y.type.shape[0]))
    return biased(fd, fd.partition_by(y, ends), bias, ends)


def biased(fd: FusionDefinition, y: Value, bias: Value | None, ends: Value) -> Value:
    """y [M/g, N] with bias [G, N], if there is one, added to the rows of each group"""
    fd.mark_weight(bias)
    return y if bias is None else fd.ops.group_add(y, bias, ends)


@translator("fusion_moe::expert_mlp")
def expert_mlp(
    fd: FusionDefinition, x: Value, ids: Value, w: Value, gate_up_codes: Value, gate_up_block_scale: Value, gate_up_decode_scale: Value,
    down_codes: Value, down_block_scale: Value, down_decode_scale: Value, gate_up_bias: Value | None = None, down_bias: Value | None = None,
    interleave: int = 0, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0, scale_on: str = "output",
    activation_format: str = "bf16", weight_layout: str = "linear",
) -> Value:  # fmt: skip
    """x [..., H], ids int[T, k], w [T, k], gate_up nvfp4[G, 2I, H], down nvfp4[G, H, I] -> [..., H]"""
    gate_up, down = (gate_up_codes, gate_up_block_scale, gate_up_decode_scale), (down_codes, down_block_scale, down_decode_scale)
    return fused_experts(
        fd, x, ids, w, gate_up, down, gate_up_bias, down_bias, "nvfp4", weight_layout, interleave, limit, alpha, up_offset, scale_on,
        activation_format,
    )  # fmt: skip


@translator("fusion_moe::fused_experts")
def fused_experts(
    fd: FusionDefinition, x: Value, ids: Value, w: Value, gate_up: Sequence[Value], down: Sequence[Value],
    gate_up_bias: Value | None = None, down_bias: Value | None = None, weight_format: str = "nvfp4", weight_layout: str = "linear",
    interleave: int = 0, limit: float | None = None, alpha: float = 1.0, up_offset: float = 0.0, scale_on: str = "output",
    activation_format: str = "bf16", transposed: bool = False,
) -> Value:  # fmt: skip
    """x [..., H], ids int[T, k], w [T, k], the parts of gate_up [G, 2I, H] and down [G, H, I] in `weight_format` -> [..., H]

    transposed: the weights are floats, gate_up [G, H, 2I] and down [G, I, H].
    """
    _one_of("scale_on", scale_on, ("output", "input"))
    tokens, restore = flat(fd, x, keep=1)
    ids, w = flat(fd, ids, keep=1)[0], flat(fd, w, keep=1)[0]
    need_same("token count", "x", tokens.type.shape[0], "ids", ids.type.shape[0])
    dtype = x.type.dtype
    ends, row_of, slot_of = route(fd, ids, _count(gate_up[0]))
    a = fd.ops.index_select(tokens, row_of, dim=0)
    if scale_on == "input":
        wide = accumulated(dtype)
        a = fd.ops.cast(weighted(fd, fd.ops.cast(a, dtype=wide), w, slot_of), dtype=dtype)
        w = fd.ops.full(shape=w.type.shape, fill_value=1.0, dtype=wide)
    y = product(fd, a, gate_up, ends, activation_format, dtype, weight_format, weight_layout, transposed=transposed)
    y = biased(fd, y, gate_up_bias, ends)
    y = scaled_swiglu(fd, y, None, interleave, limit, alpha, up_offset)
    y = product(fd, y, down, ends, activation_format, dtype, weight_format, weight_layout, transposed=transposed)
    y = biased(fd, y, down_bias, ends)
    return restore(combine(fd, y, slot_of, w))


def _count(elements: Value) -> int:
    count = elements.type.shape[0]
    if not isinstance(count, int):
        raise ShapeError(f"{count} experts in {elements.type}", expected="a number of experts known when compiling")
    return count


@translator("fusion_moe::run")
def run(
    fd: FusionDefinition, program: str, inputs: tuple[Value, ...], sizes: tuple, options: str | None = None,
    parts: tuple[int, ...] | None = None,
) -> tuple[Value, ...]:  # fmt: skip
    """A program that stands in the graph already (a backward): its operations, to be fused with their neighbours."""
    if parts:
        raise Untranslatable(f"inputs of {list(parts)} parts, which only a call of its own joins without a copy")
    fusion = parse(program)
    return fd.inline(fusion, inputs, dict(zip(fusion.symbols, sizes, strict=True)))
