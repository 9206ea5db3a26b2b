"""Where the time of one token goes on the CPU, by threads: a layer of Qwen3-30B-A3B's size, NVFP4
weights, calls in C++ alone.

    python benchmarks/cpu_one_token.py [--threads 1,2,4,8,16] [--rounds 3] [--other DIR]

In turns in one process, each call with experts that no call before it had, until all copies of the
weights have had their turn:

    reading        a loop that reads these experts' weights and does nothing else
                   (fusion_moe/runtime/host_memory/bandwidth.cpp)
    ours           the program
    no arithmetic  the program, but that codes are only added up: its loops, waiting and reading
    no memory      the program, but that each expert's rows are 32 of the first one's, which caches
                   hold: its loops, waiting and arithmetic
    other          the program with the headers of another folder (--other), as that of an earlier
                   version

These are made of fusion_moe/backends/cpu/kernels by replacing lines. So is a program whose threads
note the time stamp counter when they come into the region, when they get a work tile, and when they
leave a loop: how long each loop takes, what is between loops, and how long threads have nothing to
do before its end. Microseconds, medians.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_moe import MODELS, Reading, copied, random_weights
from torch import Tensor

from fusion_moe import options
from fusion_moe.backends import TARGETS, emit
from fusion_moe.backends.cpu import join, readers
from fusion_moe.compile import lower
from fusion_moe.definitions import operations as op_definitions
from fusion_moe.encodings import NVFP4
from fusion_moe.runtime import build, isa
from fusion_moe.runtime.host_memory import bandwidth

MODEL, COPIES = MODELS["qwen3"], 3
Edit = tuple[str, str, str]  # of a header: what it says, what it shall say
Call = tuple[list[Tensor], Tensor, int]  # inputs of the program, experts, which copy of the weights

NO_ARITHMETIC: tuple[Edit, ...] = (
    (
        "avx512_vnni.h",
        "const __m512 sums = products<DIGITS>(_mm512_loadu_si512(codes), _mm512_loadu_si512(codes "
        "+ 64), run);",
        "const __m512 sums = _mm512_cvtepi32_ps(_mm512_xor_si512(_mm512_loadu_si512(codes), "
        "_mm512_loadu_si512(codes + 64)));",
    ),
    (
        "avx512.h",
        "add(codes, x + at / 128 * (MAX_ROWS * Run::STEP), scales, part, sum);\n                "
        "}\n                if",
        "for (auto& row : sum) row[0] += _mm512_cvtepi32_ps(_mm512_xor_si512(codes[0][0], "
        "codes[WEIGHT_ROWS - 1][1]));"
        "\n                }\n                if",
    ),
)
NO_MEMORY: tuple[Edit, ...] = (
    (
        "e2m1.h",
        "const i64 n = row(i);\n            c.codes[i]",
        "const i64 n = row(i) % 32;\n            c.codes[i]",
    ),
    (
        "e2m1.h",
        "const u8* codes = codes_of(p, g);\n        const u8* scales = scales_of(p, g);\n  "
        "      for",
        "const u8* codes = codes_of(p, 0);\n        const u8* scales = scales_of(p, 0);\n   "
        "     for",
    ),
)

BEGIN, CAME, LOOP, DONE, ALL_DONE, TILE, LEFT, END = range(8)  # what a mark says
THREADS, MARKS = 256, 1024  # of a trace, at most
MARKED: tuple[Edit, ...] = (
    (
        "team.h",
        "namespace {\n\n// What loops",
        f"""\
#include <x86intrin.h>
extern "C" int omp_get_thread_num();
struct Trace {{
    struct {{ long long count, at[{MARKS}]; int what[{MARKS}]; }} of[{THREADS}];
    void mark(int what) {{
        auto& own = of[omp_get_thread_num()];
        if (own.count == {MARKS}) return;
        own.at[own.count] = (long long)__rdtsc(), own.what[own.count++] = what;
    }}
}};

