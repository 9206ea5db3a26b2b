"""Products of many rows whose weights do not lie in tiles: when a kernel makes tiles of them, and
which.
"""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch
from fusions import fusion_of_call
from on_cpu import library, pointer
from own_layouts import OWN_LAYOUTS, registered as layouts_registered
from test_cuda_readers import some_weight
from test_cuda_source import build, encoded, launches, meta, needs_nvdisasm, sass, spills

from fusion_moe.arch import H200, L40S
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.grouped_mm import ByVariants
from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.backends.cuda.product import Product
from fusion_moe.backends.cuda.reordering import Reordered, reordering
from fusion_moe.backends.cuda.table import table_of
from fusion_moe.compile import lower
from fusion_moe.encodings import ENCODINGS, NVFP4
from fusion_moe.layouts import LAYOUTS, W16X64
from fusion_moe.options import Options

pytestmark = [pytest.mark.compiler, pytest.mark.once]
layouts_registered = pytest.fixture(scope="module", autouse=True)(layouts_registered)
LAYOUTS_OF_USERS = ["linear", "sf128x4", *(layout.name for layout in OWN_LAYOUTS)]
MANY = 2**15


def product_of(encoding="nvfp4", layout="sf128x4", groups=2, n=80, k=320, **given) -> Product:
    parts = encoded(encoding, groups, n, k)
    stored = LAYOUTS[layout].pack(
        *(torch.zeros_like(t, device="cpu") for t in parts), encoding=ENCODINGS[encoding]
    )
    args = meta(64, k), [t.to("meta") for t in stored], meta(groups, dtype=torch.int32)
    how = {"weight_format": encoding, "weight_layout": layout}
    fusion = fusion_of_call("grouped_mm", *args, **how)
    (segment,) = lower(fusion, TARGETS["cuda"], Options(**given)).segments
    source = segment.plan.work
    assert isinstance(source, Product)
    return source


@pytest.mark.parametrize("layout", LAYOUTS_OF_USERS)
@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4"])
def test_tiles_are_those_of_the_layout(encoding, layout, tmp_path):
    """The kernel's C++ on the CPU, a lane after the other; K of five tiles ends inside a run."""
    product = product_of(encoding, layout).ways[0].source
    assert isinstance(product, Reordered)
    weight = some_weight(product.plan.encoding, product.plan.n, product.plan.k)
    parts = [
        torch.cat([t, t.view(torch.uint8).roll(1).view(t.dtype)]) for t in weight
    ]  # two matrices
    stored = LAYOUTS[layout].pack(*parts, encoding=product.plan.encoding)
    wanted = W16X64.pack(*parts, encoding=product.plan.encoding)
    names = [*product.stored_parts[:2], *(array.name for array in product.tile_arrays)]
    text = [
        '#include "memory.cuh"',
        '#include "reorder.cuh"',
        "namespace { struct Segment {",
        f"static constexpr i32 N = {product.plan.n}, K = {product.plan.k};",
        *(f"inline static u8* {name};" for name in names),
        *reordering(product),
        "}; }",
        'extern "C" void run(void* const* parts) {',
        *(f"Segment::{name} = static_cast<u8*>(parts[{i}]);" for i, name in enumerate(names)),
        "Segment s;",
        "for (i32 g = 0; g < 2; ++g)",
        "for (i32 row = 0; row < Segment::N; row += 16)",
        "for (i32 block = 0; block < Segment::K / 64; block += 4)",
        "for (i32 lane = 0; lane < 32; ++lane) {",
        "    TilesOfLane<Segment, 4> tiles(s, g, row, block, lane);",
        "    tiles.load(), tiles.store([](u32 byte) { return u32(Segment::recoded(byte)); });",
        "}}",
    ]
    found = [torch.zeros(t.shape, dtype=torch.uint8) for t in wanted[:2]]
    arrays = [t.contiguous() for t in stored[:2]] + found
    run = library(tmp_path, "\n".join(text), f"-I{KERNELS}").run
    run((ctypes.c_void_p * 4)(*(pointer(t) for t in arrays)))
    for t, want in zip(found, wanted, strict=False):
        assert t.equal(want.view(torch.uint8))


