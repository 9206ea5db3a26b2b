"""Kernels that round weights to E2M1 codes: which programs have them, their machine code, and what
they make, on the CPU, where a header stands for what is PTX (cuda_on_cpu/).
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from fusions import ODD_SCALES, RULES_OF_E2M1, assert_same_bits, weights_to_round
from on_cpu import copy, library, pointer
from test_cuda_source import needs_nvdisasm, sass, spills

from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.e2m1_copies import scale_of
from fusion_moe.backends.cuda.launch import KERNELS, build
from fusion_moe.compile import compile_fusion
from fusion_moe.encodings import NVFP4, find, quantize
from fusion_moe.ir.text import parse
from fusion_moe.layouts import LAYOUTS
from fusion_moe.nn.frozen.base import _program
from fusion_moe.runtime import nvrtc

pytestmark = [pytest.mark.compiler, pytest.mark.once, pytest.mark.slow]


@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@needs_nvdisasm
@pytest.mark.parametrize("layout", ["linear", "w16x64"])
@pytest.mark.parametrize(("encoding", "rule"), RULES_OF_E2M1, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_a_weight_is_one_call_of_our_kernels(layout, encoding, rule, dtype):
    """Each lane stores its 16 bytes of a tile at once."""
    fusion = parse(_program(768, 2048, dtype, encoding, layout, False, rule))
    program = compile_fusion(fusion, TARGETS["cuda"], options.current())
    assert program.joined
    kernels = program.joined.choose(dict.fromkeys(fusion.symbols, 128), H200).kernels
    first = ["begin"] if encoding == "nvfp4" else []
    assert [kernel.name for kernel in kernels] == [*first, "copies_0"]
    for kernel in kernels:
        lines = sass(build(kernel, H200))
        assert not spills(lines), kernel.name
        if kernel.name == "copies_0":
            wide = [line for line in lines if "STG.E.128" in line]
            assert len(wide) == (layout == "w16x64")


_CALLS = """
#include "e2m1_copies.cuh"
extern "C" void make(const float* x, const float* scales, i64 matrices, u8* codes, u8* stored) {{
    const auto row = [=](i64 m) {{
        return [=](i64 j0, float (&eight)[8]) {{
            std::memcpy(eight, x + m * {k} + j0, sizeof(eight));
        }};
    }};
    const auto of_matrix = [=](i64 m) {{ return scales[m / {n}]; }};
    on_lanes([=] {{
        make_e2m1<{number}, {scale}, {k}, {tiles}>(matrices * {n}, row, of_matrix, codes, stored);
    }});
}}
extern "C" void by_matrix(const float* x, float* scales, i64 matrices, u8* codes, u8* stored) {{
    const auto row = [=](i64 m) {{
        return [=](i64 j0, float (&eight)[8]) {{
            std::memcpy(eight, x + m * {k} + j0, sizeof(eight));
        }};
    }};
    std::vector<u32> state(1 + 2 * matrices);
    on_lanes([=, &state] {{
        make_e2m1_by_matrix<{number}, {scale}, {k}, {tiles}, 4>(
            matrices, {n}, row, 2688.f, state.data(), codes, stored, scales);
    }});
}}
"""


@pytest.mark.parametrize(("layout", "n", "k"), [("linear", 21, 96), ("w16x64", 32, 1088)])
@pytest.mark.parametrize(("encoding", "rule"), RULES_OF_E2M1, ids=str)
@pytest.mark.parametrize("number", ["float", "bf16"])
def test_codes_and_scales_are_those_of_the_encoding(encoding, rule, layout, n, k, number, tmp_path):
    x, encoding = weights_to_round(len(ODD_SCALES), n, k), find(encoding)
    if number == "bf16":
        x = x.bfloat16().float()
    copy(tmp_path, KERNELS / "e2m1_copies.cuh")
    tiles = str(layout != "linear").lower()
    scale = scale_of(encoding, rule)
    text = _CALLS.format(n=n, k=k, scale=scale, tiles=tiles, number=number)
    call, scales = library(tmp_path, text), torch.ones(len(x))
    own = [
        torch.empty(encoding.part_shape(p, x.shape[:1], n, k), dtype=p.dtype)
        for p in encoding.parts[:2]
    ]
    want = quantize(x, encoding, scales=rule)
    if encoding is NVFP4:
        call.by_matrix(pointer(x), pointer(scales), ctypes.c_int64(len(x)), *map(pointer, own))
        assert_same_bits([*own, scales], list(LAYOUTS[layout].pack(*want, encoding=encoding)))
    usual = torch.linspace(0.0, 1e-3, len(x)), torch.linspace(-110.0, 1, len(x)).round().exp2()
    for given in (scales, *usual, ODD_SCALES, ODD_SCALES.flip(0)):
        if given is not scales and encoding is NVFP4:
            x[-1, 5, 5], x[0] = torch.inf, 0.0
            want = quantize(x, encoding, given, rule)
        call.make(pointer(x), pointer(given), ctypes.c_int64(len(x)), *map(pointer, own))
        parts = [*own, given][: len(want)]
        assert_same_bits(parts, list(LAYOUTS[layout].pack(*want, encoding=encoding)))
