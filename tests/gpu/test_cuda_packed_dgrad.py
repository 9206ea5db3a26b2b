"""dgrad of weights in few bits on the CUDA backend, on a GPU: exactly, then in layers."""

from __future__ import annotations

import pytest
import torch
from hopper import ON_HOPPER
from own_encodings import registered
from test_cuda_encodings import DTYPES, exact_weight, stored
from test_cuda_training import SPLITS, TAIL, compiled, ends_of, integers

import fusion_moe
from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.backends.cuda import gemm
from fusion_moe.backends.cuda.variants import ALL, Matrices
from fusion_moe.encodings import ENCODINGS, Quantized, dequantize
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.layouts.groups import ceil_to

pytestmark = ON_HOPPER
registered = pytest.fixture(scope="module", autouse=True)(registered)

WAYS = [
    ("nvfp4", "bf16", "w16x64"),
    ("nvfp4", "bf16", "linear"),
    ("nvfp4", "f16", "w16x64"),
    ("mxfp4", "bf16", "w16x64"),
    ("mxfp4", "f16", "linear"),
    ("int4", "bf16", "w16x64"),
    ("int4", "f16", "linear"),
    ("uint4_128", "bf16", "w16x64"),  # derived readers from here on
    ("uint4_128", "f16", "linear"),
    ("levels", "bf16", "w16x64"),
]


_ANY = Matrices(8, 256, 16, 1, 576, True, "dgrad")
LARGE_M = sorted({v.name for v in ALL if v.fits(_ANY, H200)})


def product(weight: Quantized, layout: str, activations: str, gathered: bool, sums: bool) -> Fusion:
    """a [M/g, N] times weight [G, N, K] -> f32 [M/g, K], and its rows' sums; `gathered`: an index
    picks the rows of a.
    """
    fd, (groups, n, _), parts = FusionDefinition(), weight.shape, list(weight)
    tokens, rows = fd.define_size("t"), fd.define_size("m")
    ends = fd.groups_of(fd.define_tensor(shape=(groups,), dtype="i32"), rows)
    a = fd.define_tensor(shape=(tokens if gathered else rows, n), dtype=activations)
    if gathered:
        a = fd.ops.index_select(a, fd.define_tensor(shape=(rows,), dtype="i32"), dim=0)
    names = {
        torch.uint8: "u8",
        torch.float8_e4m3fn: "f8e4m3",
        torch.float8_e8m0fnu: "f8e8m0",
        torch.float32: "f32",
    }
    names |= {dtype: name for name, dtype in DTYPES.items()}
    given = [fd.define_tensor(shape=tuple(p.shape), dtype=names[p.dtype]) for p in parts]
    w = fd.ops.pack(*given, encoding=weight.encoding.name, layout=layout)
    made = fd.ops.grouped_mm_t(fd.ops.partition(a, ends), w, ends, w_layout=layout)
    fd.add_output(made)
    if sums:
        fd.add_output(fd.ops.sum(made, dims=[1], keepdim=False))
    return fd.fusion()


def two_runs(weight: Quantized, scales: tuple[float, float]) -> Quantized:
    """The weight with a scale for each half of its rows, which differ from group to group."""
    groups = len(weight[0])
    decode = torch.tensor([scales if g % 2 else scales[::-1] for g in range(groups)])
    return weight.with_(decode_scale=decode)


def check(
    weight: Quantized, layout: str, activations: str, splits: list[int], gathered: bool
) -> None:
    """The kernel's result is that of float64 matrices, and rows of no group are not read."""
    rows, tokens, n = sum(splits) + TAIL, 41, weight.shape[1]
    a = integers(tokens if gathered else rows, n, dtype=DTYPES[activations])
    picks = torch.randint(0, tokens, (rows,), device="cuda", dtype=torch.int32)
    matrices, x = dequantize(weight).double().cuda(), (a[picks] if gathered else a).double()
    if not gathered:
        a[sum(splits) :] = float("nan")
    want, start = torch.zeros(rows, weight.shape[-1], dtype=torch.float64, device="cuda"), 0
    for g, count in enumerate(splits):
        want[start : start + count] = x[start : start + count] @ matrices[g]
        start += count
    parts = [p.contiguous() for p in stored(weight, layout)]
    for sums in (False, True):
        program = compiled(product(weight, layout, activations, gathered, sums))
        found, *summed = program([ends_of(splits), a, *([picks] if gathered else []), *parts])
        assert torch.equal(found.double(), want)
        assert all(torch.equal(s.double(), want.sum(1)) for s in summed)
        fusion_moe.synchronize()


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("fmt", "activations", "layout"), WAYS, ids=str)
def test_exactly(fmt, activations, layout, splits):
    for n, k in ((192, 320), (144, 64)):
        k = ceil_to(k, ENCODINGS[fmt].block)
        weight = exact_weight(ENCODINGS[fmt], len(splits), n, k)
        check(weight, layout, activations, splits, gathered=n == 144)


@pytest.mark.parametrize("variant", LARGE_M, ids=str)
@pytest.mark.parametrize(
    ("fmt", "activations", "layout"), [way for way in WAYS if way[2] == "w16x64"], ids=str
)
def test_every_variant_exactly(fmt, activations, layout, variant):
    """K blocks that fill a last stage or not, columns that fill a last N tile or not, runs with a
    scale each.
    """
    with options.override(cuda_variant=variant):
        for n, k, gathered in ((320, 1344, False), (768, 256, True)):
            k = ceil_to(k, ENCODINGS[fmt].block)
            weight = exact_weight(ENCODINGS[fmt], 8, n, k)
            check(weight, layout, activations, SPLITS["ragged"], gathered)
            if fmt == "nvfp4" and n == 768:
                check(two_runs(weight, (0.5, 2.0)), layout, activations, SPLITS["ragged"], gathered)


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
        check(weight, layout, "bf16", [115, 144, 8, 757], gathered=False)
        check(weight, layout, "bf16", [3, 0, 60, 64], gathered=True)
