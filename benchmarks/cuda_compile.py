"""How long NVRTC takes for the kernels of one layer's experts, by counts of tokens. Needs no GPU,
but the extra `cuda`.

    python benchmarks/cuda_compile.py [--gpu H200] [--model qwen3] [--tokens 1 8 32 128 512 2048]
    python benchmarks/cuda_compile.py --phases [--model qwen3]
    python benchmarks/cuda_compile.py --waits [--model qwen3]      # on a GPU

Each count: its kernels one after the other, and all together as `fusion_moe.preparing` compiles
them, with an empty cache each time. Then all counts together. Kernels that counts share are
compiled once.

--phases: CPU seconds of each kernel that calls of any count need, medians of five compilations, in
NVRTC's phases: the C++ front end, of which a process runs one at a time; NVVM; and ptxas.

--waits: how long calls of 80 counts, in an order that was drawn once, wait on the host, in a
process with an empty cache: by default, without `compile_ahead`, and after `preparing("all")`.
Kernels that came with the package are used: those of layers in tools/build_cubins.py.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from h200_cells import MODELS

import fusion_moe
from fusion_moe import options
from fusion_moe.arch import KNOWN, Arch
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.choose import Choice
from fusion_moe.backends.cuda.launch import KERNELS, Call, build
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.compile import compile_fusion
from fusion_moe.definitions.operations import (
    SPECS,
    bind,
    eager_types,
    fusion_of,
)
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import nvrtc, shipped_cubins
from fusion_moe.runtime.host_memory.bandwidth import cpus
from fusion_moe.runtime.precompile import _one_for_each, run_builds


def codes(e: int, n: int, k: int) -> torch.Tensor:
    """Two a byte."""
    return torch.empty(e, n, k // 2, dtype=torch.uint8)


def scales(e: int, n: int, k: int) -> torch.Tensor:
    """One for 16 elements."""
    return torch.empty(e, n, k // 16, dtype=torch.float8_e4m3fn)


def call_of(model: str) -> Call:
    """All kernels of expert_mlp on weights in the prepared layout, for any count of tokens."""
    m = MODELS[model]
    e, h, i = m.experts, m.hidden, m.intermediate
    with torch.device("meta"):
        parts = [
            part
            for n, k in ((2 * i, h), (h, i))
            for part in (codes(e, n, k), scales(e, n, k), torch.empty(e))
        ]
        x, ids, w = (
            torch.empty(7, h, dtype=torch.bfloat16),
            torch.empty(7, m.slots, dtype=torch.long),
            torch.empty(7, m.slots),
        )
    call = bind(SPECS["expert_mlp"], (x, ids, w, *parts), {"weight_layout": "w16x64"})
    program = compile_fusion(
        fusion_of("expert_mlp", eager_types(call), call.others), TARGETS["cuda"], options.current()
    )
    assert isinstance(program.joined, Call)
    return program.joined


def alone(choice: Choice) -> list[tuple[str, float]]:
    """Seconds of each kernel by itself."""
    found = []
    for kernel in {kernel.text: kernel for kernel in choice.kernels}.values():
        start = time.perf_counter()
        build(kernel, choice.arch)
        found.append((kernel.title, time.perf_counter() - start))
    return found


def together(choices: Iterable[Choice]) -> tuple[int, float]:
    """How many kernels, and seconds for all of them."""
    kernels = {
        kernel.text: (kernel, choice.arch) for choice in choices for kernel in choice.kernels
    }
    start = time.perf_counter()
    run_builds((text, lambda what=what: build(*what)) for text, what in kernels.items())
    return len(kernels), time.perf_counter() - start


def phases(kernel: KernelSource, arch: Arch) -> list[float]:
    """CPU seconds of a kernel's front end, NVVM and ptxas, once: those of the thread, divided as
    NVRTC's clock divides them.
    """
    with tempfile.TemporaryDirectory() as folder, options.override(cache_dir=folder):
        report, headers = Path(folder, "phases.csv"), nvrtc.headers(KERNELS)
        flags, start = (f"--time={report}",), time.thread_time()
        nvrtc.build(kernel.text, name=kernel.name, arch=arch.nvrtc, headers=headers, flags=flags)
        seconds = time.thread_time() - start
        _, *rows = csv.reader(report.read_text().splitlines())
    of_clock = [float(row[2]) for row in rows]
    return [seconds * part / sum(of_clock) for part in of_clock]


def all_phases(call: Call, symbol: str, arch: Arch) -> None:
    """Prints the phases of all kernels that calls of any count need."""

    def choice(tokens: int) -> Choice:
        return call.choose({symbol: tokens}, arch)

    counts = _one_for_each(lambda n: frozenset(kernel.text for kernel in choice(n).kernels))
    kernels = {kernel.text: kernel for n in counts for kernel in choice(n).kernels}
    total = [0.0, 0.0, 0.0]
    for kernel in kernels.values():
        runs = [phases(kernel, arch) for _ in range(5)]
        parts = [statistics.median(run[i] for run in runs) for i in range(3)]
        total = [a + b for a, b in zip(total, parts, strict=True)]
        print(kernel.title, *(f"{part:.3f}" for part in parts), flush=True)
    print(
        f"{len(kernels)} kernels, NVRTC {nvrtc.version()}: {sum(total):.1f} s of one CPU, of which "
        + ", ".join(
            f"{part / sum(total):.0%} {name}"
            for name, part in zip(("front end", "NVVM", "ptxas"), total, strict=True)
        )
    )


WAYS: dict[str, dict[str, bool]] = {
    "default": {},
    "no compile_ahead": {"compile_ahead": False},
    "preparing": {"compile_ahead": False},
}
_PAUSE = 0.05  # seconds between calls
_SHOWN = 0.02  # of a wait


def waits(model: str, way: str) -> None:
    """Prints how long calls of new counts wait, in this process."""
    m, drawn = MODELS[model], random.Random(0)
    counts = drawn.sample(range(1, 200), 40) + drawn.sample(range(200, 8192), 40)
    drawn.shuffle(counts)
    experts = NVFP4Experts.from_float(
        *(
            torch.randn(m.experts, n, k, device="cuda", dtype=torch.bfloat16)
            for n, k in ((2 * m.intermediate, m.hidden), (m.hidden, m.intermediate))
        )
    )
    x = torch.randn(max(counts), m.hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(len(x), m.experts, device="cuda").topk(m.slots).indices
    w = torch.rand(len(x), m.slots, device="cuda")
    experts(x[:0], ids[:0], w[:0])  # puts weights in order
    times = []
    gc.disable()  # one of all of torch's objects takes 0.1 s
    with options.override(**WAYS[way]), torch.inference_mode():
        if way == "preparing":
            with fusion_moe.preparing("all"):
                experts(x[:8], ids[:8], w[:8])
        for n in counts:
            start = time.perf_counter()
            experts(x[:n], ids[:n], w[:n])
            times.append((time.perf_counter() - start, n))
            torch.cuda.synchronize()
            time.sleep(_PAUSE)
    later = sorted(times[1:], reverse=True)
    shown = ", ".join(f"{n} tokens {1e3 * t:.0f} ms" for t, n in later if t > _SHOWN)
    print(
        f"{way}: first call ({times[0][1]} tokens) {times[0][0]:.2f} s, all others "
        f"{sum(t for t, _ in later):.2f} s, the longest {later[0][0]:.2f} s; over "
        f"{1e3 * _SHOWN:.0f} ms: {shown or 'none'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="H200", choices=[arch.name for arch in KNOWN.values()])
    parser.add_argument("--model", default="qwen3", choices=list(MODELS))
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--waits", nargs="?", const="all", choices=["all", *WAYS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 2048])
    asked = parser.parse_args()
    if asked.waits == "all":
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--model", asked.model, "--waits", way]
                environment = os.environ | {"FUSION_MOE_CACHE_DIR": folder}
                subprocess.run(command, env=environment, check=True)
        return
    if asked.waits:
        waits(asked.model, asked.waits)
        return
    shipped_cubins.ARCHIVE = Path(os.devnull)  # what came with the package takes no time
    arch: Arch = next(arch for arch in KNOWN.values() if arch.name == asked.gpu)
    call = call_of(asked.model)
    (symbol,) = call.parts.symbols
    if asked.phases:
        all_phases(call, symbol, arch)
        return
    choices = {tokens: call.choose({symbol: tokens}, arch) for tokens in asked.tokens}
    for tokens, choice in choices.items():
        with tempfile.TemporaryDirectory() as folder, options.override(cache_dir=folder):
            kernels = alone(choice)
        with tempfile.TemporaryDirectory() as folder, options.override(cache_dir=folder):
            _, seconds = together([choice])
        longest = max(kernels, key=lambda kernel: kernel[1])
        total = sum(s for _, s in kernels)
        print(
            f"{tokens} tokens: {len(kernels)} kernels, {total:.1f} s one by one, {seconds:.1f} "
            f"together; {longest[0]} {longest[1]:.1f} s"
        )
    with tempfile.TemporaryDirectory() as folder, options.override(cache_dir=folder):
        count, seconds = together(choices.values())
    print(f"all {len(choices)} counts: {count} kernels, {seconds:.1f} s together, {cpus()} CPUs")


if __name__ == "__main__":
    main()
