"""kernels/large_mma.cuh, the large-M kernels without wgmma, compiled for GPUs without it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from cover import few
from kernel_tables import EIGHT_BITS, MMA, PAIRS
from test_cuda_source import (
    all_loops,
    build,
    by_variants,
    needs_nvdisasm,
    only,
    product_of,
    sass,
    sources,
    spills as uses_of_local_memory,
)

from fusion_moe.arch import A100, H200, named
from fusion_moe.backends.cuda.variants import LargeMma, Matrices
from fusion_moe.runtime import nvrtc

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
    pytest.mark.slow,
]
ADA, NVFP4 = named("RTX 4090"), Matrices(128, 2048, 96, 2, 576, True)
FREE = [v for v in MMA if not v.row_order]


def test_stages_for_each_gpu():
    """A block of 163 KiB has two teams or one; of 99."""
    stages = {
        gpu: {v.name: v.stages(NVFP4, gpu) for v in FREE if v.fits(NVFP4, gpu)}
        for gpu in (A100, ADA)
    }
    assert stages[A100] == {
        "large_mma_32x1x4": 6,
        "large_mma_32x1x2": 9,
        "large_mma_48x1x4": 5,
        "large_mma_64x1x4": 4,
        "large_mma_64x1x2": 6,
        "large_mma_64x2x2": 9,
    }
    assert stages[ADA] == {
        "large_mma_32x1x4": 3,
        "large_mma_32x1x2": 5,
        "large_mma_48x1x4": 3,
        "large_mma_64x1x2": 3,
        "large_mma_64x2x2": 5,
    }


def test_other_kernels_do_not_fit_in_their_place():
    assert all(v.fits(NVFP4, H200) for v in FREE)  # if one is asked for
    for of in (replace(NVFP4, tiled=False), replace(NVFP4, row_order=True)):
        assert not any(v.fits(of, A100) for v in FREE)
    assert [v.row_order for v in MMA if v.fits(replace(NVFP4, row_order=True), A100)] == [
        True
    ] * len(FREE)
    dgrad = replace(NVFP4, kind="dgrad", block=1, runs=2)
    assert {v.tile_m * v.repeats for v in FREE if v.fits(dgrad, A100)} == {64, 128, 192, 256}
    assert not any(v.fits(replace(dgrad, k=2048 + 64), A100) for v in FREE)
    wide = replace(NVFP4, tile_bytes=1088)
    assert max(v.tile_m * v.repeats for v in FREE if v.fits(wide, A100)) == 128


@needs_nvdisasm
@pytest.mark.parametrize("variant", few(MMA, 2), ids=lambda v: v.name)
def test_variants_need_no_local_memory_and_have_lean_loops(variant: LargeMma):
    """A K block takes a product 1 instruction, reading eight rows 2, dequantizing 1,024 weights
    some 55. In row order activations move to registers that follow each other.
    """
    source = by_variants(sources("qwen3", order="row" if variant.row_order else "free")[0])
    lines = sass(build(source.products(only(variant), {"s0": 512}, A100)[0], A100))
    assert not uses_of_local_memory(lines)
    found = defaultdict[int, list[int]](list)
    for loop in all_loops(lines):
        found[sum("HMMA" in x for x in loop)].append(len(loop))
    eights, repeats = variant.tile_m // 8, variant.repeats
    products = 4 * repeats * eights
    moves = 20 * eights if variant.row_order else 0
    assert min(found[products]) <= products + 2 * eights + 60 * repeats + 75 + moves


@needs_nvdisasm
@pytest.mark.parametrize(
    "variant", few([v for v in FREE if v.tile_m == 64], 2), ids=lambda v: v.name
)
@pytest.mark.parametrize(("fmt", "activations"), few([*PAIRS[1:], *EIGHT_BITS]))
def test_encodings_need_no_local_memory(fmt, activations, variant):
    source = product_of(fmt, activations, "w16x64")
    if not variant.fits(source.matrices, A100):
        pytest.skip("of tiles of other sizes")
    lines = sass(build(source.products(only(variant), {"s0": 512}, A100)[0], A100))
    assert not uses_of_local_memory(lines)
