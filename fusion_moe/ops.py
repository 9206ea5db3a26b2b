"""The operations as typed and documented functions: each calls the operation of its name in
`torch.ops.fusion_moe`, and does nothing else.

    y = fusion_moe.ops.fused_experts(x, ids, w, gate_up, down, weight_format="nvfp4")

is traced as `torch.ops.fusion_moe.fused_experts`. What an operation computes is defined once, by
its translator (translators/fusion_moe_translators/moe.py), and what it takes once, by its signature
here: definitions/operations.py derives the schema from it.

Letters: T tokens, k experts a token, M rows, E experts or G groups, H hidden and I intermediate
features, K in-features, N out-features.

All raise ShapeError, DtypeError, DeviceError or OptionError for arguments that do not fit, before
they touch memory. Group ends and expert ids are read on the device of the rows: on the CPU invalid
ones raise GroupsError. On CUDA they are first made safe; the error is raised by a later call or by
`fusion_moe.synchronize()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

__all__ = [
    "combine",
    "expert_mlp",
    "f16a_nvfp4weight_scaled_grouped_mm",
    "fused_compute_score_for_moe_aux_loss",
    "fused_experts",
    "fused_moe_aux_loss",
    "group_add",
    "grouped_mm",
    "grouped_swizzle_block_scale",
    "moe_z_loss",
    "nvfp4_grouped_mm",
    "nvfp4_quantize",
    "route",
    "scaled_swiglu",
    "topk_router",
]
P = ParamSpec("P")
R = TypeVar("R")


def _operation(signature: Callable[P, R]) -> Callable[P, R]:
    """The operation with the name of this function, which only says what it takes and returns."""

    @wraps(signature)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return getattr(torch.ops.fusion_moe, signature.__name__)(*args, **kwargs)

    return call


@_operation
def nvfp4_quantize(x: Tensor, decode_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes matrices to NVFP4 along their last dimension -> (codes, block_scale, decode_scale).

    Args:
        x: float [..., N, K], K a multiple of 16.
        decode_scale: float32 [...], the factor of each matrix, or [..., S], one factor for each of
            S equal runs of its rows; None: amax / 2688 of each matrix.

    Returns:
        codes: uint8 [..., N, K/2], two e2m1 codes a byte, the low nibble first.
        block_scale: float8_e4m3fn [..., N, K/16].
        decode_scale: the given one, or float32 [...].

    Raises:
        NonFiniteError: for NaN or infinity, on the CPU only: on CUDA the check would wait for the
            device.

    No derivative. Source: the numbers of nvidia-modelopt, bit for bit.
    """


