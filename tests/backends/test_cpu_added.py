"""A product that the CPU makes beside another: tiles of both meet in one epilogue, in each tier
that this machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    OF_VECTORS,
    TIERS,
    check_segments,
    program,
    same,
    small_integers,
    together,
)
from test_cpu_encodings import random_weights
from test_cpu_training import BF16, PARTITIONS, expected
from torch import Tensor

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.encodings import NVFP4, dequantize, quantize
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.types import dtype_name
from fusion_moe.layouts.groups import ends_from_sizes
from fusion_moe.runtime.program import Program
from fusion_moe.schedule.segment import Segment

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.once,
    pytest.mark.usefixtures("amx"),
    pytest.mark.slow,
]
SEVEN = PARTITIONS["seven"]


def operands(
    kind: str,
    sizes: tuple[int, ...],
    n: int,
    features: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> list[Tensor]:
    """Rows, NaN past the last end, and matrices, small integers."""
    rows = small_integers(sum(sizes) + 3, features, dtype=dtypes[0], seed=seed)
    rows[sum(sizes) :] = torch.nan
    shape = (n, features) if kind == "grouped_mm" else (features, n)
    return [rows, small_integers(len(sizes), *shape, dtype=dtypes[1], seed=seed + 1)]


Products = list[tuple[str, list[Tensor]]]  # the kind of each, its rows and its matrices
Rest = Callable[..., Value]  # (fd, results) -> what is stored


def summed(fd: FusionDefinition, *made: Value) -> Value:
    total, *others = made
    for v in others:
        total = fd.ops.add(total, v)
    return total


def fusion_of(products: Products, rest: Rest = summed) -> Fusion:
    """Products of the same rows and columns, and what is made of them."""
    fd = FusionDefinition()
    m, groups = fd.define_size("m"), len(products[0][1][1])
    offs = fd.define_tensor(shape=[groups], dtype="i32")
    ends, made = fd.ops.ends(offs, rows=m, groups=fd.define_groups("g", groups)), []
    for kind, (x, w) in products:
        rows = fd.define_tensor(shape=[m, x.shape[1]], dtype=dtype_name(x.dtype))
        made.append(
            getattr(fd.ops, kind)(
                fd.ops.partition(rows, ends),
                fd.define_tensor(shape=w.shape, dtype=dtype_name(w.dtype)),
                ends,
            )
        )
    fd.add_output(rest(fd, *made))
    return fd.fusion()


def computed(products: Products, sizes: tuple[int, ...], tier: str) -> Tensor:
    compiled = programs(tier)[str(fusion_of(products))]
    assert len(compiled.segments) == 1
    tensors = [t for _, both in products for t in both]
    return compiled([ends_from_sizes(torch.tensor(sizes)), *tensors])[0]


@cache
def programs(tier: str) -> dict[str, Program]:
    """Of all products below, in one library, by their texts."""
    cases = [pair(*kinds, sizes) for kinds in PAIRS for sizes in PARTITIONS.values()]
    cases += [of_dtypes(kind, turn) for kind in KINDS for turn in TURNS]
    cases += [in_any_order(), two_of(SEVEN, 64, 80, 4)]
    fusions = [fusion_of(products) for products in cases]
    return together({str(fusion): fusion for fusion in fusions}, tier)


def wanted(products: Products, sizes: tuple[int, ...]) -> Tensor:
    each = (
        expected("grouped_mm_t", x, w.mT if kind == "grouped_mm" else w, sizes)
        for kind, (x, w) in products
    )
    return sum(each).float()


PAIRS = [
    ("grouped_mm", "grouped_mm"),
    ("grouped_mm_t", "grouped_mm_t"),
    ("grouped_mm", "grouped_mm_t"),
]


def pair(kind: str, added: str, sizes: tuple[int, ...]) -> Products:
    return [
        (kind, operands(kind, sizes, 71, 100, BF16, 0)),
        (added, operands(added, sizes, 71, 5, BF16, 2)),
    ]


@pytest.mark.parametrize("sizes", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize(("kind", "added"), PAIRS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_exactly(tier, kind, added, sizes):
    """Every group and every row; what is NaN past the last end is not read, and gives zeros."""
    products = pair(kind, added, sizes)
    same(computed(products, sizes, tier), wanted(products, sizes))


KINDS, TURNS = ("grouped_mm", "grouped_mm_t"), range(len(DTYPES))


def of_dtypes(kind: str, turn: int) -> Products:
    first = operands(kind, SEVEN, 200, 300, (torch.bfloat16, torch.float32), 0)
    dtypes = zip(DTYPES, (*DTYPES[turn:], *DTYPES[:turn]), strict=True)
    return [
        (kind, first),
        *((kind, operands(kind, SEVEN, 200, 256, two, 2 + i)) for i, two in enumerate(dtypes)),
    ]


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", OF_VECTORS)
def test_every_pair_of_dtypes(tier, kind, turn):
    """Of products whose own are others, with as many features as there may be: each dtype of rows,
    with one of matrices.
    """
    products = of_dtypes(kind, turn)
    same(computed(products, SEVEN, tier), wanted(products, SEVEN))


def in_any_order() -> Products:
    return [
        ("grouped_mm", operands("grouped_mm", SEVEN, 40, features, BF16, i))
        for i, features in enumerate((3, 80, 16))
    ]


def two_of(sizes: tuple[int, ...], n: int, *features: int) -> Products:
    return [("grouped_mm", operands("grouped_mm", sizes, n, k, BF16, k)) for k in features]


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_the_order_does_not_matter_and_there_may_be_several(tier):
    """Which product is the kernel's own is seen by what it contracts."""
    products = in_any_order()
    same(computed(products, SEVEN, tier), wanted(products, SEVEN))


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_what_changes_between_calls_is_read_again(tier):
    """In the same memory, as an optimizer leaves it."""
    products = two_of(SEVEN, 64, 80, 4)
    for _ in range(3):
        same(computed(products, SEVEN, tier), wanted(products, SEVEN))
        products[1][1][1].add_(1)


