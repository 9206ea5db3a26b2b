"""Weights that do not lie in tiles, on a CUDA device: with many rows a kernel makes tiles of them,
which are then read as those of weights that lie so.
"""

import gc

import pytest
import torch
from forgetting import kept_bytes
from torch._inductor import config

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import NonFiniteError
from fusion_moe.layouts import LAYOUTS, SF128X4, W16X64

pytestmark = pytest.mark.gpu
GROUPED_MM = torch.ops.fusion_moe.grouped_mm
NVFUSERS = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm


def weight_of(encoding, groups, n, k):
    g = torch.Generator(device="cuda").manual_seed(0)
    w = torch.randn(groups, n, k, generator=g, device="cuda")
    return list(quantize(w, ENCODINGS[encoding]))


def rows_of(sizes, k, spare=0):
    g = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(sum(sizes) + spare, k, generator=g, device="cuda").bfloat16()
    return x, torch.tensor(sizes, dtype=torch.int32, device="cuda").cumsum(0).int()


def problem_of(sizes, n, k):
    m = torch.tensor(sizes, dtype=torch.int32)
    starts, padded = (of.cumsum(0) - of for of in (m, (m + 127) // 128 * 128))
    problem = torch.tensor([[size, n, k] for size in sizes])
    return [t.int().cuda() for t in (starts, padded, problem)]


@pytest.mark.parametrize("layout", ["linear", "sf128x4"])
@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("sizes", "n", "k"), [((700, 0, 1300), 80, 320), ((3000,), 512, 1024), ((150,) * 24, 336, 256)]
)
def test_the_bits_are_those_of_weights_in_tiles(layout, encoding, sizes, n, k):
    parts, of = weight_of(encoding, len(sizes), n, k), ENCODINGS[encoding]
    x, ends = rows_of(sizes, k, spare=3)
    there = LAYOUTS[layout].pack(*parts, encoding=of)
    tiles = W16X64.pack(*parts, encoding=of)
    with torch.inference_mode():
        found = GROUPED_MM(x, list(there), ends, weight_format=encoding, weight_layout=layout)
        want = GROUPED_MM(x, list(tiles), ends, weight_format=encoding, weight_layout="w16x64")
    assert found.equal(want)
    fusion_moe.synchronize()


def nvfusers(parts):
    codes, scale, decode = parts
    return codes.view(torch.float4_e2m1fn_x2).transpose(1, 2), SF128X4.forward(scale), decode


def test_replays_read_the_weights_of_now():
    """A graph reorders them too: what is written into them is seen."""
    sizes, n, k = (600, 900), 256, 512
    x, ends = rows_of(sizes, k)
    parts, problem = weight_of("nvfp4", 2, n, k), problem_of(sizes, n, k)
    given = nvfusers(parts)
    with torch.inference_mode():
        NVFUSERS(x, *given, *problem)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = NVFUSERS(x, *given, *problem)
        parts[0].copy_(parts[0].flip(0))
        graph.replay()
        tiles = W16X64.pack(*parts, encoding=ENCODINGS["nvfp4"])
        want = GROUPED_MM(x, list(tiles), ends, weight_format="nvfp4", weight_layout="w16x64")
        assert found.equal(want)
        assert NVFUSERS(x, *given, *problem).equal(want)


def test_tiles_that_are_kept_are_those_of_the_weights_of_now():
    sizes, n, k = (600, 900), 256, 512
    x, ends = rows_of(sizes, k)
    parts, problem = weight_of("nvfp4", 2, n, k), problem_of(sizes, n, k)
    given = nvfusers(parts)

    def want():
        tiles = W16X64.pack(*parts, encoding=ENCODINGS["nvfp4"])
        return GROUPED_MM(x, list(tiles), ends, weight_format="nvfp4", weight_layout="w16x64")

    with torch.no_grad(), options.override(keep_weights=True):
        for there in (0, 1, 1):
            assert NVFUSERS(x, *given, *problem).equal(want())
            assert kept_bytes() == there * sum(t.nbytes for t in parts[:2])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = NVFUSERS(x, *given, *problem)
        parts[0].copy_(parts[0].flip(0))
        graph.replay()
        assert found.equal(want())
        for _ in range(3):
            assert NVFUSERS(x, *given, *problem).equal(want())
    del given
    parts.clear()
    gc.collect()
    assert kept_bytes() == 0
    fusion_moe.synchronize()


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scales_that_no_quantizer_writes_are_reported(byte):
    sizes, n, k = (600, 900), 256, 512
    x, ends = rows_of(sizes, k)
    parts = weight_of("nvfp4", 2, n, k)
    parts[1].view(torch.uint8)[1, 3, 5] = byte
    with torch.inference_mode():
        GROUPED_MM(x, parts, ends, weight_format="nvfp4")
        with pytest.raises(NonFiniteError, match=r"of matrix 1 is NaN or negative"):
            fusion_moe.synchronize()


def test_products_after_each_other():
    sizes, n = (600, 900), 256
    x, ends = rows_of(sizes, n)
    of, parts = ENCODINGS["nvfp4"], weight_of("nvfp4", 2, n, n)
    tiles = list(W16X64.pack(*parts, encoding=of))

    def twice(x, parts, layout):
        for _ in range(2):
            x = GROUPED_MM(x, parts, ends, weight_format="nvfp4", weight_layout=layout)
            x = torch.nn.functional.silu(x)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="fusion_moe", fullgraph=True)
    with torch.inference_mode():
        assert compiled(x, parts, "linear").equal(compiled(x, tiles, "w16x64"))


def test_constants_are_in_tiles_once():
    """Under Inductor's freezing nothing is reordered by a call."""
    sizes, n, k = (600, 900), 256, 512
    x, ends = rows_of(sizes, k)
    parts, problem = weight_of("nvfp4", 2, n, k), problem_of(sizes, n, k)
    module = torch.nn.Module()
    for i, t in enumerate(nvfusers(parts)):
        module.register_buffer(f"part_{i}", t)
    module.forward = lambda x, *of: torch.relu(
        NVFUSERS(x, module.part_0, module.part_1, module.part_2, *of)
    )
    torch._dynamo.reset()
    with config.patch(freezing=True), torch.no_grad():
        found = torch.compile(module, backend="fusion_moe", fullgraph=True)(x, *problem)
        tiles = list(W16X64.pack(*parts, encoding=ENCODINGS["nvfp4"]))
        want = GROUPED_MM(x, tiles, ends, weight_format="nvfp4", weight_layout="w16x64")
    assert found.equal(torch.relu(want))