@_operation
def nvfp4_grouped_mm(
    a: Tensor,
    b_codes: Tensor,
    b_block_scale: Tensor,
    b_decode_scale: Tensor,
    offs: Tensor,
    *,
    activation_format: str = "bf16",
    weight_layout: str = "linear",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`grouped_mm` with a single NVFP4 weight whose parts are separate arguments -> [..., N].

    Args:
        a: float [..., K], rows sorted by group.
        b_codes: uint8 [G, N, K/2], as `nvfp4_quantize` returns them.
        b_block_scale: float8_e4m3fn [G, N, K/16].
        b_decode_scale: float32 [G] or [G, S].
        offs, activation_format, weight_layout, out_dtype: as in `grouped_mm`.
    """


@_operation
def grouped_mm(
    a: Tensor,
    weight: Sequence[Tensor],
    offs: Tensor,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    weight_format: str,
    weight_layout: str = "linear",
    activation_format: str = "bf16",
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
    lora_scale: float = 1.0,
    straight_through: str = "exact",
) -> Tensor:
    """For each row of group g: weight[g] @ row, summed in float32 (float64 in float64) -> [..., N];
    zeros for rows past the last group.

    Args:
        a: float [..., K], rows sorted by group.
        weight: the parts of [G, N, K] in an encoding; or, if weight_format is a float format, a
            single tensor of numbers.
        offs: int32 [G], where the rows of each group end.
        lora_a, lora_b: float [G, r, K] and [G, N, r], or None. lora_scale * lora_b @ lora_a is
            added to the weight, without computing that matrix. Both are rounded to the dtype of a,
            and so are the r features between them; both products are added in float32.
        weight_format: the encoding of the weight: "nvfp4", "mxfp4", "int4" or any other of
            `fusion_moe.encodings`; "bf16", "f16", "f32" or "f64" for numbers.
        weight_layout: the order of the weight's bytes: "linear"; "w16x64", as
            `fusion_moe.prepare_` makes it; "sf128x4", for block scales only; or any other of
            `fusion_moe.layouts`.
        activation_format: "bf16": rows as they come in. "nvfp4": rows are quantized too (compute
            capability 10.0 only). "int8": rows and weights of nvfp4 or mxfp4 are rounded to
            integers in blocks of 256 columns (CPUs only). "mxfp8" or "mxfp8_wgrad_bf16", for float
            weights: both operands are rounded by that recipe, forward and backward
            (`fusion_moe.recipe`).
        out_dtype: the dtype of the result; None: that of a.
        transposed: a float weight is [G, K, N].
        lora_scale: the factor of the adapter.
        straight_through: for a weight with a master, which is one more tensor after the parts,
            float [G, N, K], that they were rounded from. It gets the gradient as if it had been
            multiplied. "exact": the result is that of the parts alone, bit for bit, and the
            backward computes again what it reads. "float": so too, but the gradient of a is a
            product with the master. "saved": what the backward reads is saved, of the same result.

    Raises:
        UnsupportedError: for an activation_format that the device does not have.

    Derivatives: with respect to a, lora_a, lora_b, a float weight, and a master. Quantized weights
    are frozen. Source: torch.nn.functional.grouped_mm, here for quantized weights; LoRA (Hu et al.,
    2021).
    """


@_operation
def grouped_swizzle_block_scale(block_scale: Tensor, offs: Tensor) -> Tensor:
    """Reorders block scales as Blackwell's products read them, each group padded to 128 rows ->
    [bound(M, G), ceil4(K/16)].

    Args:
        block_scale: float8_e4m3fn [M, K/16], rows sorted by group.
        offs: int32 [G], where the rows of each group end.

    Padding is zero. No derivative. Source: the layout of block scaling factors of cuBLAS and
    CUTLASS (`fusion_moe.layouts.SF128X4`).
    """


@_operation
def scaled_swiglu(
    x: Tensor,
    scale: Tensor | None = None,
    interleave: int = 0,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + up_offset) * scale, in float32 and rounded once to the
    dtype of x -> [..., I].

    Args:
        x: float [..., 2I], gate and up.
        scale: float [...], one for each row; None: 1.
        interleave: 0: gate is the first half of the columns; n: blocks of n gate columns and n up
            columns alternate.
        limit: gate is clamped to at most limit, up to -limit .. limit; None: no clamping.
        alpha: 1 for SiLU.
        up_offset: what is added to up.

    Source: SwiGLU (Shazeer, 2020); limit = 7, alpha = 1.702 and up_offset = 1 are those of gpt-oss.
    """


@_operation
def route(
    ids: Tensor, groups: int, *, first_expert: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of tokens by expert, stably -> (ends, row_of, slot_of).

    Args:
        ids: int64 or int32 [T, k], the experts of each token, from 0 to groups - 1.
        groups: the number of experts.
        first_expert: the id of the first of these experts, if others exist elsewhere: slots of any
            other id are dropped, and their rows come after the last end, where products are zero.
            None: ids start at 0, and -1 names no expert; other ids are an error.

    Returns:
        ends: int32 [groups], where the rows of each expert end: `offs` of the products.
        row_of: int32 [T*k], the token of each sorted row, so that x[row_of] are the rows.
        slot_of: int32 [T, k], the row of each slot.

    No derivative.
    """


@_operation
def topk_router(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    n_group: int = 1,
    topk_group: int = 1,
    best_of_group: int = 1,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses for each token the k experts with the best scores -> (weights, ids), best first.

    Args:
        logits: float [T, E]. Scores are computed in float32 (float64 for float64).
        k: the number of experts of a token.
        bias: float32 [E], added to scores only to choose experts, not in weights; None: 0.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: weights are divided by their sum; those of softmax are then the softmax of the
            chosen logits.
        routed_scaling_factor: multiplies weights, at the end.
        n_group: if more than 1, the experts form n_group equal groups of consecutive experts, and
            only those of the best topk_group groups are candidates.
        topk_group: the number of groups that are chosen.
        best_of_group: 1 or 2; the best groups have the largest sum of so many best scores.
        out_dtype: the dtype to which weights are rounded at the end; None: float32 (float64 for
            float64).

    Returns:
        weights: [T, k].
        ids: int64 [T, k], k different experts, which `route` and `fused_experts` take.

    Of equal scores the first expert is chosen, which torch.topk leaves open. If only the order of
    scores matters (no bias, no sum of two), logits are compared instead, which have the same order:
    scores that are equal in float32 are still told apart. NaN counts as the largest number, as in
    torch.topk; a token's weights that depend on it are NaN. Logits of -inf mask experts: those are
    chosen last, weight 0.

    Derivative: of weights, with respect to logits. Ids and bias have none. Source: softmax,
    renormalize: the routers of Qwen3-MoE and Mixtral and, with the softmax after the choice,
    gpt-oss; sigmoid with a bias, n_group = 8, topk_group = 4, best_of_group = 2: DeepSeek-V3;
    softmax with groups: DeepSeek-V2.
    """


@_operation
def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """What `fused_moe_aux_loss` takes, from the router's logits -> (routing_map, scores).

    Args:
        logits: float [T, E].
        topk: the number of experts of a token.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus". The latter two are divided by their
            sum plus 1e-20.

    Returns:
        routing_map: bool [T, E], whether an expert is one of the topk with the largest logits; of
            equal ones the first are. Its sum over tokens is tokens_per_expert.
        scores: float32 [T, E] (float64 for float64). The error of softmax is one unit in the last
            place of the largest logit.

    Derivative: of scores, with respect to logits. Source: Transformer Engine's function of this
    name.
    """


@_operation
def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor | None,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """The loss that balances the load of experts, coeff * num_experts / (topk * n^2) *
    sum(probs * tokens_per_expert), n = total_num_tokens -> [], in the dtype of probs.

    Args:
        probs: float [T, E], the scores of all experts.
        tokens_per_expert: int or float [E], how many slots of tokens each expert gets.
        total_num_tokens: int64 or int32 [], on the device of probs (a number n is
            torch.full((), n, device=probs.device)); None: T. It counts as at least 1, so that the
            loss of no tokens is 0.
        num_experts: E; for losses of several sequences, which are columns of probs side by side,
            the number of experts of one.
        topk: the number of experts of a token; 1 for fractions of slots as in transformers, whose
            loss grows with the number of experts of a token.
        coeff: the loss's coefficient.

    It is computed in float32 (float64 for float64), no number is read by the host, and CUDA graphs
    capture it. Derivative: with respect to probs, and to tokens_per_expert if those are floats.
    Source: Transformer Engine's function of this name; the loss of Switch Transformers (Fedus et
    al., 2021).
    """


@_operation
def moe_z_loss(logits: Tensor, coeff: float) -> Tensor:
    """The loss that keeps the router's logits small, coeff * mean(logsumexp(logits)^2) -> [], in
    float32 (float64 for float64).

    Args:
        logits: float [T, E]. The loss of no tokens is 0.
        coeff: the loss's coefficient.

    Derivative: with respect to logits. Source: ST-MoE (Zoph et al., 2022).
    """


@_operation
def combine(y: Tensor, slot_of: Tensor, w: Tensor) -> Tensor:
    """Adds each token's rows times the router's weights, in the order of slots and in float32 ->
    [T, N], in the dtype of y.

    Args:
        y: float [M, N], rows sorted by expert.
        slot_of: int [T, k], as `route` returns it.
        w: float [T, k], the router's weights.
    """


@_operation
def group_add(y: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """Adds to each row the bias of its group -> [M, N]; rows past the last group stay unchanged.

    Args:
        y: float [M, N], rows sorted by group.
        bias: [G, N], of the dtype of y.
        offs: int32 [G], where the rows of each group end.
    """


@_operation
def expert_mlp(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    gate_up_codes: Tensor,
    gate_up_block_scale: Tensor,
    gate_up_decode_scale: Tensor,
    down_codes: Tensor,
    down_block_scale: Tensor,
    down_decode_scale: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str | None = None,
    scale_on: str = "output",
    activation_format: str = "bf16",
    weight_layout: str = "linear",
    first_expert: int | None = None,
) -> Tensor:
    """`fused_experts` with NVFP4 weights whose parts are separate arguments -> [..., H].

    Args:
        x, ids, w, gate_up_bias, down_bias: as in `fused_experts`.
        gate_up_codes: uint8 [E, 2I, H/2].
        gate_up_block_scale: float8_e4m3fn [E, 2I, H/16].
        gate_up_decode_scale: float32 [E] or [E, 2].
        down_codes: uint8 [E, H, I/2].
        down_block_scale: float8_e4m3fn [E, H, I/16].
        down_decode_scale: float32 [E].
        activation, scale_on, activation_format, weight_layout, first_expert: as in
            `fused_experts`.
    """


@_operation
def fused_experts(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_lora_a: Tensor | None = None,
    gate_up_lora_b: Tensor | None = None,
    down_lora_a: Tensor | None = None,
    down_lora_b: Tensor | None = None,
    lora_of: Tensor | None = None,
    gate_up_lora_of: Tensor | None = None,
    down_lora_of: Tensor | None = None,
    activation_parameters: Tensor | None = None,
    *,
    activation: str | None = None,
    scale_on: str = "output",
    activation_format: str = "bf16",
    weight_layout: str = "linear",
    first_expert: int | None = None,
    weight_format: str,
    transposed: bool = False,
    lora_scale: float = 1.0,
    straight_through: str = "exact",
    expert_map: Tensor | None = None,
    peers: Tensor | None = None,
    across: str = "",
    of_experts: int = 0,
    capacity: int = 0,
    float32_sums: bool = False,
) -> Tensor:
    """Sum over each token's experts of down(activation(gate_up(x))) times the router's weight ->
    [..., H], in the dtype of x.

    Args:
        x: float [..., H], T tokens in all.
        ids: int64 or int32 [T, k], the experts of each token.
        w: float [T, k], the router's weights. Both may also have the leading dimensions of x.
        gate_up, down: the parts of [E, 2I, H] and [E, H, I] in the encoding weight_format. Without
            a gate, gate_up is up alone, [E, I, H].
        gate_up_bias, down_bias: [E, 2I] (or [E, I]) and [E, H] in the dtype of x, or None.
        gate_up_lora_a, gate_up_lora_b: float [E, r, H] and [E, 2I, r], the adapter of gate_up, or
            None. The rows of gate_up_lora_b are in the order of gate_up's.
        down_lora_a, down_lora_b: float [E, r, I] and [E, H, r], the adapter of down, or None.
        lora_of: int64 or int32 [T], the adapter of each token, if the r features are those of
            several adapters, one after another; a number that no feature has, such as -1: none.
            None: all tokens have all features.
        gate_up_lora_of, down_lora_of: int64 or int32 [r], the adapter of each feature.
        activation_parameters: float [E, P, I], or [E, P, 1] for one number for all features, if
            the activation has P parameters of each expert; otherwise None.
        activation: what stands between the products, as the text of a program, computed in float32
            and rounded once: `fusion_moe.nn.activation` writes the text of a torch function,
            `fusion_moe.nn.swiglu` that of the variants of SwiGLU. None: silu(gate) * up, gate above
            up in the rows of gate_up.
        scale_on: what w multiplies, the "output" of experts or, as in Llama-4, their "input".
        activation_format: "bf16", "nvfp4", "int8", "mxfp8" or "mxfp8_wgrad_bf16", as in
            `grouped_mm`.
        weight_layout: the order of the weights' bytes, as in `grouped_mm`.
        first_expert: the E experts here have the ids first_expert to first_expert + E - 1, and
            others exist elsewhere: slots of any other id, including -1, add nothing, so the result
            is a partial sum. None: all experts are here; -1 adds nothing, as for padding, and other
            ids are an error. Slots that add nothing have zero gradients.
        weight_format: the encoding of the weights, as in `grouped_mm`.
        transposed: both weights are float tensors, [E, H, 2I] and [E, I, H].
        lora_scale: the factor of the adapters.
        straight_through: how weights with masters are differentiated, as in `grouped_mm`. gate_up
            and down may each have one.
        expert_map: int32 [N], where each of N experts lies: its index among the E experts here, or
            -1 if it is elsewhere: its slots then add nothing, as with first_expert, which must be
            None. ids are checked against N.
        peers: int64 [R + 4], the memory of R ranks that hold of_experts experts together, each
            those from its first_expert on: the very tensor that
            `parallelize_(dispatch="symmetric")` made, no copy, or, on CPUs, zeros if they share
            none. Tokens are sent to the ranks of their experts, and the ranks' sums, each rounded
            to the dtype of x unless float32_sums, come back and are added in the order of ranks:
            the result is the whole sum. All ranks of the process group `across` must call it, and
            run its backward.
        across, of_experts, float32_sums: see peers.
        capacity: the most tokens of any rank in this call; 0: all ranks have as many as this one.

    Raises:
        UnsupportedError: for an activation_format that the device does not have.
        GroupsError: for ids or expert_map out of range; on CUDA in a later call.
        OptionError: for peers that stand for no memory of this group.

    Derivatives: with respect to x, w, biases, adapters, parameters of the activation, float weights
    and masters. Quantized weights are frozen. Source: the experts of Qwen3-MoE.
    """


@_operation
def f16a_nvfp4weight_scaled_grouped_mm(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    global_scale: Tensor,
    offsets: Tensor,
    blockscale_offsets: Tensor,
    problem_sizes: Tensor,
    *,
    activation_format: str = "bf16",
) -> Tensor:
    """`nvfp4_grouped_mm` with the arguments that lightning-thunder's inference benchmarks pass ->
    [..., N].

    activation: float [..., K], rows sorted by group. fp4_weight: uint8 [G, K/2, N], the transposed
    view of a contiguous [G, N, K/2]. weight_scaling_factor: float8_e4m3fn [G, ceil128(N),
    ceil4(K/16)], swizzled matrix by matrix (`fusion_moe.layouts.SF128X4`); linear ones have the
    same shape where N is a multiple of 128 and K of 64, and cannot be told apart. global_scale:
    float32 [G], a factor. offsets: int32 [G], where each group starts, without the total;
    blockscale_offsets: int32 [G], the same with each group padded to 128 rows; problem_sizes: int32
    [G, 3], m, n and k of each group. activation_format: see `grouped_mm`.

    Source: thunder's operation of this name in `nvf_cutlass` (`fusion_moe.compat` registers it
    there).
    """
