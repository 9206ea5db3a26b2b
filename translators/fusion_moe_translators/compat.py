"""Translators of operations whose signatures other projects define."""

from __future__ import annotations

from fusion_moe.definitions.translate import translator
from fusion_moe.encodings import NVFP4
from fusion_moe.errors import ShapeError, need_one_of
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import TensorType, plain
from fusion_moe.layouts import SF128X4

from . import arguments
from .arguments import shown
from .moe import ACTIVATION_FORMATS, flat, operand, product


@translator("fusion_moe::f16a_nvfp4weight_scaled_grouped_mm")
def f16a_nvfp4weight_scaled_grouped_mm(
    fd: FusionDefinition,
    activation: Value,
    fp4_weight: Value,
    weight_scaling_factor: Value,
    global_scale: Value,
    offsets: Value,
    blockscale_offsets: Value,
    problem_sizes: Value,
    activation_format: str = "bf16",
) -> Value:
    """activation [..., K], fp4_weight u8[G, K/2, N], weight_scaling_factor f8e4m3[G, ceil128(N),
    ceil4(K/16)] -> [..., N]

    fp4_weight is stored as [G, N, K/2], its scaling factors as sf128x4, matrix by matrix.
    global_scale f32[G] is a decode scale: it multiplies. offsets i32[G] are group starts without
    the total, blockscale_offsets i32[G] the same with each group padded to 128 rows, problem_sizes
    i32[G, 3] the (m, n, k) of each group. activation_format "bf16" takes the activation unchanged;
    "nvfp4" first quantizes the rows of all groups with one common decode scale, amax / 2688, and
    the product has two 4-bit operands.
    """
    g, n, k = _check_weight(fp4_weight.type, weight_scaling_factor.type, global_scale.type)
    _check_problem(offsets.type, blockscale_offsets.type, problem_sizes.type, g)
    arguments.need_operand(
        "activation", activation.type, "the weight", TensorType((g, n, k), NVFP4.name)
    )
    need_one_of("activation_format", activation_format, ACTIVATION_FORMATS)
    rows, restore = flat(fd, activation, keep=1)
    ends = fd.groups_of_problem(
        offsets, problem_sizes, blockscale_offsets, plain(rows.type.shape[0]), n, k
    )
    rows = operand(fd, rows, ends, activation_format)
    weight = (fp4_weight, weight_scaling_factor, global_scale)
    return restore(
        product(
            fd,
            rows,
            weight,
            ends,
            activation_format,
            activation.type.dtype,
            NVFP4.name,
            weight_layout=SF128X4.name,
            k_major=True,
        )
    )


def _check_problem(
    offsets: TensorType, blockscale_offsets: TensorType, problem_sizes: TensorType, groups: int
) -> None:
    """Checks the tensors that give the rows of each group, as int32."""
    for name, type, shape, meaning in (
        (
            "offsets",
            offsets,
            (groups,),
            "the start of each group, the last one too, without the total",
        ),
        (
            "blockscale_offsets",
            blockscale_offsets,
            (groups,),
            "the start of each group once groups are padded to 128 rows",
        ),
        ("problem_sizes", problem_sizes, (groups, 3), "m, n and k of each group"),
    ):
        arguments.need_shape(name, type, shape, meaning)
        arguments.need_dtype(name, type, ("i32",))


def _check_weight(
    codes: TensorType, block_scale: TensorType, decode_scale: TensorType
) -> tuple[int, int, int]:
    """G, N and K of the weight; its three tensors must fit together."""
    arguments.need_dtype("fp4_weight", codes, ("u8",), "pass two codes a byte")
    arguments.need_rank("fp4_weight", codes, "[G, K/2, N]")
    arguments.need_dtype(
        "weight_scaling_factor", block_scale, ("f8e4m3",), "pass the scales as nvfp4 stores them"
    )
    arguments.need_dtype("global_scale", decode_scale, ("f32",))
    g, packed_k, n = codes.shape
    if not (isinstance(g, int) and isinstance(packed_k, int) and isinstance(n, int)):
        raise ShapeError(f"fp4_weight {shown(codes)}", expected="sizes known when compiling")
    k = NVFP4.elements(packed_k)
    stored = SF128X4.storage_shape((g, n, NVFP4.blocks(k)))
    if block_scale.shape != stored:
        raise ShapeError(
            f"weight_scaling_factor {shown(block_scale)}",
            expected=f"{list(stored)} for fp4_weight {shown(codes)}",
            todo="swizzle the scales [G, N, K/16] with fusion_moe.layouts.SF128X4.forward, and "
            "keep the padding that it adds",
        )
    arguments.need_shape("global_scale", decode_scale, (g,), "one multiplier for each group")
    return g, n, k
