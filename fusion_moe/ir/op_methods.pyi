"""`fd.ops` for type checkers and editors. Written by tools/ops_stub.py."""

from collections.abc import Callable, Sequence
from typing import Any, overload

from .core import Operand, Value
from .sizes import AnySize
from .types import Dim, Groups

class Ops:
    def __init__(self, append: Callable[..., tuple[Value, ...]]) -> None: ...
    def cast(self, x: Value, /, dtype: str) -> Value:
        """x in another dtype, rounded once: bf16, f16, f32, f64, f8e4m3, i32, i64, u8, bool, ..."""
    def where(self, condition: Value, a: Operand, b: Operand, /) -> Value:
        """a where the mask condition is true, b elsewhere; sizes equal or 1. A number takes the
        dtype of the tensor beside it.
        """
    def neg(self, x: Value, /) -> Value:
        """neg of each element of x, in its dtype."""
    def abs(self, x: Value, /) -> Value:
        """abs of each element of x, in its dtype."""
    def exp(self, x: Value, /) -> Value:
        """exp of each element of x, in its dtype."""
    def log(self, x: Value, /) -> Value:
        """log of each element of x, in its dtype."""
    def expm1(self, x: Value, /) -> Value:
        """expm1 of each element of x, in its dtype."""
    def log1p(self, x: Value, /) -> Value:
        """log1p of each element of x, in its dtype."""
    def sqrt(self, x: Value, /) -> Value:
        """sqrt of each element of x, in its dtype."""
    def rsqrt(self, x: Value, /) -> Value:
        """rsqrt of each element of x, in its dtype."""
    def reciprocal(self, x: Value, /) -> Value:
        """reciprocal of each element of x, in its dtype."""
    def tanh(self, x: Value, /) -> Value:
        """tanh of each element of x, in its dtype."""
    def erf(self, x: Value, /) -> Value:
        """erf of each element of x, in its dtype."""
    def erfc(self, x: Value, /) -> Value:
        """erfc of each element of x, in its dtype."""
    def sin(self, x: Value, /) -> Value:
        """sin of each element of x, in its dtype."""
    def cos(self, x: Value, /) -> Value:
        """cos of each element of x, in its dtype."""
    def atan(self, x: Value, /) -> Value:
        """atan of each element of x, in its dtype."""
    def floor(self, x: Value, /) -> Value:
        """floor of each element of x, in its dtype."""
    def round(self, x: Value, /) -> Value:
        """round of each element of x, in its dtype."""
    def relu(self, x: Value, /) -> Value:
        """relu of each element of x, in its dtype."""
    def sigmoid(self, x: Value, /) -> Value:
        """sigmoid of each element of x, in its dtype."""
    def silu(self, x: Value, /) -> Value:
        """silu of each element of x, in its dtype."""
    def add(self, a: Operand, b: Operand, /) -> Value:
        """add of each element of a and b, in their one dtype; sizes equal or 1. A number takes
        the dtype of the tensor beside it.
        """
    def sub(self, a: Operand, b: Operand, /) -> Value:
        """sub of each element of a and b, in their one dtype; sizes equal or 1. A number takes
        the dtype of the tensor beside it.
        """
    def mul(self, a: Operand, b: Operand, /) -> Value:
        """mul of each element of a and b, in their one dtype; sizes equal or 1. A number takes
        the dtype of the tensor beside it.
        """
    def div(self, a: Operand, b: Operand, /) -> Value:
        """div of each element of a and b, in their one dtype; sizes equal or 1. A number takes
        the dtype of the tensor beside it.
        """
    def minimum(self, a: Operand, b: Operand, /) -> Value:
        """minimum of each element of a and b, in their one dtype; sizes equal or 1. A number
        takes the dtype of the tensor beside it.
        """
    def maximum(self, a: Operand, b: Operand, /) -> Value:
        """maximum of each element of a and b, in their one dtype; sizes equal or 1. A number
        takes the dtype of the tensor beside it.
        """
    def pow(self, a: Operand, b: Operand, /) -> Value:
        """pow of each element of a and b, in their one dtype; sizes equal or 1. A number takes
        the dtype of the tensor beside it.
        """
    def lt(self, a: Operand, b: Operand, /) -> Value:
        """lt of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def le(self, a: Operand, b: Operand, /) -> Value:
        """le of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def gt(self, a: Operand, b: Operand, /) -> Value:
        """gt of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def ge(self, a: Operand, b: Operand, /) -> Value:
        """ge of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def eq(self, a: Operand, b: Operand, /) -> Value:
        """eq of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def ne(self, a: Operand, b: Operand, /) -> Value:
        """ne of each element of a and b, a mask; sizes equal or 1. A number takes the dtype of
        the tensor beside it.
        """
    def logical_and(self, a: Operand, b: Operand, /) -> Value:
        """logical_and of each element of a and b, in their one dtype; sizes equal or 1. A number
        takes the dtype of the tensor beside it.
        """
    def logical_or(self, a: Operand, b: Operand, /) -> Value:
        """logical_or of each element of a and b, in their one dtype; sizes equal or 1. A number
        takes the dtype of the tensor beside it.
        """
    def logical_not(self, x: Value, /) -> Value:
        """logical_not of each element of x, in its dtype."""
    def reshape(self, x: Value, /, new_shape: Sequence[Dim]) -> Value:
        """The elements of x in row-major order, in another shape with as many elements."""
    def permute(self, x: Value, /, dims: Sequence[int]) -> Value:
        """Dimension i of the result is dimension dims[i] of x."""
    def broadcast_in_dim(
        self, x: Value, /, shape: Sequence[Dim], broadcast_dims: Sequence[int],
    ) -> Value:
        """Dimension i of x becomes dimension broadcast_dims[i] of the result; sizes of 1 are
        repeated, other dims are new. As in nvFuser.
        """
    def slice(
        self, x: Value, /, start_indices: Sequence[AnySize], end_indices: Sequence[Dim],
    ) -> Value:
        """x[start:end] in each dimension."""
    def pad(
        self, x: Value, /, before: Sequence[AnySize], after: Sequence[AnySize],
        shape: Sequence[Dim],
    ) -> Value:
        """x with zeros before and after it in each dimension; shape: that of the result."""
    @overload
    def cat(self, *xs: Value, dim: int) -> Value:
        """Tensors one after another along a dimension; they have one dtype, and their other
        sizes are equal.
        """
    @overload
    def cat(self, operands: Sequence[Operand], /, dim: int) -> Value:
        """Tensors one after another along a dimension; they have one dtype, and their other
        sizes are equal.
        """
    def full(self, shape: Sequence[Dim], fill_value: float | bool, dtype: str) -> Value:
        """A tensor whose elements are all one number."""
    def sum(self, x: Value, /, dims: Sequence[int], keepdim: bool) -> Value:
        """Sums over dimensions, in float32 (float64 for float64), rounded once to the dtype of
        x.
        """
    def logsumexp(self, x: Value, /) -> Value:
        """log(sum(exp(x))) over the last dimension, which stays with size 1: computed in float32
        (float64 for float64), rounded once to the dtype of x.
        """
    def topk_ids(
        self, logits: Value, bias: Operand, /, k: int, scoring: str = 'softmax', n_group: int = 1,
        topk_group: int = 1, best_of_group: int = 1,
    ) -> Value:
        """logits [T, E], bias [E] or 0 -> ids i64[T, k]: the experts with the best scores (plus
        bias), best first; of equal ones the first.

        n_group > 1: of n_group equal runs of experts, only the topk_group with the largest
        sums of best_of_group scores count.
        """
    def routing_map(self, ids: Value, /, experts: int) -> Value:
        """ids int[T, k] -> bool[T, experts]: whether an expert is one of the token's. An id that
        is no expert is none.
        """
    def topk_weights(
        self, logits: Value, ids: Value, /, scoring: str = 'softmax', renormalize: bool = False,
        routed_scaling_factor: float = 1.0, dtype: str | None = None,
    ) -> Value:
        """logits [T, E], ids int[T, k] -> f32[T, k]: the scores of these experts times
        routed_scaling_factor (f64 for f64).

        renormalize: divided by their sum; for softmax, the softmax of only the chosen logits.
        dtype: to which results are rounded.
        """
    def topk_weights_backward(
        self, logits: Value, ids: Value, dw: Value, /, scoring: str = 'softmax',
        renormalize: bool = False, routed_scaling_factor: float = 1.0,
    ) -> Value:
        """logits [T, E], ids int[T, k], dw f32[T, k], the gradient of `topk_weights` -> the
        gradient of logits [T, E], in their dtype.
        """
    def ends(self, offs: Value, /, rows: AnySize, groups: Groups) -> Value:
        """offs i32[G], where the groups of this many rows end -> i32[G]@ends(g), which grouped
        operations take.
        """
    def problem_ends(
        self, starts: Value, problem_sizes: Value, padded_starts: Value, /, rows: AnySize,
        groups: Groups, n: int, k: int,
    ) -> Value:
        """starts i32[G], problem_sizes i32[G, 3], padded_starts i32[G] -> i32[G]@ends(g): a
        partition in nvFuser's form.
        """
    def partition(self, x: Value, ends: Value, /) -> Value:
        """x [M, ...] -> [M/g, ...]: the rows in the groups that end at `ends`. No data moves."""
    def zero_rest(self, x: Value, ends: Value, /) -> Value:
        """x [M/g, ...] with the rows past the last end set to zero."""
    def route(
        self, ids: Value, /, groups: Groups, first_expert: int | None = None,
    ) -> tuple[Value, Value, Value]:
        """ids int[T, k], experts of tokens -> ends i32[G]@ends(g), row_of i32[M/g], slot_of
        i32[T, k].

        row_of: the token of each row, sorted by expert, stably; slot_of: the row of each
        slot. first_expert: the id of the first group; rows of ids that name no group come
        past the last end. None: ids start at 0, and every id must name a group, or be -1,
        which names none.
        """
    def place(self, ids: Value, expert_map: Value, /, here: int) -> Value:
        """ids int[T, k], experts of tokens; expert_map i32[E], where each expert lies, at 0 to
        here - 1 or, with -1, elsewhere -> i32[T, k]: the place of each slot's expert, -1 for
        the id -1.

        Every id must be one of the E experts, or -1.
        """
    def index_select(self, x: Value, index: Value, /, dim: int) -> Value:
        """The elements of x at index int[N] along a dimension."""
    def index_put_accumulate(self, acc: Value, index: Value, value: Value, /) -> Value:
        """acc [N, ...] with the rows of value [M, ...] added at index int[M]."""
    def invert(self, slot_of: Value, /, rows: Dim) -> Value:
        """slot_of i32[T, k], a permutation of the rows -> i32[M]: the flat slot that each row
        serves.
        """
    def combine(self, y: Value, slot_of: Value, w: Value, /) -> Value:
        """y [M, N], slot_of int[T, k], w [T, k] -> f32[T, N]: w times the rows of each token's
        slots, added in their order.
        """
    @overload
    def pack(self, *parts: Value, encoding: str, layout: str, transposed: bool = False) -> Value:
        """The parts of an encoding -> a value of it: codes u8[..., N, K/2], block_scale
        f8e4m3[..., N, K/16], decode_scale f32[...] or [..., S] -> nvfp4[..., N, K]; w
        bf16[..., N, K] -> bf16[..., N, K]@layout

        layout: how the parts are stored, each in the shape of its storage. transposed: the
        elements are [..., K/2, N], strided so that the two codes of a byte still run along K
        and no byte has to move.
        """
    @overload
    def pack(
        self, operands: Sequence[Operand], /, encoding: str, layout: str, transposed: bool = False,
    ) -> Value:
        """The parts of an encoding -> a value of it: codes u8[..., N, K/2], block_scale
        f8e4m3[..., N, K/16], decode_scale f32[...] or [..., S] -> nvfp4[..., N, K]; w
        bf16[..., N, K] -> bf16[..., N, K]@layout

        layout: how the parts are stored, each in the shape of its storage. transposed: the
        elements are [..., K/2, N], strided so that the two codes of a byte still run along K
        and no byte has to move.
        """
    def unpack(self, x: Value, /) -> Any:
        """nvfp4[..., N, K] -> codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16]: all parts
        except the scales of whole matrices
        """
    @overload
    def straight_through(self, w: Value, master: Value, *turned: Value, how: str) -> Value:
        """w nvfp4[..., N, K] in any layout, master float[..., N, K] -> w, whose gradient the
        master gets: w was rounded from it. turned: the same of the transposed matrices, for
        the backward.

        how: "exact": the forward is that of w alone, and the backward computes again what it
        reads; "float": so too, but the gradients of activations are products with the master;
        "saved": the forward saves products for the backward.
        """
    @overload
    def straight_through(self, operands: Sequence[Operand], /, how: str) -> Value:
        """w nvfp4[..., N, K] in any layout, master float[..., N, K] -> w, whose gradient the
        master gets: w was rounded from it. turned: the same of the transposed matrices, for
        the backward.

        how: "exact": the forward is that of w alone, and the backward computes again what it
        reads; "float": so too, but the gradients of activations are products with the master;
        "saved": the forward saves products for the backward.
        """
    def decode_scale(self, x: Value, /, encoding: str) -> Value:
        """x float[..., N, K] -> f32[...]: the scale that each matrix gets in an encoding; for
        NVFP4 amax / 2688.
        """
    @overload
    def quantize(self, x: Value, *beside: Value, encoding: str, scales: str = 'max') -> Value:
        """x float[..., N, K], decode_scale f32[...] or [..., S] if the encoding has one ->
        nvfp4[..., N, K], quantized along K; scales: the rule for those of blocks

        x [M/g, K], ends -> mxfp8_columns[M/g, K]: quantized along the rows of each group
        (runs.py).
        """
    @overload
    def quantize(self, operands: Sequence[Operand], /, encoding: str, scales: str = 'max') -> Value:
        """x float[..., N, K], decode_scale f32[...] or [..., S] if the encoding has one ->
        nvfp4[..., N, K], quantized along K; scales: the rule for those of blocks

        x [M/g, K], ends -> mxfp8_columns[M/g, K]: quantized along the rows of each group
        (runs.py).
        """
    @overload
    def dequantize(self, x: Value, *ends: Value, dtype: str) -> Value:
        """x mxfp8[..., N, K] -> dtype[..., N, K], rounded once; ends: of its rows, if blocks lie
        along rows of groups
        """
    @overload
    def dequantize(self, operands: Sequence[Operand], /, dtype: str) -> Value:
        """x mxfp8[..., N, K] -> dtype[..., N, K], rounded once; ends: of its rows, if blocks lie
        along rows of groups
        """
    def transpose_blocks(self, codes: Value, scales: Value, /) -> tuple[Value, Value]:
        """The parts of matrices in blocks of 128 x 128, codes f8e4m3[G, N, K] and the scale of
        each row of a block [G, N, K/128], -> those of the transposed matrices, [G, K, N] and
        [G, K, N/128]; N and K multiples of 32, last blocks may be short
        """
    def transpose_row_blocks(self, codes: Value, ends: Value, /) -> Value:
        """codes f8e4m3[M/g, K] in blocks of 128 rows of each group, K a multiple of 32 ->
        f8e4m3[ceil(M/128) + G, K, 128]: those of each column of a block follow each other,
        columns in the order that `runs.transpose_row_blocks` has
        """
    def untranspose_row_blocks(self, turned: Value, ends: Value, /, rows: Dim) -> Value:
        """The result of transpose_row_blocks -> its codes f8e4m3[M/g, K]; rows: M/g"""
    def grouped_swizzle(self, x: Value, ends: Value, /, layout: str) -> Value:
        """x f8e4m3[M/g, K/16] -> f8e4m3[M/g%128, K/16]@sf128x4: each group is stored separately
        in the layout
        """
    @overload
    def relayout(self, x: Value, *ends: Value, layout: str) -> Value:
        """x nvfp4[M/g, K], ends -> nvfp4[M/g, K]@sf128x4: the same value, its block scales
        stored in another layout

        x nvfp4[..., N, K] -> nvfp4[..., N, K]@w16x64: a weight in a layout of weights.
        """
    @overload
    def relayout(self, operands: Sequence[Operand], /, layout: str) -> Value:
        """x nvfp4[M/g, K], ends -> nvfp4[M/g, K]@sf128x4: the same value, its block scales
        stored in another layout

        x nvfp4[..., N, K] -> nvfp4[..., N, K]@w16x64: a weight in a layout of weights.
        """
    def grouped_mm(
        self, a: Value, w: Value, ends: Value, /, a_layout: str = 'linear',
        w_layout: str = 'linear', wgrad: str = '', operands: str = '',
    ) -> Value:
        """a [M/g, K], w [G, N, K] of any encoding -> f32[M/g, N]: each row times its group's
        matrix. Layouts: how a and w are stored.

        wgrad: for trained operands in 8 bits, what the gradient of w is made from: "mxfp8" or
        "fp8", their own encodings, or "bf16". operands: "int8" rounds floats a and E2M1 codes
        w.
        """
    def grouped_mm_t(
        self, a: Value, w: Value, ends: Value, /, w_layout: str = 'linear', wgrad: str = '',
    ) -> Value:
        """a [M/g, N], w [G, N, K] of any encoding -> f32[M/g, K]: each row times the transposed
        matrix of its group. wgrad: see grouped_mm.
        """
    def grouped_outer(self, a: Value, b: Value, ends: Value, /) -> Value:
        """a [M/g, N], b [M/g, K] -> f32[G, N, K]: the outer products of each group's rows,
        added; an empty group is zero.
        """
    def group_add(self, y: Value, bias: Value, ends: Value, /) -> Value:
        """y [M/g, N] plus bias [G, N] of each row's group; rows past the last end stay
        unchanged.
        """
    def group_mul(self, y: Value, scale: Value, ends: Value, /) -> Value:
        """y [M/g, N] times scale [G, N] of each row's group; rows past the last end stay
        unchanged.
        """
    def group_sum(self, y: Value, ends: Value, /) -> Value:
        """y [M/g, N] -> f32[G, N]: the sum of each group's rows; zero for an empty group."""
    @overload
    def dispatch(
        self, x: Value, ids: Value, w: Value, peers: Value, *scales: Value, groups: Groups,
        experts: int, group: str,
    ) -> Any:
        """x [T, H], ids int[T, k], experts of tokens, w [T, k] -> x [R*C/s, H], ids i32[R*C/s,
        k] and w [R*C/s, k] of all ranks, and ends i32[R]@ends(s), after the last token of
        each

        x codes of rows, with their scales [T, B] -> the scales [R*C/s, B] of all ranks, too,
        after these.

        Rows after a rank's last token have ids -1. What x, its scales and w have there, and
        for tokens with no expert on this rank, is not defined: no expert here reads it.
        """
    @overload
    def dispatch(
        self, operands: Sequence[Operand], /, groups: Groups, experts: int, group: str,
    ) -> Any:
        """x [T, H], ids int[T, k], experts of tokens, w [T, k] -> x [R*C/s, H], ids i32[R*C/s,
        k] and w [R*C/s, k] of all ranks, and ends i32[R]@ends(s), after the last token of
        each

        x codes of rows, with their scales [T, B] -> the scales [R*C/s, B] of all ranks, too,
        after these.

        Rows after a rank's last token have ids -1. What x, its scales and w have there, and
        for tokens with no expert on this rank, is not defined: no expert here reads it.
        """
    def combine_from(
        self, y: Value, all_ids: Value, ids: Value, ends: Value, peers: Value, /, experts: int,
        group: str,
    ) -> Value:
        """y [R*C/s, H] and all_ids i32[R*C/s, k], sums and ids of the tokens of all ranks, ids
        int[T, k] of this rank, ends i32[R]@ends(s) -> [T, H], for its own tokens.

        Of each rank that holds an expert of a token, its row for that token is added, in the
        order of ranks, in float32 (f64 in float64), and the sum is rounded once.
        """
