"""A product that joins the accumulators of another, on a GPU: exactly, by every kernel that makes
rows.
"""

from __future__ import annotations

import pytest
import torch
from hopper import ON_HOPPER
from kernel_tables import use_variant
from test_cuda_encodings import DTYPES, exact_weight, stored
from test_cuda_kernels import ways_of
from test_cuda_packed_dgrad import LARGE_M, two_runs
from test_cuda_training import SPLITS, TAIL, compiled, ends_of, integers
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.backends.cuda.grouped_mm import Product
from fusion_moe.encodings import ENCODINGS, Quantized, dequantize
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import dtype_name

pytestmark = ON_HOPPER

WAYS = [
    ("nvfp4", "f16", "w16x64"),
    ("mxfp4", "bf16", "w16x64"),
    ("int4", "bf16", "w16x64"),
    ("int4", "f16", "linear"),
    ("bf16", "bf16", "linear"),
    ("f16", "f16", "linear"),
    ("bf16", "bf16", "w16x64"),
]


def fusion_of(
    weight: Quantized, layout: str, dtype: str, rank: int, gathered: bool, gated: bool, dgrad: bool
) -> Fusion:
    """a times weight [G, N, K] and low [M/g, R] times b [G, N, R], added: f32 [M/g, N]; or `gated`:
    halves multiplied, in the dtype.

    dgrad: N is contracted, b is [G, R, K], and what is gated is the sum, in the dtype, beside its
    sums over columns.
    """
    fd, (groups, n, k) = FusionDefinition(), weight.shape
    n, k = (k, n) if dgrad else (n, k)  # columns of the result, and what is contracted
    tokens, rows = fd.define_size("t"), fd.define_size("m")
    ends = fd.groups_of(fd.define_tensor(shape=(groups,), dtype="i32"), rows)
    a = fd.define_tensor(shape=(tokens if gathered else rows, k), dtype=dtype)
    if gathered:
        a = fd.ops.index_select(a, fd.define_tensor(shape=(rows,), dtype="i32"), dim=0)
    given = [fd.define_tensor(shape=tuple(p.shape), dtype=dtype_name(p.dtype)) for p in weight]
    w = (
        given[0]
        if weight.encoding.plain and layout == "linear"
        else fd.ops.pack(*given, encoding=weight.encoding.name, layout=layout)
    )
    low, product = (
        fd.define_tensor(shape=(rows, rank), dtype=dtype),
        fd.ops.grouped_mm_t if dgrad else fd.ops.grouped_mm,
    )
    b = fd.define_tensor(shape=(groups, rank, n) if dgrad else (groups, n, rank), dtype=dtype)
    y = fd.ops.add(
        product(fd.ops.partition(low, ends), b, ends),
        product(fd.ops.partition(a, ends), w, ends, w_layout=layout),
    )
    if gated and dgrad:
        fd.add_output(fd.ops.cast(y, dtype=dtype))
        y = fd.ops.sum(y, dims=[1], keepdim=False)
    elif gated:
        gate, up = (
            fd.ops.slice(y, start_indices=(0, i), end_indices=(y.type.shape[0], i + n // 2))
            for i in (0, n // 2)
        )
        y = fd.ops.cast(fd.ops.mul(gate, up), dtype=dtype)
    fd.add_output(y)
    return fd.fusion()


def check(
    weight: Quantized,
    layout: str,
    dtype: str,
    splits: list[int],
    rank: int,
    gathered: bool,
    gated: bool,
    dgrad: bool = False,
) -> None:
    """The result is that of float64 matrices, and rows of no group are not read."""
    rows, tokens, (groups, n, k) = sum(splits) + TAIL, 41, weight.shape
    n, k = (k, n) if dgrad else (n, k)
    a, low = (
        integers(tokens if gathered else rows, k, dtype=DTYPES[dtype]),
        integers(rows, rank, dtype=DTYPES[dtype]),
    )
    b, picks = (
        integers(groups, n, rank, dtype=DTYPES[dtype]),
        torch.randint(0, tokens, (rows,), device="cuda", dtype=torch.int32),
    )
    matrices, x = dequantize(weight).double().cuda(), (a[picks] if gathered else a).double()
    matrices = matrices.mT if dgrad else matrices
    want, start = torch.zeros(rows, n, dtype=torch.float64, device="cuda"), 0
    for g, count in enumerate(splits):
        of = slice(start, start + count)
        want[of] = x[of] @ matrices[g].T + low[of].double() @ b[g].double().T
        start += count
    low[start:] = torch.nan
    if not gathered:
        a[start:] = torch.nan
    wanted = [want]
    if gated and dgrad:
        wanted = [want.float().to(DTYPES[dtype]), want.sum(1)]
    elif gated:
        gate, up = want.chunk(2, 1)
        wanted = [(gate * up).float().to(DTYPES[dtype])]
    program = compiled(fusion_of(weight, layout, dtype, rank, gathered, gated, dgrad))
    assert len(program.segments) == 1
    parts: list[Tensor] = [p.contiguous() for p in stored(weight, layout)]
    found = program(
        [
            ends_of(splits),
            a,
            *([picks] if gathered else []),
            *parts,
            low,
            b.mT.contiguous() if dgrad else b,
        ]
    )
    assert all(torch.equal(f.double(), t.double()) for f, t in zip(found, wanted, strict=True))
    fusion_moe.synchronize()


@pytest.mark.parametrize(
    "splits", [SPLITS[name] for name in ("ragged", "uneven", "63 groups")], ids=len
)
@pytest.mark.parametrize(("fmt", "dtype", "layout"), WAYS, ids=str)
def test_exactly(fmt, dtype, layout, splits):
    """Ranks of one step of the instruction, and of several and a part of one; groups of few rows
    and many.
    """
    for rank, gathered in ((16, True), (36, False)):
        check(
            exact_weight(ENCODINGS[fmt], len(splits), 160, 128),
            layout,
            dtype,
            splits,
            rank,
            gathered,
            gated=False,
        )
    check(
        exact_weight(ENCODINGS[fmt], len(splits), 320, 128),
        layout,
        dtype,
        splits,
        16,
        gathered=True,
        gated=True,
    )


@pytest.mark.parametrize(
    "splits", [SPLITS[name] for name in ("ragged", "uneven", "63 groups")], ids=len
)
@pytest.mark.parametrize(
    ("fmt", "dtype", "layout"), [*WAYS[:6], ("nvfp4", "bf16", "linear")], ids=str
)
def test_dgrad_exactly(fmt, dtype, layout, splits):
    """Rows that tiles are made of, and those that are not whole K blocks; results of one width, and
    sums beside them.
    """
    for n, rank, gathered in ((192, 16, True), (144, 36, False)):
        for sums in (False, True):
            weight = exact_weight(ENCODINGS[fmt], len(splits), n, 320)
            check(weight, layout, dtype, splits, rank, gathered, gated=sums, dgrad=True)


@pytest.mark.parametrize("variant", LARGE_M, ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
def test_every_variant_of_dgrad_exactly(fmt, variant):
    """Runs with a scale each, too: accumulators are multiplied by the last one's before what is
    added.
    """
    with options.override(cuda_variant=variant):
        for n, k in ((320, 1344), (768, 256)):
            weight = exact_weight(ENCODINGS[fmt], 8, n, k)
            check(
                weight,
                "w16x64",
                "bf16",
                SPLITS["ragged"],
                16,
                gathered=False,
                gated=n == 320,
                dgrad=True,
            )
            if fmt == "nvfp4" and n == 768:
                check(
                    two_runs(weight, (0.5, 2.0)),
                    "w16x64",
                    "bf16",
                    SPLITS["ragged"],
                    20,
                    gathered=True,
                    gated=True,
                    dgrad=True,
                )


@pytest.mark.parametrize(
    ("table", "variant", "in_fragment_order"), [*ways_of("linear"), *ways_of("tiled")], ids=str
)
def test_every_variant_exactly(table, variant, in_fragment_order, monkeypatch):
    monkeypatch.setattr(
        Product,
        "needs_reordering",
        lambda self, variant: in_fragment_order and variant.reads_fragment_order,
    )
    use_variant(monkeypatch, table, variant)
    layout = "w16x64" if table == "tiled" else "linear"
    for n, gated in ((1024, False), (640, True)):
        for splits in (SPLITS["ragged"], [115, 144, 8, 757, 0, 3, 161, 33]):
            check(
                exact_weight(ENCODINGS["nvfp4"], len(splits), n, 256),
                layout,
                "bf16",
                splits,
                16,
                gathered=False,
                gated=gated,
            )
