"""A reader in C++ in the place of the derived one; what readers need, and what has none."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cpu_tiers import DTYPES, TIERS, program
from fusions import fusion_of_call
from torch import Tensor

import fusion_moe
from fusion_moe import encodings, options
from fusion_moe.backends.cpu import readers
from fusion_moe.encodings import Element, Encoding, Scale, quantize
from fusion_moe.errors import BuildError, FusionError, UnsupportedError
from fusion_moe.nn import Experts
from fusion_moe.runtime import build

pytestmark = [pytest.mark.compiler, pytest.mark.slow]
ops = torch.ops.fusion_moe


def _int8(x: Tensor) -> Tensor:
    """x f32 [...] -> two's complement, uint8 [...]."""
    return x.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)


def _number(code: Tensor) -> Tensor:
    """Its inverse."""
    return (code.int() - 256 * (code > 127).int()).float()


INT8 = Element("int8", 8, torch.uint8, maximum=127.0, encode=_int8, decode=_number)
INT8_G32 = Encoding(
    "int8_g32", INT8, (Scale("block_scale", torch.float16, 32, lambda amax, outer: amax / 127),)
)
READER = """
#include "weight.h"

// Codes of eight bits in two's complement, and a float16 scale for 32 of them.
struct Weight : PortableWeight {
    static constexpr double BYTES = 1.0625;

    static void dequantize(const Problem& p, i64 g, i64 n, i64 k, i64 count, float* out) {
        const i64 first = (g * p.N + n) * p.K + k;
        const signed char* codes = static_cast<const signed char*>(p.parts[0]) + first;
        const f16* scales = static_cast<const f16*>(p.parts[1]) + first / 32;
        for (i64 i = 0; i < count; ++i) out[i] = float(codes[i]) * widen(scales[i / 32]);
    }
};
"""
E, H, I = 3, 96, 64


@contextmanager
def known(encoding: Encoding, reader: str = "") -> Iterator[None]:
    """Registered, with a reader or without one."""
    encodings.register(encoding)
    try:
        if reader:
            readers.register_reader(encoding.name, reader)
        yield
    finally:
        if reader:
            readers.unregister_reader(encoding.name)
        encodings.unregister(encoding.name)


@pytest.fixture(autouse=True, scope="module")
def registered(amx) -> Iterator[None]:
    with known(INT8_G32, READER):
        yield


def weight(*shape: int, seed: int = 0) -> list[Tensor]:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8
    return list(quantize(x, encoding=INT8_G32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_grouped_mm(tier, dtype):
    w, sizes = weight(E, 70, H), (1, 3, 40)
    x, ends = (
        torch.randn(sum(sizes), H, generator=torch.Generator().manual_seed(1)).to(dtype),
        torch.tensor([1, 4, 44], dtype=torch.int32),
    )
    fusion = fusion_of_call(
        "grouped_mm", x, w, ends, weight_format=INT8_G32.name, out_dtype=torch.float32
    )
    (found,), (want,) = program(fusion, tier)([x, *w, ends]), fusion.evaluate(x, *w, ends)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_option_check_finds_a_reader_at_fault(tmp_path):
    other = Encoding("int8_wrong", INT8, INT8_G32.scales)
    wrong = READER.replace("widen(scales[i / 32])", "widen(scales[i / 32]) + (k + i == 7)")
    with known(other, wrong):
        w, ends = (
            list(quantize(torch.randn(E, 32, H), encoding=other)),
            torch.tensor([1, 4, 6], dtype=torch.int32),
        )
        said = r"segment 0, `grouped_mm.*\[grouped_gemm, cpu\]"
        with (
            options.override(check=True, dump=str(tmp_path)),
            pytest.raises(FusionError, match=said) as found,
        ):
            ops.grouped_mm(torch.randn(6, H), w, ends, weight_format=other.name)
        (script,) = tmp_path.glob("cpu-*/check-*.py")
        with pytest.raises(FusionError) as again:
            runpy.run_path(str(script), run_name="__main__")
        assert (
            str(again.value).partition("; expected")[0]
            == str(found.value).partition("; expected")[0]
        )


def test_without_a_reader_the_reference_runs_and_says_why():
    other = Encoding("int8_g8", INT8, (replace(INT8_G32.scales[0], block=8),))
    with known(other):
        w = list(quantize(torch.randn(E, 32, H), encoding=other))
        x, ends = torch.randn(6, H), torch.tensor([1, 4, 6], dtype=torch.int32)
        with options.override(target="reference"):
            want = ops.grouped_mm(x, w, ends, weight_format=other.name)
        assert torch.equal(ops.grouped_mm(x, w, ends, weight_format=other.name), want)
        report = fusion_moe.explain(
            lambda x: ops.grouped_mm(x, w, ends, weight_format=other.name), x
        ).details()
        assert "a weight int8_g8" in " ".join(report.split())
        with pytest.raises(UnsupportedError, match=r"its scales are for \[8\] elements"):
            readers.library_source("generic", other.name)


def test_modules_keep_each_of_two_block_scales():
    scales = (
        Scale("block_scale", torch.float16, 32, lambda amax, outer: amax / 127 / outer),
        Scale(
            "super_scale", torch.float32, 64, lambda amax, outer: torch.where(amax == 0, 1.0, amax)
        ),
        Scale(
            "outer_scale", torch.float32, 0, lambda amax, outer: torch.where(amax == 0, 1.0, amax)
        ),
    )
    two = Encoding("int8_two_levels", INT8, scales)
    with known(two):
        g = torch.Generator().manual_seed(0)
        gate_up, down = (
            quantize(torch.randn(*shape, generator=g), encoding=two)
            for shape in ((3, 2 * I, H + 32), (3, H + 32, I))
        )
        x, ids, w = (
            torch.randn(5, H + 32, generator=g),
            torch.tensor([[0, 2]] * 5),
            torch.rand(5, 2, generator=g),
        )
        module = Experts(gate_up, down)
        parts = (
            "gate_up_proj",
            "gate_up_proj_scale",
            "gate_up_proj_super_scale",
            "gate_up_outer_scale",
        )
        assert [*module.state_dict()] == [
            *parts,
            *(name.replace("gate_up", "down") for name in parts),
        ]
        with options.override(target="reference"):
            want = ops.fused_experts(x, ids, w, list(gate_up), list(down), weight_format=two.name)
            assert module(x, ids, w).equal(want)
            other = Experts(*(q.of(torch.zeros_like(t) for t in q) for q in (gate_up, down)))
            other.load_state_dict(module.state_dict())
            assert other(x, ids, w).equal(want)


@pytest.mark.parametrize(
    ("header", "change", "sentence"),
    [
        (
            "int4.h",
            ("bf16, 32", "bf16, 24"),
            "sixteen elements of a row share each of their scales",
        ),
        (
            "mxfp4.h",
            ("BLOCK = 32", "BLOCK = 64"),
            "the kernels for e2m1 codes read block scales of 16 or 32 of them",
        ),
    ],
)
def test_readers_say_what_they_need(header, change, sentence):
    readers.register_reader(
        "wrong", (readers.KERNELS / "weights" / header).read_text().replace(*change)
    )
    try:
        with pytest.raises(BuildError, match=f"static assertion failed: {sentence}"):
            build.library(readers.library_source("generic", "wrong"))
    finally:
        readers.unregister_reader("wrong")


def test_the_built_in_readers_stay():
    with pytest.raises(UnsupportedError, match="the CPU already has a reader of mxfp4"):
        readers.register_reader("mxfp4", READER)
