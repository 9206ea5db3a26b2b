"""One layer of Qwen3-30B-A3B's experts on the CPU: ours and KTransformers' kernels (cpu_peers.py says how to install them), in one process.

    python benchmarks/cpu_layers.py [--threads N] [--tokens 1 4 16 64 256 1024] [--repeats 7] [--layers 2] [--no-page]

All take the same weights, activations and routings; each call has its own routing, calls go round `layers` copies of the weights, which no
cache holds. Results are compared with float64 first. Contenders take turns: a pause, in which a peer's threads stop spinning; a call of
one token, which wakes them; then the calls that are measured. Tables show the median of the turns, and the spread as (longest - shortest)
/ median. Times are CPU time for one thread (of the calling one and of the peer's worker, not of its thread that spins meanwhile), wall
time for more. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment the peer's weights are on large pages, as ours are. The table
goes into docs/performance.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from cpu_peers import KtKernel, Layer
from page import put
from torch import Tensor
from torch.nn.functional import silu

import fusion_moe
from fusion_moe.encodings import MXFP4, NVFP4, Encoding, Quantized, dequantize, quantize
from fusion_moe.runtime import bandwidth, isa, pages

HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 2048, 768, 128, 8
PAUSE = 0.1  # s; the threads of kt-kernel spin for up to 0.05
CHECKED = 64  # tokens
CALLS = {1: 20, 4: 10, 16: 4}  # tokens: calls of a turn, where one is short
Clock = Callable[[], float]  # seconds
Weights = tuple[Quantized, Quantized]  # gate_up [E, 2I, H], down [E, H, I]


@dataclass
class Contender:
    """copies: the layer, several times. of: whose weights. error: of its result against float64, of which it may have `most`."""

    name: str
    of: Encoding
    copies: list[Layer]
    most: float = 0.01
    error: float = 0.0
    seconds: dict[int, list[float]] = field(default_factory=dict)  # of a call, by tokens: one for each turn


def random_weights(encoding: Encoding) -> Weights:
    """Normal numbers, quantized; on large pages."""

    def matrices(n: int, k: int) -> Quantized:
        each = [quantize(torch.randn(n, k) / k**0.5, encoding=encoding) for _ in range(EXPERTS)]
        return each[0].of(pages.on_large_pages(torch.stack(parts)) for parts in zip(*each, strict=True))

    return matrices(2 * INTERMEDIATE, HIDDEN), matrices(HIDDEN, INTERMEDIATE)


def ours(weights: Weights) -> Layer:
    """The operation that nn.Experts calls, on a copy of the weights."""
    gate_up, down = ([pages.empty(part.shape, part.dtype).copy_(part) for part in q] for q in weights)
    return lambda x, ids, w: torch.ops.fusion_moe.fused_experts(x, ids, w, gate_up, down, weight_format=weights[0].encoding.name)


def contenders(kt: KtKernel | None, weights: Mapping[Encoding, Weights], layers: int) -> tuple[list[Contender], list[str]]:
    """Those that run here; the names of those that do not."""
    found, missing = [Contender(f"fusion_moe, {e.name}", e, [ours(w) for _ in range(layers)]) for e, w in weights.items()], []
    if kt is None:
        return found, missing
    int8 = "AMX" if kt.variant == "amx" else "AVX-512"
    for name, kernel, encoding, make, most in (
        ("nvfp4, AVX2", "AVX2MXFP4_MOE", NVFP4, kt.fp4, 0.01),
        ("mxfp4, AVX-512", "AMXFP4_KGroup_MOE", MXFP4, kt.fp4, 0.01),
        ("mxfp4, AVX2", "AVX2MXFP4_MOE", MXFP4, kt.fp4, 0.01),
        (f"AMXINT4, {int8}", "AMXInt4_MOE", NVFP4, kt.int4, 0.35),  # 4 bits for each of three weights, one scale a row
    ):
        if kt.has(kernel):
            found.append(Contender(f"kt-kernel, {name}", encoding, [make(kernel, *weights[encoding]) for _ in range(layers)], most))
        else:
            missing.append(f"kt-kernel, {name}")
    return found, missing


def calls(tokens: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x bf16 [T, H], ids int64 [T, k], w f32 [T, k] of some calls."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = (torch.rand(tokens, EXPERTS).argsort(1)[:, :SLOTS].contiguous() for _ in range(count))
    return [(x, i, torch.rand(tokens, SLOTS).softmax(-1)) for i in ids]


def exact(weights: Weights, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The layer in float64 -> [T, H], nothing rounded."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate_up, down = (dequantize(q.of(part[expert] for part in q)).double() for q in weights)
        gate, up = (x[token].double() @ gate_up.mT).chunk(2, -1)
        y.index_add_(0, token, (silu(gate) * up) @ down.mT * w[token, slot, None])
    return y


def check(found: Sequence[Contender], weights: Mapping[Encoding, Weights]) -> None:
    """Sets the error of each: the norm of the difference over that of the result. ValueError for more than it may have."""
    (call,) = calls(CHECKED, 1)
    want = {encoding: exact(w, *call) for encoding, w in weights.items()}
    for c in found:
        for layer in c.copies:
            c.error = float((layer(*call).double() - want[c.of]).norm() / want[c.of].norm())
            if not c.error < c.most:
                raise ValueError(f"{c.name}: error {c.error:.3g}, expected less than {c.most}")
        print(f"{c.name}: error {c.error:.2g}", flush=True)


def clock(kt: KtKernel | None, threads: int) -> Clock:
    """CPU time for one thread, wall time for more."""
    if threads > 1:
        return time.perf_counter
    workers = [threading.get_native_id(), *(kt.workers if kt else [])]
    if kt and len(workers) != 2:
        raise ValueError(f"{len(workers) - 1} workers of kt-kernel, expected 1")
    return lambda: sum(time.clock_gettime(~thread << 3 | 6) for thread in workers)  # Linux's number for the clock of a thread


def turn(now: Clock, layers: Iterator[Layer], wake: tuple[Tensor, ...], measured: Sequence[tuple[Tensor, ...]]) -> float:
    """Seconds of a call."""
    time.sleep(PAUSE)
    next(layers)(*wake)
    start = now()
    for call in measured:
        next(layers)(*call)
    return (now() - start) / len(measured)


def measure(now: Clock, found: Sequence[Contender], tokens: int, repeats: int) -> None:
    """Sets their seconds for so many tokens."""
    (wake,), count = calls(1, 1), CALLS.get(tokens, 1)
    layers = [itertools.cycle(c.copies) for c in found]
    for c, each in zip(found, layers, strict=True):
        next(each)(*calls(tokens, 1)[0])  # compiles, takes memory
        c.seconds[tokens] = []
    for _ in range(repeats):
        measured = calls(tokens, count)
        for c, each in zip(found, layers, strict=True):
            c.seconds[tokens].append(turn(now, each, wake, measured))
    print(f"{tokens} tokens:", ", ".join(f"{c.name} {statistics.median(c.seconds[tokens]) * 1e3:.2f} ms" for c in found), flush=True)


class Others:
    """How much of the CPUs' time other programs take, and other machines on the same host, from now on."""

    def __init__(self) -> None:
        self._start = self._now()

    def __str__(self) -> str:
        busy, stolen, own, all_ = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return f"other programs took {max(0.0, busy - own) / all_:.0%} of the CPUs' time, other machines {stolen / all_:.0%}"

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        """Seconds: of all programs, stolen, of this one, of all CPUs."""
        ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _idle, _wait, irq, softirq, stolen = (n / os.sysconf("SC_CLK_TCK") for n in ticks)
        return user + nice + system + irq + softirq, stolen, time.process_time(), time.monotonic() * (os.cpu_count() or 1)


