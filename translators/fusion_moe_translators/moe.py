"""Translators of the operations of torch.ops.fusion_moe: the only definition of what each operation
computes.

M rows (T tokens x k slots), K in-features, N out-features, G groups (experts), H hidden, I
intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusion_moe.definitions.translate import translator
from fusion_moe.errors import OptionError, ShapeError, Untranslatable, need_one_of
from fusion_moe.ir.activation import Activation, activated, read, swiglu
from fusion_moe.ir.builder import FusionDefinition, rows_like
from fusion_moe.ir.core import Value
from fusion_moe.ir.kinds import eight_bits, int8
from fusion_moe.ir.kinds.quantized import as_rows, has_matrix_scale
from fusion_moe.ir.kinds.router import EPSILON
from fusion_moe.ir.kinds.rows import weighted
from fusion_moe.ir.kinds.rules import need_rank, need_same
from fusion_moe.ir.kinds.shape import merged
from fusion_moe.ir.sizes import AnySize
from fusion_moe.ir.text import parse
from fusion_moe.ir.types import INTS, Dim, TensorType, accumulated, elements, plain

from . import arguments
from .arguments import shown
from .lora import Adapter, adapter, low_rank
from .pointwise import softplus
from .weights import is_plain, packed, weight_type

_BEFORE_RANKS = 4  # entries of `peers`, before one for each rank
# those of recipes, and int8, round weights too
ACTIVATION_FORMATS = ("bf16", "nvfp4", int8.NAME, "fp8", *eight_bits.BY_FORMAT)


def flat(fd: FusionDefinition, x: Value, keep: int) -> tuple[Value, Callable[[Value], Value]]:
    """x [..., last `keep` dims] -> [rows, last dims], and the way back for a result [rows, N] ->
    [..., N].
    """
    lead = x.type.shape[: len(x.type.shape) - keep]
    if len(lead) == 1:
        return x, lambda y: y
    rows = fd.ops.reshape(x, new_shape=merged(x.type.shape, keep))
    return rows, lambda y: fd.ops.reshape(y, new_shape=(*lead, *y.type.shape[1:]))


def operand(fd: FusionDefinition, x: Value, ends: Value, activation_format: str) -> Value:
    """x [M, K] -> [M/g, K]. A decode scale of all rows must not depend on rows that belong to no
    group.
    """
    rows = fd.partition_by(x, ends)
    return fd.ops.zero_rest(rows, ends) if has_matrix_scale(activation_format) else rows


def product(
    fd: FusionDefinition,
    a: Value,
    weight: Sequence[Value],
    ends: Value,
    activation_format: str,
    dtype: str,
    weight_format: str,
    weight_layout: str = "linear",
    transposed: bool = False,
    k_major: bool = False,
    lora: Adapter | None = None,
    straight_through: str = "exact",
) -> Value:
    """a [M/g, K], the parts of a weight [G, N, K], ends i32[G]@ends(g) -> dtype[M/g, N]

    transposed: the weight is float[G, K, N]. k_major: its codes are [G, K/2, N], strided so that
    the two codes of a byte run along K. lora: the adapter's product is added before rounding.
    straight_through: how a weight with a master is differentiated.
    """
    w = packed(fd, weight, weight_format, weight_layout, k_major, straight_through)
    if activation_format in eight_bits.BY_FORMAT:
        y = eight_bits.product(fd, a, w, ends, activation_format, transposed)
    elif transposed:
        y = fd.ops.grouped_mm_t(a, w, ends)
    else:
        stored = {} if weight_layout == "linear" else {"w_layout": weight_layout}
        rows = as_rows(fd, a, activation_format)
        y = fd.ops.grouped_mm(rows, w, ends, **stored, **int8.attributes(activation_format))
    return fd.ops.cast(y if lora is None else y + low_rank(fd, a, lora, ends), dtype=dtype)


@translator("fusion_moe::nvfp4_quantize")
def nvfp4_quantize(
    fd: FusionDefinition, x: Value, decode_scale: Value | None = None
) -> tuple[Value, ...]:
    """x float[..., N, K] -> codes u8[..., N, K/2], block_scale f8e4m3[..., N, K/16], decode_scale
    f32[...]
    """
    arguments.need_dtype("x", x.type, arguments.QUANTIZABLE)
    scale = fd.ops.decode_scale(x, encoding="nvfp4") if decode_scale is None else decode_scale
    codes, block_scale = fd.ops.unpack(fd.ops.quantize(x, scale, encoding="nvfp4"))
    # an operation of torch must not return its own input
    return codes, block_scale, scale if decode_scale is None else fd.ops.cast(scale, dtype="f32")


@translator("fusion_moe::nvfp4_grouped_mm")
def nvfp4_grouped_mm(
    fd: FusionDefinition,
    a: Value,
    b_codes: Value,
    b_block_scale: Value,
    b_decode_scale: Value,
    offs: Value,
    activation_format: str = "bf16",
    weight_layout: str = "linear",
    out_dtype: str | None = None,
) -> Value:
    """a [..., K], weight nvfp4[G, N, K], offs i32[G] -> [..., N]"""
    parts = b_codes, b_block_scale, b_decode_scale
    return grouped_mm(
        fd,
        a,
        parts,
        offs,
        weight_format="nvfp4",
        weight_layout=weight_layout,
        activation_format=activation_format,
        out_dtype=out_dtype,
    )


@translator("fusion_moe::grouped_mm")
def grouped_mm(
    fd: FusionDefinition,
    a: Value,
    weight: Sequence[Value],
    offs: Value,
    lora_a: Value | None = None,
    lora_b: Value | None = None,
    *,
    weight_format: str,
    weight_layout: str = "linear",
    activation_format: str = "bf16",
    out_dtype: str | None = None,
    transposed: bool = False,
    lora_scale: float = 1.0,
    straight_through: str = "exact",
) -> Value:
    """a [..., K], the parts of a weight [G, N, K] in the encoding `weight_format`, offs i32[G] ->
    [..., N]

    transposed: the weight is float[G, K, N]. lora_a [G, r, K], lora_b [G, N, r]: its adapter.
    """
    if out_dtype is not None:
        arguments.need_float_dtype("out_dtype", out_dtype)
    w = weight_type("weight", weight, weight_format, weight_layout, transposed)
    _check_activation_format(activation_format, weight_format, weight_layout, transposed)
    arguments.need_operand("a", a.type, "the weight", w, 1 if transposed else 2)
    arguments.need_ends("offs", offs.type, w.shape[0])
    lora = adapter(
        "lora", lora_a, lora_b, lora_scale, "the weight", w, 1 if transposed else 2, a.type
    )
    rows, restore = flat(fd, a, keep=1)
    ends = fd.groups_of(offs, rows.type.shape[0])
    rows = operand(fd, rows, ends, activation_format)
    dtype = out_dtype or a.type.dtype
    y = product(
        fd,
        rows,
        weight,
        ends,
        activation_format,
        dtype,
        weight_format,
        weight_layout,
        transposed=transposed,
        lora=lora,
        straight_through=straight_through,
    )
    return restore(y)


def _check_activation_format(
    activation_format: str, weight_format: str, weight_layout: str, transposed: bool = False
) -> None:
    need_one_of("activation_format", activation_format, ACTIVATION_FORMATS)
    if activation_format in eight_bits.BY_FORMAT:
        if not is_plain(weight_format, weight_layout):
            raise OptionError(
                f"activation_format = {activation_format!r} with weights in {weight_format}, "
                f"weight_layout = {weight_layout!r}",
                expected="weights of floats in the linear layout, which are "
                "rounded in each product",
            )
    elif activation_format == int8.NAME and weight_format not in int8.WEIGHTS:
        raise OptionError(
            f"activation_format = {activation_format!r} with weights in {weight_format}",
            expected=f"weights in {' or '.join(int8.WEIGHTS)}",
        )
    elif transposed and activation_format != "bf16":
        raise OptionError(
            f"transposed = True with activation_format = {activation_format!r}",
            expected="'bf16': the blocks of weights [G, K, N] do not run along K",
        )


@translator("fusion_moe::grouped_swizzle_block_scale")
def grouped_swizzle_block_scale(fd: FusionDefinition, block_scale: Value, offs: Value) -> Value:
    """block_scale f8e4m3[M, K/16], offs i32[G] -> f8e4m3[M/g%128, K/16]@sf128x4"""
    ends = fd.groups_of(offs, block_scale.type.shape[0])
    return fd.ops.grouped_swizzle(fd.partition_by(block_scale, ends), ends, layout="sf128x4")


@translator("fusion_moe::scaled_swiglu")
def scaled_swiglu(
    fd: FusionDefinition,
    x: Value,
    scale: Value | None = None,
    interleave: int = 0,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Value:
    """x [..., 2H], scale [...] -> [..., H]: in float32 (f64 for float64), rounded once to the dtype
    of x
    """
    arguments.need_dtype("x", x.type, arguments.FLOATS)
    activation = read(swiglu(interleave, limit, alpha, up_offset))
    arguments.need_parts("x", plain(x.type.shape[-1]), activation)
    if scale is not None:
        arguments.need_dtype("scale", scale.type, arguments.FLOATS)
    rows, restore = flat(fd, x, keep=1)
    y = activated(fd, rows, activation)
    if scale is not None:
        y = y * _column(fd, scale, y)
    return restore(fd.ops.cast(y, dtype=x.type.dtype))


def _column(fd: FusionDefinition, scale: Value, like: Value) -> Value:
    """scale [...] with one element for each row of `like` [M, N] -> [M, 1], in its dtype"""
    rows = like.type.shape[0]
    return fd.ops.cast(
        fd.ops.reshape(scale, new_shape=(rows_like(rows, elements(scale.type.shape)), 1)),
        dtype=like.type.dtype,
    )


@translator("fusion_moe::route")
def route(
    fd: FusionDefinition, ids: Value, groups: AnySize, first_expert: int | None = None
) -> tuple[Value, ...]:
    """ids int[T, k] -> ends i32[G]@ends(g), row_of i32[M/g], slot_of i32[T, k]"""
    arguments.need_slots("ids", ids.type)
    local = {} if first_expert is None else {"first_expert": first_expert}
    return fd.ops.route(ids, groups=fd.fresh_groups(groups), **local)


@translator("fusion_moe::topk_router")
def topk_router(
    fd: FusionDefinition,
    logits: Value,
    k: int,
    bias: Value | None = None,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    best_of_group: int = 1,
    out_dtype: str | None = None,
) -> tuple[Value, Value]:
    """logits [T, E], bias f32[E] -> weights [T, k], in float32 unless out_dtype is given, ids
    i64[T, k]
    """
    fd.mark_weight(bias)
    arguments.need_dtype("logits", logits.type, arguments.FLOATS)
    groups = {"n_group": n_group, "topk_group": topk_group, "best_of_group": best_of_group}
    ids = fd.ops.topk_ids(logits, 0 if bias is None else bias, k=k, scoring=scoring, **groups)
    w = fd.ops.topk_weights(
        logits,
        ids,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=float(routed_scaling_factor),
        dtype=out_dtype or accumulated(logits.type.dtype),
    )
    return w, ids


@translator("fusion_moe::fused_compute_score_for_moe_aux_loss")
def fused_compute_score_for_moe_aux_loss(
    fd: FusionDefinition, logits: Value, topk: int, score_function: str
) -> tuple[Value, Value]:
    """logits [T, E] -> bool[T, E], the topk experts of each token, and their scores f32[T, E],
    whose sum is 1
    """
    arguments.need_dtype("logits", logits.type, arguments.FLOATS)
    need_one_of("score_function", score_function, ("softmax", *_SCORES))
    ids, experts = fd.ops.topk_ids(logits, 0, k=topk), logits.type.shape[1]
    assert isinstance(experts, int)  # checked by topk_ids
    chosen = fd.ops.routing_map(ids, experts=experts)
    x = fd.ops.cast(logits, dtype=accumulated(logits.type.dtype))
    if score_function == "softmax":
        return chosen, fd.ops.exp(x - fd.ops.logsumexp(x))
    scores = _SCORES[score_function](fd, x)
    total = fd.ops.sum(scores, dims=(1,), keepdim=True)
    return chosen, scores / (total + EPSILON)


def _sqrtsoftplus(fd: FusionDefinition, x: Value) -> Value:
    """The root of softplus. The root of 0 would have no derivative."""
    return fd.ops.sqrt(fd.ops.maximum(softplus(fd.ops, x), 2.0**-126))


# softmax aside, what is divided by its sum
_SCORES: dict[str, Callable[[FusionDefinition, Value], Value]] = {
    "sigmoid": lambda fd, x: fd.ops.sigmoid(x),
    "sqrtsoftplus": _sqrtsoftplus,
}


@translator("fusion_moe::fused_moe_aux_loss")
def fused_moe_aux_loss(
    fd: FusionDefinition,
    probs: Value,
    tokens_per_expert: Value,
    total_num_tokens: Value | None,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Value:
    """probs [T, E], tokens_per_expert [E], total_num_tokens [] -> []: coeff num_experts / topk
    times the sum of probs tokens_per_expert, over the square of the number of tokens
    """
    arguments.need_dtype("probs", probs.type, arguments.FLOATS)
    arguments.need_dtype("tokens_per_expert", tokens_per_expert.type, (*INTS, *arguments.FLOATS))
    if total_num_tokens is not None:
        arguments.need_dtype("total_num_tokens", total_num_tokens.type, INTS)
        need_rank("total_num_tokens", total_num_tokens.type, 0)
    if topk < 1:
        raise OptionError(f"topk = {topk}", expected="1 or more experts of a token")
    wide, (tokens, experts) = accumulated(probs.type.dtype), probs.type.shape
    need_same(
        "expert count", "tokens_per_expert", tokens_per_expert.type.shape[0], "probs", experts
    )
    counts = fd.ops.cast(fd.ops.reshape(tokens_per_expert, new_shape=(1, experts)), dtype=wide)
    weighted = fd.ops.cast(probs, dtype=wide) * counts
    total = _sum_of_all(fd, fd.ops.sum(weighted, dims=(1,), keepdim=True))
    n = (
        _tokens(fd, tokens, wide)
        if total_num_tokens is None
        else fd.ops.maximum(fd.ops.cast(total_num_tokens, dtype=wide), 1.0)
    )
    mean = total / n / n
    return fd.ops.cast(mean * (num_experts * coeff / topk), dtype=probs.type.dtype)


@translator("fusion_moe::moe_z_loss")
def moe_z_loss(fd: FusionDefinition, logits: Value, coeff: float) -> Value:
    """logits [T, E] -> f32[]: coeff times the mean of the squares of log(sum(exp(logits)))"""
    arguments.need_dtype("logits", logits.type, arguments.FLOATS)
    wide = accumulated(logits.type.dtype)
    z = fd.ops.logsumexp(fd.ops.cast(logits, dtype=wide))
    mean = _sum_of_all(fd, z * z) / _tokens(fd, logits.type.shape[0], wide)
    return mean * float(coeff)


def _sum_of_all(fd: FusionDefinition, x: Value) -> Value:
    return fd.ops.sum(x, dims=(0, 1), keepdim=False)


def _tokens(fd: FusionDefinition, tokens: Dim, dtype: str) -> Value:
    """The number of rows, at least 1. It is not known when a program is compiled."""
    ones = fd.ops.full(shape=(tokens,), fill_value=1.0, dtype=dtype)
    return fd.ops.maximum(fd.ops.sum(ones, dims=(0,), keepdim=False), 1.0)


@translator("fusion_moe::combine")
def combine(fd: FusionDefinition, y: Value, slot_of: Value, w: Value) -> Value:
    """y [M, N], slot_of i32[T, k], w [T, k] -> [T, N]"""
    return fd.ops.cast(fd.ops.combine(y, slot_of, w), dtype=y.type.dtype)


@translator("fusion_moe::group_add")
def group_add(fd: FusionDefinition, y: Value, bias: Value, offs: Value) -> Value:
    """y [M, N], bias [G, N], offs i32[G] -> [M, N]"""
    ends = fd.groups_of(offs, y.type.shape[0])
    return biased(fd, fd.partition_by(y, ends), bias, ends)


def biased(fd: FusionDefinition, y: Value, bias: Value | None, ends: Value) -> Value:
    """y [M/g, N] plus bias [G, N], if there is one, for the rows of each group"""
    fd.mark_weight(bias)
    return y if bias is None else fd.ops.group_add(y, bias, ends)


@translator("fusion_moe::expert_mlp")
def expert_mlp(
    fd: FusionDefinition,
    x: Value,
    ids: Value,
    w: Value,
    gate_up_codes: Value,
    gate_up_block_scale: Value,
    gate_up_decode_scale: Value,
    down_codes: Value,
    down_block_scale: Value,
    down_decode_scale: Value,
    gate_up_bias: Value | None = None,
    down_bias: Value | None = None,
    activation: str | None = None,
    scale_on: str = "output",
    activation_format: str = "bf16",
    weight_layout: str = "linear",
    first_expert: int | None = None,
) -> Value:
    """x [..., H], ids int[T, k], w [T, k], gate_up nvfp4[G, 2I, H], down nvfp4[G, H, I] -> [...,
    H]
    """
    gate_up = (gate_up_codes, gate_up_block_scale, gate_up_decode_scale)
    down = (down_codes, down_block_scale, down_decode_scale)
    return fused_experts(
        fd,
        x,
        ids,
        w,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        weight_format="nvfp4",
        weight_layout=weight_layout,
        activation=activation,
        scale_on=scale_on,
        activation_format=activation_format,
        first_expert=first_expert,
    )


@translator("fusion_moe::fused_experts")
def fused_experts(
    fd: FusionDefinition,
    x: Value,
    ids: Value,
    w: Value,
    gate_up: Sequence[Value],
    down: Sequence[Value],
    gate_up_bias: Value | None = None,
    down_bias: Value | None = None,
    gate_up_lora_a: Value | None = None,
    gate_up_lora_b: Value | None = None,
    down_lora_a: Value | None = None,
    down_lora_b: Value | None = None,
    lora_of: Value | None = None,
    gate_up_lora_of: Value | None = None,
    down_lora_of: Value | None = None,
    activation_parameters: Value | None = None,
    *,
    weight_format: str,
    weight_layout: str = "linear",
    activation: str | None = None,
    scale_on: str = "output",
    activation_format: str = "bf16",
    transposed: bool = False,
    lora_scale: float = 1.0,
    first_expert: int | None = None,
    straight_through: str = "exact",
    expert_map: Value | None = None,
    peers: Value | None = None,
    across: str = "",
    of_experts: int = 0,
    capacity: int = 0,
    float32_sums: bool = False,
) -> Value:
    """x [..., H], ids int[T, k], w [T, k], the parts of gate_up [G, 2I, H] and down [G, H, I] in
    `weight_format` -> [..., H]

    transposed: the weights are floats, gate_up [G, H, 2I] and down [G, I, H]. Adapters:
    gate_up_lora_a [G, r, H], gate_up_lora_b [G, 2I, r], down_lora_a [G, r, I], down_lora_b [G, H,
    r]; lora_of int[T], gate_up_lora_of and down_lora_of int[r]: which of several each token has.
    first_expert: the id of the first of G local experts; None: all are local. expert_map i32[N]:
    which of the G each of N experts is, -1 for none. peers i64[R + 4]: the memory of the ranks of
    the group `across`, between which of_experts are divided. float32_sums: the ranks' sums are
    rounded when they are added, not before.
    """
    need_one_of("scale_on", scale_on, ("output", "input"))
    act = read(activation)
    _check_activation_format(activation_format, weight_format, weight_layout, transposed)
    weights = [
        weight_type(name, parts, weight_format, weight_layout, transposed)
        for name, parts in (("gate_up", gate_up), ("down", down))
    ]
    axis = 1 if transposed else 2
    _need_experts(x.type, weights[0], weights[1], (gate_up_bias, down_bias), act, axis)
    fd.mark_weight(activation_parameters)
    arguments.need_parameters(
        activation_parameters, act, weights[1].shape[0], plain(weights[1].shape[axis])
    )
    of_gate_up = adapter(
        "gate_up_lora",
        gate_up_lora_a,
        gate_up_lora_b,
        lora_scale,
        "gate_up",
        weights[0],
        axis,
        x.type,
    )
    of_down = adapter(
        "down_lora", down_lora_a, down_lora_b, lora_scale, "down", weights[1], axis, x.type
    )
    tokens, restore = flat(fd, x, keep=1)
    ids, w = flat(fd, ids, keep=1)[0], flat(fd, w, keep=1)[0]
    arguments.need_slots("ids", ids.type)
    arguments.need_slot_weights(w.type, ids.type)
    need_same("token count", "x", tokens.type.shape[0], "ids", ids.type.shape[0])
    dtype = x.type.dtype
    combine_all = combine
    if peers is not None:
        _need_alone(lora_of, expert_map, first_expert)
        rows = capacity or tokens.type.shape[0]
        tokens, ids, w, combine_all = _between_ranks(
            fd, tokens, ids, w, peers, rows, of_experts, across, float32_sums
        )
    experts = plain(gate_up[0].type.shape[0])
    if expert_map is not None:
        ids, first_expert = _placed(fd, ids, expert_map, experts, first_expert), 0
    ends, row_of, slot_of = route(fd, ids, experts, first_expert)
    a = fd.ops.index_select(tokens, row_of, dim=0)
    if lora_of is not None:
        arguments.need_dtype("lora_of", lora_of.type, INTS)
        of_rows = fd.ops.index_select(flat(fd, lora_of, keep=0)[0], row_of, dim=0)
        of_gate_up, of_down = (
            lora and lora.of_several(name, features, of_rows)
            for lora, name, features in (
                (of_gate_up, "gate_up_lora", gate_up_lora_of),
                (of_down, "down_lora", down_lora_of),
            )
        )
    if scale_on == "input":
        wide = accumulated(dtype)
        a = fd.ops.cast(weighted(fd, fd.ops.cast(a, dtype=wide), w, slot_of), dtype=dtype)
        w = fd.ops.full(shape=w.type.shape, fill_value=1.0, dtype=wide)
    how = activation_format, dtype, weight_format, weight_layout, transposed
    y = product(fd, a, gate_up, ends, *how, lora=of_gate_up, straight_through=straight_through)
    y = biased(fd, y, gate_up_bias, ends)
    y = fd.ops.cast(activated(fd, y, act, activation_parameters, ends), dtype=dtype)
    y = product(fd, y, down, ends, *how, lora=of_down, straight_through=straight_through)
    y = biased(fd, y, down_bias, ends)
    return restore(combine_all(fd, y, slot_of, w))


def _need_alone(lora_of: Value | None, expert_map: Value | None, first_expert: int | None) -> None:
    """What is said of a rank's own tokens or of all experts cannot be beside peers."""
    beside = [n for n, v in (("lora_of", lora_of), ("expert_map", expert_map)) if v is not None]
    if beside or first_expert is None:
        raise OptionError(
            f"peers with {' and '.join(beside) or 'first_expert = None'}",
            expected="first_expert, and neither lora_of nor expert_map",
        )


