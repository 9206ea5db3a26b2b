"""The CPU's products of training, dgrad and wgrad, each tier that this machine has, and what is
fused around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    OF_VECTORS,
    check_segments,
    program,
    same,
    same_on_any_threads,
    small_integers,
    together,
)
from fusions import fusion_of_call
from torch import Tensor

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.derivative import Derivative, differentiate
from fusion_moe.ir.types import FLOATS, dtype_name
from fusion_moe.layouts.groups import ends_from_sizes
from fusion_moe.nn import swiglu
from fusion_moe.runtime.program import Program

pytestmark = [pytest.mark.compiler, pytest.mark.once, pytest.mark.slow]
# With empty groups at the end: all that have 7 groups, or 256, share a kernel, which has that
# number in its source.
PARTITIONS = {
    "one": (33,),
    "seven": (0, 1, 7, 15, 17, 0, 40),
    "around_a_tile": (127, 128, 129, *(0,) * 4),
    "all_in_one": (0, 0, 300, *(0,) * 4),
    "none": (0,) * 7,
    "a_chunk_and_more": (512, 513, 1100, *(0,) * 4),
    "64": (*(3,) * 64, *(0,) * 192),
    "65": (*(2,) * 64, 9, *(0,) * 191),
    "256": (0, 1, 2, 5) * 64,
}
PRODUCTS = [(sizes, 100, 71) for sizes in PARTITIONS.values()] + [
    (PARTITIONS["seven"], 64, 200),
    (PARTITIONS["seven"], 1, 1),
]


Rest = Callable[[FusionDefinition, Value, Value], Value]  # (fd, the product, ends) -> the result


@cache
def product(
    kind: str,
    a: tuple[int, torch.dtype],
    b: tuple[tuple[int, ...], torch.dtype],
    groups: int,
    rest: Rest | None = None,
) -> Fusion:
    """kind(rows [m, columns] of a dtype, rows or matrices). rest: what is fused after it."""
    fd = FusionDefinition()
    m = fd.define_size("m")
    x = fd.define_tensor(shape=[m, a[0]], dtype=dtype_name(a[1]))
    y = fd.define_tensor(
        shape=[m, *b[0]] if kind == "grouped_outer" else list(b[0]), dtype=dtype_name(b[1])
    )
    ends = fd.ops.ends(
        fd.define_tensor(shape=[groups], dtype="i32"), rows=m, groups=fd.define_groups("g", groups)
    )
    other = fd.ops.partition(y, ends) if kind == "grouped_outer" else y
    made = getattr(fd.ops, kind)(fd.ops.partition(x, ends), other, ends)
    fd.add_output(rest(fd, made, ends) if rest else made)
    return fd.fusion()


def expected(kind: str, a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """In float64; rows past the last end are zeros."""
    a, b, start = a.double(), b.double(), 0
    out = a.new_zeros(
        (len(sizes), a.shape[1], b.shape[1]) if kind == "grouped_outer" else (len(a), b.shape[2])
    )
    for group, rows in enumerate(sizes):
        run = slice(start, start := start + rows)
        if kind == "grouped_outer":
            out[group] = a[run].T @ b[run]
        else:
            out[run] = a[run] @ b[group]
    return out


def operands(
    kind: str,
    sizes: Sequence[int],
    n: int,
    k: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    exact: bool,
) -> list[Tensor]:
    """Rows of N columns; rows or matrices; NaN past the last end."""
    rows, made = (
        sum(sizes) + 3,
        small_integers if exact else lambda *shape, dtype, seed: torch.randn(shape).to(dtype),
    )
    a = made(rows, n, dtype=dtypes[0], seed=0)
    b = (
        made(rows, k, dtype=dtypes[1], seed=1)
        if kind == "grouped_outer"
        else made(len(sizes), n, k, dtype=dtypes[1], seed=1)
    )
    for t in (a, b) if kind == "grouped_outer" else (a,):
        t[sum(sizes) :] = torch.nan
    return [a, b]


# Products -----------------------------------------------------------------------------------------


KINDS = ("grouped_mm_t", "grouped_outer")
BF16 = (torch.bfloat16, torch.bfloat16)
BOTH_DTYPES = [(a, b) for a in DTYPES for b in DTYPES]
SHAPES = {  # groups, n, k and the dtypes of both operands of all products below
    *((len(sizes), n, k, BF16) for sizes, n, k in PRODUCTS),
    *((7, 100, 71, two) for two in BOTH_DTYPES),
    *((5, 400, 150, (dtype, dtype)) for dtype in (torch.bfloat16, torch.float32)),
    (2, 40, 24, BF16),
}


@cache
def products(tier: str) -> dict[tuple[object, ...], Program]:
    """Of all kinds and shapes, in one library."""
    fusions = {}
    for kind in KINDS:
        for groups, n, k, (a, b) in SHAPES:
            shape = (k,) if kind == "grouped_outer" else (groups, n, k)
            fusions[kind, groups, n, k, (a, b)] = product(kind, (n, a), (shape, b), groups)
    return together(fusions, tier)


def computed(kind: str, tier: str, a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    shape = len(sizes), a.shape[1], b.shape[-1], (a.dtype, b.dtype)
    return products(tier)[(kind, *shape)]([a, b, ends_from_sizes(torch.tensor(sizes))])[0]


@pytest.mark.parametrize(("sizes", "n", "k"), PRODUCTS, ids=[*PARTITIONS, "wide", "one_number"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_exactly(tier, kind, sizes, n, k):
    """Small integers, every group and every row; what is NaN past the last end is not read."""
    a, b = operands(kind, sizes, n, k, BF16, exact=True)
    same(computed(kind, tier, a, b, sizes), expected(kind, a, b, sizes).float())


@pytest.mark.parametrize("dtypes", BOTH_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_every_pair_of_dtypes(tier, kind, dtypes):
    """Each product and each sum is rounded once, to float32: as many units in the last place of the
    sum of sizes as there are products.
    """
    sizes = PARTITIONS["seven"]
    a, b = operands(kind, sizes, 100, 71, dtypes, exact=True)
    same(computed(kind, tier, a, b, sizes), expected(kind, a, b, sizes).float())
    a, b = operands(kind, sizes, 100, 71, dtypes, exact=False)
    contracted = max(sizes) if kind == "grouped_outer" else 100
    bound = (contracted + 3) * 2.0**-24 * expected(kind, a.abs(), b.abs(), sizes)
    found, want = computed(kind, tier, a, b, sizes).double(), expected(kind, a, b, sizes)
    assert ((found - want).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_threads_change_no_bit(tier, kind, dtype):
    sizes = (1, 0, 20, 700, 90)
    a, b = operands(kind, sizes, 400, 150, (dtype, dtype), exact=False)
    same_on_any_threads(lambda: computed(kind, tier, a, b, sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_what_is_not_finite_stays_in_its_row_or_group(tier, kind):
    """And numbers of bfloat16 as large as there are."""
    sizes = (3, 5)
    a, b = operands(kind, sizes, 40, 24, BF16, exact=True)
    a[1, 7], a[2, 3] = torch.nan, 2.0**100
    want = expected(kind, a, b, sizes).float()
    assert want.isnan().any()
    found = computed(kind, tier, a, b, sizes)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0, equal_nan=True)


# What is fused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_a_matrix_is_added_to_another(tier):
    """main_grad + the sum over rows, in one kernel."""
    fd = FusionDefinition()
    m, n, k = fd.define_size("m"), 37, 50
    a, b = (fd.define_tensor(shape=[m, c], dtype="bf16") for c in (n, k))
    index, total = (
        fd.define_tensor(shape=[m], dtype="i64"),
        fd.define_tensor(shape=[3, n, k], dtype="f32"),
    )
    ends = fd.ops.ends(
        fd.define_tensor(shape=[3], dtype="i32"), rows=m, groups=fd.define_groups("g", 3)
    )
    rows = fd.ops.partition(fd.ops.index_select(b, index, dim=0), ends)
    halves = fd.ops.mul(fd.ops.cast(fd.ops.partition(a, ends), dtype="f32"), 0.5)
    made = fd.ops.add(total, fd.ops.grouped_outer(halves, rows, ends))
    fd.add_output(made)
    fd.add_output(fd.ops.cast(made, dtype="bf16"))
    inputs = [
        small_integers(60, n),
        small_integers(60, k),
        torch.arange(59, -1, -1),
        small_integers(3, n, k, dtype=torch.float32),
    ]
    check_segments(fd.fusion(), tier, [*inputs, torch.tensor([0, 50, 58], dtype=torch.int32)])
    assert len(program(fd.fusion(), tier).segments) == 1


def gated(interleave: int, hidden: int) -> Rest:
    """silu(gate) * up, of columns that lie side by side or in turns."""

    def rest(fd: FusionDefinition, z: Value, ends: Value) -> Value:
        rows, width = z.type.shape
        run = interleave or width // 2
        turns = fd.ops.reshape(z, new_shape=(rows, width // (2 * run), 2, run))
        gate, up = (
            fd.ops.slice(
                turns,
                start_indices=(0, 0, i, 0),
                end_indices=(rows, width // (2 * run), i + 1, run),
            )
            for i in (0, 1)
        )
        return fd.ops.cast(
            fd.ops.reshape(fd.ops.mul(fd.ops.silu(gate), up), new_shape=(rows, width // 2)),
            dtype="bf16",
        )

    return rest


INTERLEAVED = (0, 1, 8)


@cache
def of_columns_apart(tier: str) -> dict[int, Program]:
    shape = (40, torch.bfloat16), ((3, 40, 96), torch.bfloat16), 3
    return together({i: product("grouped_mm_t", *shape, gated(i, 48)) for i in INTERLEAVED}, tier)


@pytest.mark.parametrize("interleave", INTERLEAVED)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_columns_of_transposed_weights(tier, interleave):
    """FC1 whose weight is stored [G, K, N], with what reads two columns of its product."""
    compiled = of_columns_apart(tier)[interleave]
    ends = torch.tensor([7, 7, 45], dtype=torch.int32)
    inputs = [small_integers(50, 40), small_integers(3, 40, 96), ends]
    check_segments(compiled.fusion, tier, inputs, compiled)
    assert len(compiled.segments) == 1


def experts(
    dtype: torch.dtype, biases: bool = False, **kwargs
) -> tuple[Fusion, list[Tensor], list[int]]:
    """An expert MLP, its inputs, and which of them have gradients; numbers of few bits."""
    g = torch.Generator().manual_seed(0)
    tokens, groups, hidden, inner, slots = 40, 4, 100, 64, 2
    x, gate_up, down = (
        small_integers(*shape, dtype=dtype)
        for shape in ((tokens, hidden), (groups, 2 * inner, hidden), (groups, hidden, inner))
    )
    ids, w = (
        torch.randint(0, groups, (tokens, slots), generator=g),
        2.0 ** torch.randint(-3, 1, (tokens, slots), generator=g),
    )
    added = [small_integers(groups, n, dtype=dtype) for n in (2 * inner, hidden)] if biases else []
    fmt = dtype_name(dtype)
    fusion = fusion_of_call(
        "fused_experts", x, ids, w, [gate_up / 8], [down / 8], *added, weight_format=fmt, **kwargs
    )
    return (
        fusion,
        [x, ids, w, gate_up / 8, down / 8, *added],
        [i for i, v in enumerate(fusion.inputs) if v.type.dtype in FLOATS],
    )


LAYERS = {
    "plain": {},
    "clamped": {"activation": swiglu(interleave=8, limit=7.0, alpha=1.702, up_offset=1.0)},
    "biases": {"biases": True},
    "scale_on_input": {"scale_on": "input"},
}
LAYERS_AND_DTYPES = [(name, torch.bfloat16) for name in LAYERS] + [
    ("plain", dtype) for dtype in DTYPES[1:]
]


def layer_and_inputs(layer: str, dtype: torch.dtype) -> tuple[Derivative, list[Tensor]]:
    fusion, inputs, wrt = experts(dtype, **LAYERS[layer])
    return differentiate(fusion, wrt), inputs


@cache
def layers(tier: str) -> dict[tuple[str, torch.dtype, str], Program]:
    """The forward and the backward of each."""
    made = {case: layer_and_inputs(*case)[0] for case in LAYERS_AND_DTYPES}
    return together(
        {
            (*case, part): getattr(both, part)
            for case, both in made.items()
            for part in ("forward", "backward")
        },
        tier,
    )


@pytest.mark.parametrize(("layer", "dtype"), LAYERS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_an_expert_layer(tier, layer, dtype):
    """Forward and backward, each kernel against its segment; none is the reference's."""
    made, inputs = layer_and_inputs(layer, dtype)
    outputs = made.forward.evaluate(*inputs)
    seeds = [small_integers(*outputs[i].shape, dtype=outputs[i].dtype) for i in made.seeds]
    backward = [*made.read(inputs, outputs), *seeds]
    for part, given in (("forward", inputs), ("backward", backward)):
        fusion = getattr(made, part)
        lowered = lower(fusion, TARGETS["cpu"], options.current())
        assert not [s.plan.why for s in lowered.segments if s.plan.why]
        check_segments(fusion, tier, given, layers(tier)[layer, dtype, part])
