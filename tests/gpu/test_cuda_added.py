"""Products that a layer with adapters has, on a GPU, exactly: dgrad of quantized weights, and a
product that joins the accumulators of another, by every kernel that makes rows.
"""

from __future__ import annotations

import pytest
import torch
from kernel_tables import use_variant
from own_encodings import registered
from test_cuda_kernels import DTYPES, exact_weight, stored, ways_of
from test_cuda_training import SPLITS, TAIL, compiled, ends_of, integers
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.backends.cuda import gemm
from fusion_moe.backends.cuda.grouped_mm import ByVariants
from fusion_moe.backends.cuda.variants import ALL, Matrices
from fusion_moe.encodings import ENCODINGS, Quantized, dequantize
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import dtype_name
from fusion_moe.layouts.groups import ceil_to

pytestmark = pytest.mark.gpu
registered = pytest.fixture(scope="module", autouse=True)(registered)

WAYS = [
    ("nvfp4", "f16", "w16x64"),
    ("mxfp4", "bf16", "w16x64"),
    ("int4", "bf16", "w16x64"),
    ("int4", "f16", "linear"),
    ("bf16", "bf16", "linear"),
    ("f16", "f16", "linear"),
    ("bf16", "bf16", "w16x64"),
]
DGRADS = [
    ("nvfp4", "bf16", "w16x64"),
    ("nvfp4", "bf16", "linear"),
    ("mxfp4", "f16", "linear"),
    ("uint4_128_f16", "bf16", "w16x64"),  # derived readers in tiles from here on
    ("uint4_128_f16", "f16", "linear"),
    ("levels", "bf16", "w16x64"),
]
_ANY = Matrices(8, 256, 16, 1, 576, True, "dgrad")
LARGE_M = sorted({v.name for v in ALL if v.fits(_ANY, H200)})


def two_runs(weight: Quantized, scales: tuple[float, float]) -> Quantized:
    """The weight with a scale for each half of its rows, which differ from group to group."""
    groups = len(weight[0])
    decode = torch.tensor([scales if g % 2 else scales[::-1] for g in range(groups)])
    return weight.with_(decode_scale=decode)


def fusion_of(
    weight: Quantized, layout: str, dtype: str, rank: int, gathered: bool, gated: bool, dgrad: bool
) -> Fusion:
    """a times weight [G, N, K] and, if the rank R is not 0, low [M/g, R] times b [G, N, R], added:
    f32 [M/g, N]; or `gated`: halves multiplied, in the dtype.

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
    product = fd.ops.grouped_mm_t if dgrad else fd.ops.grouped_mm
    made = []
    if rank:
        low = fd.define_tensor(shape=(rows, rank), dtype=dtype)
        b = fd.define_tensor(shape=(groups, rank, n) if dgrad else (groups, n, rank), dtype=dtype)
        made.append(product(fd.ops.partition(low, ends), b, ends))
    made.append(product(fd.ops.partition(a, ends), w, ends, w_layout=layout))
    y = fd.ops.add(*made) if rank else made[0]
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
            *([low, b.mT.contiguous() if dgrad else b] if rank else []),
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


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("fmt", "dtype", "layout"), [*WAYS[:6], *DGRADS], ids=str)
def test_dgrad_exactly(fmt, dtype, layout, splits):
    """Rows that tiles are made of, and those that are not whole K blocks; results of one width, and
    sums beside them; alone and with an added product.
    """
    k = ceil_to(320, ENCODINGS[fmt].block)
    for n, rank, gathered in ((192, 16, True), (144, 36, False), (192, 0, False), (144, 0, True)):
        for sums in (False, True):
            weight = exact_weight(ENCODINGS[fmt], len(splits), n, k)
            check(weight, layout, dtype, splits, rank, gathered, gated=sums, dgrad=True)


@pytest.mark.needs("wgmma")
@pytest.mark.parametrize("variant", LARGE_M, ids=str)
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [way[:2] for way in (*WAYS, *DGRADS) if way[2] == "w16x64" and way[0] != "bf16"],
)
def test_every_variant_of_dgrad_exactly(fmt, dtype, variant):
    """K blocks that fill a last stage or not, columns that fill a last N tile or not, runs with a
    scale each: accumulators are multiplied by the last one's before what is added.
    """
    with options.override(cuda_variant=variant):
        for n, k, rank in ((320, 1344, 16), (768, 256, 20), (320, 1344, 0), (768, 256, 0)):
            weight = exact_weight(ENCODINGS[fmt], 8, n, ceil_to(k, ENCODINGS[fmt].block))
            weights = [weight]
            if fmt == "nvfp4" and n == 768:
                weights.append(two_runs(weight, (0.5, 2.0)))
            for each in weights:
                check(
                    each, "w16x64", dtype, SPLITS["ragged"], rank, n == 768, gated=True, dgrad=True
                )


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("n", [96, 352, 512])
@pytest.mark.parametrize("scales", [(0.5, 2.0), (1.0, 0.0), (0.0, 0.0), (-2.0, 1.0)], ids=str)
def test_runs_with_a_scale_each(scales, n, tile_m, monkeypatch):
    """Runs that do not begin where blocks of 64 rows do, zero scales, either run first, both
    heights of tiles.
    """
    monkeypatch.setattr(gemm, "_FEW_ROWS", 0 if tile_m == 128 else 10**6)
    weight = two_runs(exact_weight(ENCODINGS["nvfp4"], 4, n, 256), scales)
    for layout in ("w16x64", "linear"):
        for splits, gathered in (([115, 144, 8, 757], False), ([3, 0, 60, 64], True)):
            check(weight, layout, "bf16", splits, 0, gathered, gated=False, dgrad=True)


@pytest.mark.needs("wgmma")
@pytest.mark.parametrize(
    ("table", "variant", "in_fragment_order"), [*ways_of("linear"), *ways_of("tiled")], ids=str
)
def test_every_variant_exactly(table, variant, in_fragment_order, monkeypatch):
    monkeypatch.setattr(
        ByVariants,
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
