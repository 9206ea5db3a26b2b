"""CUDA's readers of weights, without a GPU: their C++ decodes matrices on the CPU, where a header
stands for what is PTX (cuda_on_cpu/). Derived readers make what the reference makes, bit for bit;
written ones what derived ones make, within the ranges that their headers state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cover import few
from on_cpu import library, pointer
from own_encodings import OWN, UINT4, registered, with_zeros
from own_layouts import OWN_LAYOUTS, registered as layouts_registered
from test_cuda_source import build, launches, needs_nvdisasm, sass, spills
from test_cuda_training_source import packed, sources
from torch import Tensor

from fusion_moe.arch import H200
from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.backends.cuda.readers import DERIVED, TILED, WRITTEN, Reader, reader
from fusion_moe.encodings import ENCODINGS, Element, Encoding, Quantized, Scale, dequantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.layouts import LAYOUTS, LINEAR, W16X64

pytestmark = [pytest.mark.compiler, pytest.mark.once, pytest.mark.slow]
registered = pytest.fixture(scope="module", autouse=True)(registered)
layouts_registered = pytest.fixture(scope="module", autouse=True)(layouts_registered)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
STORED = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}

# what a lane decodes, by layout
WAYS = {
    "linear": ("from_memory",),
    TILED: ("from_memory", "from_shared<true>", "from_shared<false>", "transposed"),
}
WRITTEN_WAYS = {"linear": WAYS["linear"], TILED: WAYS[TILED][:2]}  # the others are made of PTX


def decoded(read: Reader, weight: Quantized, folder: Path, ways: Sequence[str]) -> Tensor:
    """[dtypes, ways, N, K] f32: what a reader makes of a weight [1, N, K] in linear order."""
    (_, n, k), encoding = weight.shape, weight.encoding
    order = W16X64 if read.tiled else read.layout or LINEAR
    parts = order.pack(*weight, encoding=encoding)
    names, types = read.names(encoding), [STORED.get(p.dtype, "u8") for p in encoding.parts]
    out = torch.full((len(DTYPES), len(ways), n, k), torch.nan)
    lines = ['#include "memory.cuh"', f'#include "{read.header}"']
    lines += ["#define TILED"] if read.tiled else []
    for dtype in DTYPES:
        lines += [
            f"namespace {{ namespace of_{dtype} {{",
            "struct Segment {",
            f"using Activation = {dtype};",
        ]
        lines += [f"static constexpr i32 N = {n}, K = {k}, SCALE_RUNS = 1;"]
        lines += [f"inline static const {t}* {x};" for t, x in zip(types, names, strict=True)]
        lines += [*read.constants(encoding), f"using Weights = {read.of(dtype)};", "};"]
        lines += ['#include "decode.h"', "void decode(const void* const* parts, float* out) {"]
        given = enumerate(zip(types, names, strict=True))
        lines += [f"Segment::{x} = static_cast<const {t}*>(parts[{i}]);" for i, (t, x) in given]
        lines += [*(f"{way}(out + {i * n * k});" for i, way in enumerate(ways)), "}", "}}"]
    lines += ['extern "C" void decode(const void* const* parts, float* out) {']
    lines += [f"of_{d}::decode(parts, out + {i * out[0].numel()});" for i, d in enumerate(DTYPES)]
    kept = [part.contiguous() for part in parts]
    pointers = (ctypes.c_void_p * len(kept))(*(part.data_ptr() for part in kept))
    made = library(folder, "\n".join([*lines, "}"]), f"-I{KERNELS}", name=read.template)
    made.decode(pointers, pointer(out))
    return out


def some_weight(encoding: Encoding, n: int, k: int) -> Quantized:
    """Codes and bytes of scales by chance, but no scales that are NaN, infinite or near it."""
    g, parts = torch.Generator().manual_seed(0), []
    for part in encoding.parts:
        shape = encoding.part_shape(part, (1,), n, k)
        if part.scale is None or part.scale.zero_point:
            most = 16 if part.scale else 256
            codes = torch.randint(0, most, shape, generator=g, dtype=torch.uint8).view(part.dtype)
            nan = codes.float().isnan()
            parts.append(torch.where(nan, torch.zeros((), dtype=part.dtype), codes))
        else:
            parts.append(
                (2 * torch.rand(shape, generator=g) - 1).mul(4).to(part.dtype)
                if part.dtype != torch.float8_e8m0fnu
                else torch.randint(120, 130, shape, generator=g, dtype=torch.uint8).view(part.dtype)
            )
    return Quantized(*parts, encoding=encoding)


def rounded(weight: Quantized) -> Tensor:
    """[dtypes, 1, N, K]: rounded to the dtype of activations over the scale of the matrix, times
    it.
    """
    ones = {p.name: torch.ones_like(t) for p, t in weight.named() if p.of_matrix}
    outer = next((t for p, t in weight.named() if p.of_matrix), torch.ones(1))
    numbers = dequantize(weight.with_(**ones))
    return torch.stack([numbers.to(dtype).float() * outer for dtype in DTYPES.values()])


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize(
    "encoding",
    few(
        [
            *OWN,
            *map(ENCODINGS.get, ("mxfp8", "fp8", "fp8_e8m0", "fp8_channel", "fp8_tensor")),
            *map(ENCODINGS.get, ("uint4_32", "uint4_128_f16", "int4_64_f16", "nf4")),
            ENCODINGS["int8_128_f16"],
        ],
        5,
    ),
    ids=lambda e: e.name,
)
def test_derived_readers_make_what_the_reference_makes(encoding, layout, tmp_path):
    if layout == TILED and W16X64.why_not(64, 512, encoding):
        return
    off_tile = layout == "linear" and encoding.block in (16, 32, 48)
    weight = some_weight(encoding, *((40, 768 + encoding.block) if off_tile else (64, 768)))
    assert reader(encoding.name, layout, "f16") == DERIVED[layout]
    ways = WAYS[layout]
    if any(
        "using Step" in line for line in reader(encoding.name, layout, "f16").constants(encoding)
    ):
        ways = tuple(way for way in ways if way != "from_shared<false>")  # made of PTX
    found = decoded(DERIVED[layout], weight, tmp_path, ways)
    for i, way in enumerate(ways):
        assert torch.equal(found[:, i : i + 1], rounded(weight)), way


@pytest.mark.parametrize("encoding", ["fp8", "fp8_e8m0", "fp8_channel", "divided"])
def test_columns_that_fill_no_k_block(encoding, monkeypatch, tmp_path):
    """The last scale covers fewer; what is read past them is finite, as zeros multiply it."""
    scale = Scale("block_scale", torch.bfloat16, 16, divides=True)
    monkeypatch.setitem(ENCODINGS, "divided", Encoding("divided", UINT4, (scale,)))
    weight = some_weight(ENCODINGS[encoding], 41, 784)
    found = decoded(reader(encoding, "linear", "bf16"), weight, tmp_path, WAYS["linear"])
    assert torch.equal(found, rounded(weight))


# the block scales with which written readers are exact (their headers say it), and float16 has all
# bits of the weights
EXACT = {
    "nvfp4": {"bf16": (0.0, 448.0), "f16": (0.0, 448.0)},
    "mxfp4": {"bf16": (2.0**-72, 2.0**61), "f16": (2.0**-21, 2.0**8)},
    "int4": {"bf16": (2.0**-66, 2.0**54), "f16": (2.0**-14, 255.0)},
}


def positive_scales(encoding: Encoding) -> Tensor:
    """All that are exact in bfloat16, of each int4 scale the opposite too."""
    dtype = encoding.block_scales[0].dtype
    bits = torch.arange(2 ** (8 * dtype.itemsize - 1), dtype=torch.int16)
    if dtype == torch.float8_e8m0fnu:
        bits = torch.arange(255)
    scales = bits.view(dtype) if dtype.itemsize > 1 else bits.to(torch.uint8).view(dtype)
    first, last = EXACT[encoding.name]["bf16"]
    scales = scales[(scales.float() >= first) & (scales.float() <= last)]
    scales = torch.cat([scales, -scales]) if dtype == torch.bfloat16 else scales
    return scales[len(scales) % 16 :]


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize("name", EXACT)
def test_written_readers_make_what_derived_ones_make(name, layout, tmp_path):
    """Every code under every scale."""
    encoding = ENCODINGS[name]
    scales = positive_scales(encoding)
    n, k, count = len(scales), 128, 128 // encoding.block
    code = torch.arange(0, 16, 2, dtype=torch.uint8)
    codes = (code | (code + 1) << 4).repeat(k // 16).expand(1, n, k // 2).contiguous()
    ones = [torch.ones(1) for scale in encoding.scales if not scale.block]
    scale = scales.view(-1, 1).expand(n, count).contiguous()[None]
    weight = Quantized(codes, scale, *ones, encoding=encoding)
    found = decoded(WRITTEN[name, layout], weight, tmp_path, WRITTEN_WAYS[layout])
    want = decoded(DERIVED["linear"], weight, tmp_path, WAYS["linear"])
    for i, (first, last) in enumerate(EXACT[name].values()):
        size = scales.float().abs()
        exact = (size >= first) & (size <= last)
        if name == "nvfp4" and layout == TILED:
            exact &= size > 0  # which it reads as 2^-23
        assert exact.sum() > 24
        assert torch.equal(found[i][:, exact], want[i][:, exact].expand_as(found[i][:, exact]))


ORDERED = ["sf128x4", *(layout.name for layout in OWN_LAYOUTS)]


@pytest.mark.parametrize("layout", ORDERED)
@pytest.mark.parametrize(
    "encoding",
    [*map(ENCODINGS.get, ("nvfp4", "mxfp4", "mxfp8", "int4")), OWN[4], OWN[6]],
    ids=lambda e: e.name,
)
def test_readers_of_other_layouts_make_what_those_of_the_linear_one_make(
    encoding, layout, tmp_path
):
    weight = some_weight(
        encoding,
        *(
            (64, 768)
            if LAYOUTS[layout].elements
            else (40, 800 if 800 % encoding.multiple == 0 else 832)
        ),
    )
    read = reader(encoding.name, layout, "bf16")
    (tmp_path / "linear").mkdir()
    want = decoded(replace(read, layout=None), weight, tmp_path / "linear", WAYS["linear"])
    found = decoded(read, weight, tmp_path, WAYS["linear"])
    assert torch.equal(found, want)
    assert found.any()


@pytest.mark.parametrize(
    ("change", "layout", "sentence"),
    [
        (
            {"scales": (Scale("s", torch.float16, 24),)},
            "linear",
            "with a scale for 24 elements, have no kernel here; expected a multiple of 16",
        ),
        (
            {"element": Element.integers("two", 2, 0)},
            TILED,
            "with codes of 2 bits, have no kernel here; expected 4 or 8 bits in their usual order",
        ),
        (
            {"scales": (Scale("s", torch.float16, 0),)},
            "linear",
            "with such scales of a matrix, have no kernel here; expected at most one float32",
        ),
    ],
)
def test_what_no_reader_takes_is_refused_when_it_is_planned(monkeypatch, change, layout, sentence):
    monkeypatch.setitem(ENCODINGS, "zeros_16", replace(with_zeros(16), **change))
    with pytest.raises(UnsupportedError, match=f"weights in zeros_16, {sentence}"):
        reader("zeros_16", layout, "bf16")


@needs_nvdisasm
@pytest.mark.parametrize("layout", few(WAYS))
def test_a_layer_with_zero_points_has_all_kernels_forward_and_backward(layout):
    made, titles = packed("uint4_128_f16", layout, inner=256), set()
    forward, backward = sources(made.forward), sources(made.backward)
    for i, source in enumerate([*forward, *backward]):
        for tokens in (4, 4096):
            for kernel in launches(source, tokens):
                if kernel.title.startswith(("small_m", "large_m", "gemm")):
                    titles.add(kernel.title.partition("_")[0])
                    lines = sass(build(kernel, H200))
                    # dgrad has scales of 16 rows at a time
                    assert i >= len(forward) or not spills(lines), kernel.title
                    assert any("HFMA2" in x for x in lines)  # numbers are made in pairs
    assert titles == ({"small", "gemm"} if layout == "linear" else {"small", "large"})
