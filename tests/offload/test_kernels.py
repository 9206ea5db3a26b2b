"""The kernels of offloaded experts on the CPU: which misses they find, how they copy experts, and
how rows go to the worker and back, under ThreadSanitizer.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from dataclasses import astuple

import pytest
import torch
from cover import few
from kernels_on_cpu import SOME, folder
from on_cpu import compiled, library, pointer
from test_cuda_source import needs_nvdisasm, sass, spills

from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.layouts.w16x64 import W16X64
from fusion_moe.offload import launches
from fusion_moe.offload.launches import Parts, Shape
from fusion_moe.offload.split import Constants, split
from fusion_moe.runtime import nvrtc

pytestmark = [pytest.mark.compiler, pytest.mark.once]
__all__ = ["folder"]  # a fixture
E, SPARES, MOST = 24, 6, 96
FIND = f"""
#include "misses.cuh"
extern "C" void find(i64 count, i64 cached, i64 spares, const i64* ids, const i32* tables,
                     const i32* version, Exchange* exchange, Counts* counts, i32* placed,
                     i32* handed, i32* uses, const Costs* costs, i64* error, i32* listed) {{
    static i32 memory[3 * {E} + 2 * {MOST}];
    const Step step{{exchange, counts, placed, handed, uses}};
    const auto found =
        FindMisses<i64>{{count, {E}, cached, spares, ids, tables, version, step, *costs, error}}
            .run(memory);
    for (i32 i = 0; i < found.rows; ++i) listed[i] = found.ids[i];
    listed[found.rows] = found.copied;
}}
"""


def test_misses_are_those_of_the_split(folder):
    find = library(folder, FIND, name="find").find
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    mixed = 0
    for turn in range(400):
        limit, cached = rng.randint(0, SPARES), rng.choice([0, 5, E])
        constants = Constants(*(rng.choice([0, 7, 90, 100, 130, 1000, 10**10]) for _ in range(8)))
        count = rng.randint(0, MOST)
        ids = torch.randint(-1, rng.randint(1, E), (count,), generator=generator)
        tables = torch.full((2, E), -1, dtype=torch.int32)
        version = turn % 2
        for i, expert in enumerate(rng.sample(range(E), cached)):
            tables[version, expert] = i

        def zeros(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(n, dtype=dtype)

        exchange, counts, error = (zeros(n, torch.int64) for n in (4, 8, 1))
        placed, uses, handed, listed = zeros(MOST), zeros(E), zeros(MOST), zeros(MOST + 1)
        costs = torch.tensor(astuple(constants), dtype=torch.int64)
        number = torch.tensor([version], dtype=torch.int32)
        memory = ids, tables, number, exchange, counts, placed, handed, uses, costs, error, listed
        find(*map(ctypes.c_int64, (count, cached, limit)), *map(pointer, memory))

        named = torch.bincount(ids[ids >= 0], minlength=E)
        missed = [e for e in range(E) if named[e] > 0 and tables[version, e] < 0]
        there = int((named > 0).sum()) - len(missed)
        want = split({e: int(named[e]) for e in missed}, constants, limit, limit, there)
        mixed += bool(want.copied and want.computed)
        table = tables[version].clone()
        for i, expert in enumerate(want.copied):
            table[expert] = cached + i
        slots = torch.where(ids < 0, -1, table[ids.clamp(0)])
        assert torch.equal(placed[:count], slots), (turn, want)
        assert torch.equal(uses, named.int())
        rows = [i for i, e in enumerate(ids.tolist()) if e in want.computed]
        assert listed[: len(rows) + 1].tolist() == [*rows, len(want.copied)]
        if rows:
            numbers = [rows.index(i) if i in rows else -1 for i in range(count)]
            assert handed[:count].tolist() == numbers
        assert counts.view(torch.int32)[0] == len(rows)
        assert not exchange.any()
        hits = int(named[tables[version] >= 0].sum())
        rows_copied = int(named[list(want.copied)].sum())
        assert counts[1:7].tolist() == [
            *[1, hits, rows_copied, len(rows), len(want.copied), len(want.computed)]
        ]
        assert error == 0
    assert mixed > 20


TILED = [n for n, e in ENCODINGS.items() if not (e.plain or W16X64.why_not(256, 256, e))]


def test_what_is_not_copied_into_tiles():
    """What resident weights do not lie in either, and numbers, which they have as they are."""
    for name in TILED:
        assert not launches.why_not_tiled(ENCODINGS[name]), name
    for name in ("mxfp8_columns", "fp8_columns", "fp8_columns_f32", "bf16", "f16", "f32"):
        assert name not in TILED
        assert name in launches.why_not_tiled(ENCODINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [*SOME, *few((e for e in TILED if e not in SOME), 0)])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (48, 384), (32, 2176)])
def test_copies_are_in_the_gpus_order(folder, encoding, n, k):
    copy = library(folder, name="experts").copy
    of, g = ENCODINGS[encoding], torch.Generator().manual_seed(0)
    storage = quantize(torch.randn(5, n, max(k, of.multiple), generator=g), of)
    bias = torch.randn(5, n + 3, generator=g).bfloat16()
    tensors = [*storage, bias, bias[:, :n].clone()]
    parts = [*of.parts, None, None]
    slots = [torch.zeros((4, *t.shape[1:]), dtype=t.dtype) for t in tensors]
    shapes = [
        Shape.of(t, part, of.element.tile_order) for t, part in zip(tensors, parts, strict=True)
    ]
    copied = Parts(shapes, [t.data_ptr() for t in tensors], slots)
    experts = [4, 0, 2]
    copy(
        ctypes.c_void_p(copied.address),
        (ctypes.c_longlong * 3)(*experts),
        ctypes.c_int64(3),
        ctypes.c_int64(1),
    )
    want = [*W16X64.pack(*storage, encoding=of), *tensors[-2:]]
    for found, t in zip(slots, want, strict=True):
        assert torch.equal(found[1:].view(torch.uint8), t[experts].view(torch.uint8))
        assert not found[:1].view(torch.uint8).any()


def test_rows_go_to_the_worker_and_back(folder):
    made = compiled(folder, "", "-g", "-fsanitize=thread", name="protocol")
    environment = {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([made], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stderr == ""
    assert done.stdout.split() == ["answered", "agreed", "late", "gone"]
    assert done.returncode == 0


SOURCES = [
    launches.begin_step(torch.int64, torch.float32),
    launches.end_step(torch.bfloat16, torch.float32, 8, 4096),
    *(launches.put_rows(), launches.load()),
]


@needs_nvdisasm
@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_compile_and_keep_all_in_registers(arch):
    for source in SOURCES:
        assert not spills(sass(launches.build(source, arch))), launches.name_of(source)