def _between_ranks(
    fd: FusionDefinition,
    x: Value,
    ids: Value,
    w: Value,
    peers: Value,
    rows: Any,
    experts: int,
    group: str,
    float32_sums: bool,
) -> tuple[Value, Value, Value, Callable[..., Value]]:
    """x [T, H], ids int[T, k] and w [T, k] of all ranks, `rows` for each; and `combine`, with the
    sums over ranks for the rank's own tokens.
    """
    arguments.need_dtype("peers", peers.type, ("i64",))
    need_rank("peers", peers.type, 1)
    entries = plain(peers.type.shape[0])
    if not isinstance(entries, int) or entries <= _BEFORE_RANKS:
        raise ShapeError(
            f"peers {shown(peers.type)}", expected=f"[R + {_BEFORE_RANKS}] for R ranks"
        )
    ranks = fd.fresh_groups(entries - _BEFORE_RANKS, stride=plain(rows))
    among: dict[str, Any] = {"experts": experts, "group": group}
    all_x, all_ids, all_w, ends = fd.ops.dispatch(x, ids, w, peers, groups=ranks, **among)

    def combine_all(fd: FusionDefinition, y: Value, slot_of: Value, w: Value) -> Value:
        sums = fd.ops.combine(y, slot_of, w) if float32_sums else combine(fd, y, slot_of, w)
        of_ranks = fd.ops.partition(sums, ends)
        result = fd.ops.combine_from(of_ranks, all_ids, ids, ends, peers, **among)
        return fd.ops.cast(result, dtype=y.type.dtype)

    return all_x, all_ids, all_w, combine_all


