"""The levels of docs/extend/large_m.md, the large-M kernel from one consumer to waves: each is one
template with other parameters, and makes the same product.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_tables import use_variant
from test_cuda_kernels import exact_weight, product
from test_cuda_source import build, needs_nvdisasm, only, product_of, sass

from fusion_moe.arch import H200
from fusion_moe.backends.cuda.variants import LargeM
from fusion_moe.encodings import ENCODINGS, dequantize
from fusion_moe.runtime import nvrtc


@dataclass(frozen=True)
class Level:
    """A variant for G matrices [N, K] of NVFP4, and the stages that its ring has on an H200."""

    variant: LargeM
    stages: int
    g: int = 3
    n: int = 512
    k: int = 512


LEVELS = {
    "1: one consumer": Level(LargeM(256, 1), 3),
    "2: a ring": Level(LargeM(64, 1), 10),
    "3: repeats": Level(LargeM(48, 4, 2), 4),
    "4: split-K": Level(LargeM(96, 4, 1, 4), 3, g=1),
    "5: waves": Level(LargeM(80, 4), 5, k=4096),
}


@needs_nvdisasm
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
def test_levels_compile_with_as_many_stages(level):
    source = product_of("nvfp4", "bf16", "w16x64", k=level.k, n=level.n, groups=level.g)
    assert level.variant.fits(source.matrices, H200)
    assert level.variant.stages(source.matrices, H200) == level.stages
    (kernel,) = source.products(only(level.variant), {"s0": 512}, H200)
    lines = sass(build(kernel, H200))
    assert any("HGMMA" in x for x in lines)


@pytest.mark.gpu
@pytest.mark.needs("wgmma")
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_levels_make_the_same_product(level, monkeypatch):
    use_variant(monkeypatch, "tiled", level.variant)
    g = torch.Generator().manual_seed(0)
    weight = exact_weight(ENCODINGS["nvfp4"], level.g, level.n, level.k)
    counts = [300, 0, 77][: level.g]
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randint(-3, 4, (int(ends[-1]), level.k), generator=g).bfloat16().cuda()
    matrices = dequantize(weight).cuda()
    want = torch.cat(
        [part.float() @ m.T for part, m in zip(x.split(counts), matrices, strict=True)]
    )
    assert torch.equal(product(x, weight, ends.cuda(), "w16x64"), want)