def gated(fd: FusionDefinition, y: Value, more: Value) -> Value:
    """silu(gate) * up, of the columns of a sum in halves."""
    total = fd.ops.sub(y, fd.ops.mul(more, 0.5))
    rows, width = total.type.shape
    gate, up = (
        fd.ops.slice(total, start_indices=(0, i), end_indices=(rows, i + width // 2))
        for i in (0, width // 2)
    )
    return fd.ops.cast(fd.ops.mul(fd.ops.silu(gate), up), dtype="bf16")


@pytest.mark.parametrize(
    ("tier", "encoding"),
    [
        *((tier, encoding) for tier in TIERS for encoding in ("nvfp4", "mxfp4")),
        *((tier, "int4") for tier in OF_VECTORS),
    ],
)
def test_beside_a_quantized_weight(tier, encoding):
    """Few rows and many, all columns and pairs of them; what is added to is read from the codes."""
    fd, sizes, n, k, rank = FusionDefinition(), (1, 0, 3, 20, 300), 96, 160, 6
    if encoding == "nvfp4":
        weight = quantize(
            torch.randn(len(sizes), n, k, generator=torch.Generator().manual_seed(0)),
            encoding=NVFP4,
        )
    else:
        weight = random_weights(encoding, len(sizes), n, k, (120, 130))
    m = fd.define_size("m")
    offs = fd.define_tensor(shape=[len(sizes)], dtype="i32")
    ends = fd.ops.ends(offs, rows=m, groups=fd.define_groups("g", len(sizes)))
    x, h = (fd.ops.partition(fd.define_tensor(shape=[m, c], dtype="bf16"), ends) for c in (k, rank))
    parts = [
        fd.define_tensor(shape=t.shape, dtype=dtype_name(t.dtype), role="weight") for t in weight
    ]
    y = fd.ops.grouped_mm(x, fd.ops.pack(*parts, encoding=encoding, layout="linear"), ends)
    more = fd.ops.grouped_mm(h, fd.define_tensor(shape=[len(sizes), n, rank], dtype="bf16"), ends)
    fd.add_output(fd.ops.add(y, more))
    fd.add_output(gated(fd, y, more))
    rows = [small_integers(sum(sizes) + 2, c, seed=i) for i, c in enumerate((k, rank))]
    b = small_integers(len(sizes), n, rank, seed=2)
    inputs = [ends_from_sizes(torch.tensor(sizes)), *rows, *weight, b]
    compiled = program(fd.fusion(), tier, joined=True)
    check_segments(fd.fusion(), tier, inputs, compiled)
    assert len(compiled.segments) == 1
    (found, _), w = compiled(inputs), dequantize(weight)
    want = expected("grouped_mm_t", rows[0], w.mT, sizes) + expected(
        "grouped_mm_t", rows[1], b.mT, sizes
    )
    bound = (k + 8) * 2.0**-24 * expected(
        "grouped_mm_t", rows[0].abs(), w.mT.abs(), sizes
    ) + 2.0**-20
    assert ((found.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("tier", OF_VECTORS)
def test_rows_that_are_made(tier):
    """A prologue of its own: rows that are gathered, and others computed while they are loaded."""
    fd, sizes = FusionDefinition(), (2, 30)
    m, t = fd.define_size("m"), fd.define_size("t")
    ends = fd.ops.ends(
        fd.define_tensor(shape=[2], dtype="i32"), rows=m, groups=fd.define_groups("g", 2)
    )
    x, index = (
        fd.define_tensor(shape=[m, 64], dtype="bf16"),
        fd.define_tensor(shape=[m], dtype="i64"),
    )
    picked, halved = (fd.define_tensor(shape=[rows, 4], dtype="f32") for rows in (t, m))
    a, b, c = (fd.define_tensor(shape=[2, 48, k], dtype="f32") for k in (64, 4, 4))
    made = [fd.ops.grouped_mm(fd.ops.partition(x, ends), a, ends)]
    made += [
        fd.ops.grouped_mm(
            fd.ops.partition(fd.ops.index_select(picked, index, dim=0), ends), b, ends
        )
    ]
    made += [fd.ops.grouped_mm(fd.ops.mul(fd.ops.partition(halved, ends), 0.5), c, ends)]
    fd.add_output(summed(fd, *made))
    f32 = {"dtype": torch.float32}
    inputs = [
        torch.tensor([2, 32], dtype=torch.int32),
        small_integers(32, 64),
        torch.arange(31, -1, -1) % 5,
    ]
    inputs += [
        small_integers(*shape, **f32)
        for shape in ((5, 4), (32, 4), (2, 48, 64), (2, 48, 4), (2, 48, 4))
    ]
    compiled = program(fd.fusion(), tier)
    assert len(compiled.segments) == 1
    _, rows, at, source, others, *weights = inputs
    each = zip((rows, source[at], others / 2), weights, strict=True)
    same(
        compiled(inputs)[0], sum(expected("grouped_mm_t", a, w.mT, sizes) for a, w in each).float()
    )


# Where it is two kernels --------------------------------------------------------------------------


def two(target: str, features: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Segment, ...]:
    products = [
        ("grouped_mm", operands("grouped_mm", SEVEN, 64, k, (dtype, dtype), 0))
        for k in (600, features)
    ]
    return lower(fusion_of(products), TARGETS[target], options.current()).segments


@pytest.mark.parametrize(
    ("target", "features", "why"),
    [
        (
            "cpu",
            257,
            "grouped_mm contracts 257 features: beside another product a kernel "
            "contracts up to 256",
        ),
        (
            "cuda",
            65,
            "grouped_mm contracts 65 features: beside another product a kernel contracts up to 64",
        ),
        (
            "reference",
            16,
            "grouped_mm and grouped_mm are two products: a kernel has accumulators for one",
        ),
    ],
)
def test_a_product_is_a_kernel_of_its_own(target, features, why):
    first, second = two(target, features)
    assert (first.kind, second.kind, second.boundary) == ("grouped_gemm", "grouped_gemm", why)


def test_what_the_kernels_cannot_read_is_computed_as_before():
    """In float64 there is no kernel for either: the reference computes each by itself."""
    found = two("cpu", 16, torch.float64)
    assert [
        s.plan.backend for s in found if any(op.kind.role == "grouped" for op in s.fusion.ops)
    ] == ["reference", "reference"]