def test_many_rows_are_worth_it():
    product = product_of(groups=64, n=1536, k=2048)
    average = table_of(H200).change("reordered", product.by_variants.matrices)
    few, many = (launches(product, rows) for rows in (int(64 * average) - 1, int(64 * average)))
    assert [k.name.partition("_")[0] for k in few] == ["small"]
    assert many[0].name == "reorder_weights"
    assert {k.name.partition("_")[0] for k in many[1:]} == {"reorder", "large"}
    assert not many[1].reads_before_wait  # others wait for one that has waited for tiles


def test_kernels_that_read_weights_as_they_lie_know_nothing_of_it():
    """Their struct is as it would be without tiles, and so is the memory of a call."""
    product = product_of(n=128, k=256)
    plain = ByVariants(product.plan)
    sizes = dict.fromkeys(product.fusion.symbols, 2)
    chosen = product.choose(sizes, H200)
    assert [k.text for k in launches(product, 2)] == [k.text for k in launches(plain, 2)]
    tiles, beside = product.ways[0].source.tile_arrays, len(plain.fusion.inputs) + len(plain.memory)
    assert len(product.arrays_of(chosen)) == beside + len(plain.scratch)
    assert not any(product.count(array, chosen, sizes) for array in tiles)
    many = dict.fromkeys(product.fusion.symbols, MANY)
    assert product.choose(many, H200).way == 0
    counts = [product.count(a, product.choose(many, H200), many) for a in tiles]
    assert counts == [2 * 128 * 256 // 2, 2 * 128 * 256 // 16]


@pytest.mark.parametrize(
    "made",
    [
        partial(product_of, n=72, layout="linear"),  # no whole tiles
        partial(product_of, "int4", "linear", k=256),  # scales of two bytes
        partial(product_of, "nvfp4", "w16x64"),
    ],
)
def test_other_weights_are_read_as_they_lie(made):
    assert [type(way.source) for way in made().ways] == [ByVariants]


def test_the_order_of_rows_keeps_to_one_kind_of_kernel():
    product = product_of(groups=64, n=1536, k=2048, order="row")
    names = {launches(product, rows)[-1].name for rows in (4, MANY)}
    assert all(name.startswith("small") for name in names)


def test_the_option_order_weights():
    args = {"groups": 64, "n": 1536, "k": 2048}
    few = [type(way.source) for way in product_of(**args, order_weights=False).ways]
    both = [type(way.source) for way in product_of(**args).ways]
    assert (few, both) == ([ByVariants], [Reordered, ByVariants, Reordered])


def test_a_kernel_that_is_asked_for_gets_the_weights_that_it_reads():
    product = product_of(n=128, k=256)
    for variant, first in (
        ("large_m_80x4", "reorder_weights"),
        ("small_m_4x2x4x1x1", "small_m_4x2x4x1x1"),
    ):
        sizes = dict.fromkeys(product.fusion.symbols, 4)
        chosen = product.choose(sizes, H200, variant)
        made = product.launches(chosen, sizes, H200)
        assert (made[0].name, made[-1].name) == (first, variant)


@pytest.mark.slow
@needs_nvdisasm
@pytest.mark.parametrize("arch", [H200, L40S], ids=lambda arch: arch.name)
@pytest.mark.parametrize("layout", ["linear", "sf128x4"])
def test_it_compiles_without_local_memory(arch, layout):
    kernels = launches(product_of("nvfp4", layout, n=1536, k=2048), MANY, arch)
    assert len(kernels) >= 2
    for kernel in kernels:
        assert not spills(sass(build(kernel, arch)))


def test_bytes_that_are_no_scales_are_reported():
    (text,) = (k.text for k in launches(product_of(n=128), MANY) if k.name == "reorder_weights")
    assert "if (scale > 126) report(error, BAD_WEIGHT" in text
    assert NVFP4.block_scales[0].dtype == torch.float8_e4m3fn