namespace {{

// What loops""",
    ),
    (
        "team.h",
        "    long long next() {\n",
        f"    Trace* trace = nullptr;\n    long long next() {{\n        trace->mark({TILE});\n",
    ),
    (
        "team.h",
        "        Team team(threads);\n",
        f"""\
        Team team(threads);
        Trace* const trace = team.items_.trace = last_trace();
        for (auto& own : trace->of) own.count = 0;
        trace->mark({BEGIN});
        struct Last {{ Trace* trace; ~Last() {{ trace->mark({END}); }} }} last{{trace}};
""",
    ),
    (
        "team.h",
        "    int threads() const",
        "    static Trace* last_trace() { static Trace* const made = new Trace(); return "
        "made; }\n   "
        " int threads() const",
    ),
    ("team.h", "#pragma omp master\n", f"            trace->mark({CAME});\n#pragma omp master\n"),
    (
        "team.h",
        "        items_.reset(count);\n",
        f"        items_.reset(count);\n        items_.trace->mark({LOOP});\n",
    ),
    (
        "team.h",
        "return work(items_);",
        f"return work(items_), items_.trace->mark({DONE}), items_.trace->mark({ALL_DONE});",
    ),
    (
        "team.h",
        "        gate_.fetch_sub(OPEN",
        f"        items_.trace->mark({DONE});\n        gate_.fetch_sub(OPEN",
    ),
    ("team.h", "!= 0;) wait();\n", f"!= 0;) wait();\n        items_.trace->mark({ALL_DONE});\n"),
    (
        "team.h",
        "                work_(context_, items_);\n",
        f"                work_(context_, items_);\n                items_.trace->mark({LEFT});\n",
    ),
)


class _Trace(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_longlong),
        ("at", ctypes.c_longlong * MARKS),
        ("what", ctypes.c_int * MARKS),
    )


@dataclass
class Variant:
    """run: of the C++, as the program's own library has it. seconds: of calls."""

    run: Callable[[bytes, bytes, int], int]
    library: ctypes.CDLL
    seconds: list[float] = field(default_factory=list)