def table(found: Sequence[Contender], missing: Sequence[str], tokens: Sequence[int]) -> list[str]:
    """A row for each contender."""
    mine = {c.of: c for c in found[::-1] if c.name.startswith("fusion_moe")}

    def cell(c: Contender, n: int) -> str:
        here, base = (statistics.median(s.seconds[n]) for s in (c, mine[c.of]))
        ratio = "" if c is mine[c.of] else f" {here / base:.1f}x"
        return f"{here * 1e3:.2f}{ratio} ({(max(c.seconds[n]) - min(c.seconds[n])) / here:.0%})"

    head = ("ms, x ours, (spread)", "error", *(f"{n} token{'s' * (n > 1)}" for n in tokens))
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {c.name} | {c.error:.2g} | {' | '.join(cell(c, n) for n in tokens)} |" for c in found]
    return lines + [f"| {name} | not for this CPU {'| ' * len(tokens)}|" for name in missing]


def peer(threads: int, most_tokens: int) -> KtKernel | None:
    """KTransformers' kernels where they are installed; says why not."""
    try:
        return KtKernel(threads, most_tokens, SLOTS)
    except ImportError as error:
        print(f"peer kt-kernel: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=2, help="copies of the weights that calls go round")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md as it is")
    told = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(told.threads)
    kt, weights = peer(told.threads, max(CHECKED, *told.tokens)), {e: random_weights(e) for e in (NVFP4, MXFP4)}
    with torch.inference_mode():
        found, missing = contenders(kt, weights, told.layers)
        check(found, weights)
        others = Others()
        for tokens in told.tokens:
            measure(clock(kt, told.threads), found, tokens, told.repeats)
    pages_of_peer = "large" if "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "") else "small"
    versions = f"fusion_moe {fusion_moe.__version__} ({isa.selected()})" + (f", kt-kernel {kt.version} ({kt.variant})" if kt else "")
    lines = [
        f"{bandwidth.cpu()}, {bandwidth.cpus()} cores, {told.threads} thread{'s' * (told.threads > 1)}, {datetime.date.today()};"
        f" {versions}, torch {torch.__version__}; medians of {told.repeats}; {others}; kt-kernel's weights on {pages_of_peer} pages.",
        "", *table(found, missing, told.tokens), "",
    ]  # fmt: skip
    print("\n".join(lines))
    if not told.no_page:
        print(put(f"kt-kernel, {isa.selected()}", "cpu_layers.py", "\n".join(lines)))


if __name__ == "__main__":
    main()