def _placed(
    fd: FusionDefinition, ids: Value, expert_map: Value, experts: Any, first_expert: int | None
) -> Value:
    """The place of each slot's expert, which `route` drops if it is none of the groups."""
    arguments.need_dtype("expert_map", expert_map.type, ("i32",))
    need_rank("expert_map", expert_map.type, 1)
    if first_expert is not None:
        raise OptionError(
            f"expert_map with first_expert = {first_expert}",
            expected="one of the two: expert_map has an entry for each expert",
        )
    return fd.ops.place(ids, expert_map, here=experts)


def _need_experts(
    x: TensorType,
    gate_up: TensorType,
    down: TensorType,
    biases: Sequence[Value | None],
    activation: Activation,
    axis: int,
) -> None:
    """The two projections must be of one layer, for the features of x. axis: the weights'
    contracted axis; the other one is 3 - axis.
    """
    experts, rows, inner, hidden = (
        gate_up.shape[0],
        gate_up.shape[3 - axis],
        down.shape[axis],
        gate_up.shape[axis],
    )
    arguments.need_operand("x", x, "gate_up", gate_up, axis)
    if down.shape[0] != experts:
        raise ShapeError(
            f"gate_up has {experts} experts, down has {down.shape[0]}", expected="as many"
        )
    arguments.need_parts("gate_up", plain(rows), activation)
    if plain(inner) * activation.parts != plain(rows) or plain(down.shape[3 - axis]) != plain(
        hidden
    ):
        features = "2I" if activation.parts == 2 else "I"
        form = (
            f"gate_up [E, {features}, H] and down [E, H, I]"
            if axis == 2
            else f"gate_up [E, H, {features}] and down [E, I, H], as transposed = True says"
        )
        raise ShapeError(f"gate_up {shown(gate_up)} and down {shown(down)}", expected=form)
    for name, bias, width in zip(
        ("gate_up_bias", "down_bias"), biases, (rows, hidden), strict=True
    ):
        arguments.need_bias(name, bias, experts, width, x)


@translator("fusion_moe::run")
def run(
    fd: FusionDefinition,
    program: str,
    inputs: tuple[Value, ...],
    sizes: tuple,
    options: str | None = None,
    parts: tuple[int, ...] | None = None,
) -> tuple[Value, ...]:
    """A program that is already part of the graph (a backward): its operations, to be fused with
    their neighbours.
    """
    if parts:
        raise Untranslatable(
            "it runs by itself, as a program that reads a parameter for each group without a "
            "copy; with single_grouped_weight=True a "
            "GroupedLinear fuses with its neighbours"
        )
    fusion = parse(program)
    return fd.inline(fusion, inputs, dict(zip(fusion.symbols, sizes, strict=True)))