class Layer:
    """The program of a layer for one token, and its weights several times."""

    def __init__(self) -> None:
        given = random_weights(NVFP4)
        self.weights = [copied(given) for _ in range(COPIES)]
        (inputs, _, _), *_ = self.calls()
        x, ids, w, *parts = inputs
        call = op_definitions.bind(
            op_definitions.SPECS["fused_experts"],
            (x, ids, w, parts[: len(parts) // 2], parts[len(parts) // 2 :]),
            {"weight_format": "nvfp4"},
        )
        self._fusion = op_definitions.fusion_of(
            "fused_experts", op_definitions.eager_types(call), call.others
        )
        lowered = lower(self._fusion, TARGETS["cpu"], options.current())
        _, joined = join(
            lowered.stages[-1][1], tuple(emit(s, TARGETS["cpu"]) for s in lowered.segments)
        )
        assert joined is not None
        self._joined = joined

    def calls(self) -> Iterator[Call]:
        """A token for each eight experts of each copy of the weights."""
        generator = torch.Generator().manual_seed(1)
        for copy, (gate_up, down) in enumerate(self.weights):
            for ids in torch.randperm(MODEL.experts, generator=generator).view(-1, 1, MODEL.slots):
                x = torch.randn(1, MODEL.hidden, generator=generator).bfloat16()
                yield (
                    [
                        x,
                        ids.contiguous(),
                        torch.full((1, MODEL.slots), 1 / MODEL.slots),
                        *gate_up,
                        *down,
                    ],
                    ids,
                    copy,
                )

    def variant(
        self, edits: Sequence[Edit], folder: Path = readers.KERNELS, more: str = ""
    ) -> Variant:
        """The program of edited headers. ValueError if one does not say what is to be replaced."""
        tier, library = isa.selected(), self._joined.library
        with tempfile.TemporaryDirectory() as scratch:
            kernels = Path(scratch) / "kernels"
            shutil.copytree(folder, kernels)
            for name, old, new in edits:
                text = (kernels / name).read_text(encoding="utf-8")
                if old not in text:
                    raise ValueError(f"{name} does not say {old!r} any more")
                (kernels / name).write_text(text.replace(old, new), encoding="utf-8")
            segments = build.load(
                library.text + more, name="segments", tier=tier, include=[kernels]
            )
            products = []
            for source in library.sources:
                assert source.product is not None
                text = readers.library_source(tier, *source.product).text
                product = build.load(
                    text, name=f"product_{source.product[0]}", tier=tier, include=[kernels]
                ).product
                products.append(ctypes.cast(product, ctypes.c_void_p))
        table, entry = (ctypes.c_void_p * len(products))(*products), segments.run
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        return Variant(
            lambda pointers, sizes, threads: entry(pointers, sizes, table, threads), segments
        )

    def time(self, variant: Variant, call: Call, threads: int) -> float:
        """Seconds of a call's C++."""
        seconds = 0.0

        def entry(pointers: bytes, sizes: bytes) -> int:
            nonlocal seconds
            start = time.perf_counter()
            bad = variant.run(pointers, sizes, threads)
            seconds = time.perf_counter() - start
            return bad

        arrays: Any = self._joined._arrays
        assert arrays.call(entry, call[0], dict.fromkeys(self._fusion.symbols, 1)) is not None
        return seconds


def in_turns(
    layer: Layer, variants: Mapping[str, Variant], threads: int, rounds: int
) -> dict[str, float]:
    """Microseconds of reading and of each variant."""
    memory, calls, read = bandwidth.of(threads), list(layer.calls()), list[float]()
    readings = [Reading(layer.weights[copy], memory).of(ids) for _, ids, copy in calls]
    for i in range(1 + rounds):
        for variant in variants.values():
            found = [layer.time(variant, call, threads) for call in calls]
            variant.seconds = [*variant.seconds, *found] if i > 1 else found
        for reading in readings:
            start = time.perf_counter()
            reading()
            read.append(time.perf_counter() - start)
    return {
        "reading": 1e6 * median(read[len(readings) :]),
        **{name: 1e6 * median(v.seconds) for name, v in variants.items()},
    }


def ticks_per_us(library: ctypes.CDLL) -> float:
    """Of the time stamp counter."""
    library.ticks.restype = ctypes.c_longlong
    start, first = time.perf_counter(), library.ticks()
    time.sleep(0.1)
    return float((library.ticks() - first) / (time.perf_counter() - start) / 1e6)


def timeline(layer: Layer, variant: Variant, threads: int) -> dict[str, float]:
    """Microseconds of a call's parts."""
    variant.library.trace.restype, found = ctypes.c_void_p, dict[str, list[float]]()
    # those without: rows of no group
    per_us, names = ticks_per_us(variant.library), ("gate and up", "", "down", "", "combine")
    for call in layer.calls():
        layer.time(variant, call, threads)
        traces = ctypes.cast(variant.library.trace(), ctypes.POINTER(_Trace))
        each = [[(t.at[i] / per_us, t.what[i]) for i in range(t.count)] for t in traces[:threads]]

        def times(what: int, marks: Sequence[tuple[float, int]] = each[0]) -> list[float]:
            return [at for at, mark in marks if mark == what]

        (begin,), (end,), last = times(BEGIN), times(END), 0.0
        parts = {
            "all threads are there": max(
                (at for marks in each for at in times(CAME, marks)), default=begin
            )
            - begin
        }
        for name, start, own, stop in zip(
            names, times(LOOP), times(DONE), times(ALL_DONE), strict=True
        ):
            if name:
                parts[f"before {name}"], parts[name] = start - (last or begin), stop - start
                left = [
                    own,
                    *(
                        at
                        for marks in each[1:]
                        for at in times(LEFT, marks)
                        if start < at <= stop + 1
                    ),
                ]
                idle = sum(stop - min(at, stop) for at in left) + (threads - len(left)) * (
                    stop - start
                )
                parts[f"idle in {name}"] = idle / threads
                last = stop
        parts["the end"] = end - last
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8, 16]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--other", type=Path, help="a folder of headers, as fusion_moe/backends/cpu/kernels"
    )
    told = parser.parse_args()
    torch.manual_seed(0)
    layer = Layer()
    wanted: dict[str, Sequence[Edit]] = {
        "ours": (),
        "no arithmetic": NO_ARITHMETIC,
        "no memory": NO_MEMORY,
    }
    with ThreadPoolExecutor() as pool:
        variants = dict(zip(wanted, pool.map(layer.variant, wanted.values()), strict=True))
    if told.other:
        variants["other"] = layer.variant((), told.other)
    more = (
        '\nextern "C" void* trace() { return Team::last_trace(); }\nextern "C" long long '
        "ticks() { return (long long)__rdtsc(); }\n"
    )
    marked = layer.variant(MARKED, more=more)
    print(f"{bandwidth.cpu()}, {isa.selected()}, {bandwidth.cpus()} CPUs")
    gigabytes = MODEL.slots * 3 * MODEL.hidden * MODEL.intermediate * 0.5625 / 1e3
    for threads in (t for t in told.threads if t <= bandwidth.cpus()):
        found = in_turns(layer, variants, threads, told.rounds)
        print(
            f"\n{threads} threads: "
            + ", ".join(
                f"{name} {us:.0f} us ({gigabytes / us:.1f} GB/s)" for name, us in found.items()
            )
        )
        print(
            "  "
            + ", ".join(
                f"{name} {us:.1f}" for name, us in timeline(layer, marked, threads).items()
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
