"""One layer of Qwen3-30B-A3B's experts on the CPU: ours, torch's bf16 products and KTransformers' kernels, in one process.

    python benchmarks/cpu_layers.py [--threads 1 2 4 8 16] [--tokens 1 4 16 64 256 1024] [--peers] [--repeats 7] [--no-page]

cpu_peers.py says how to install KTransformers' kernels (--peers). All take the same weights, activations and routings; each call has
its own routing, calls go round `layers` copies of the weights, which no cache holds. Results are compared with float64 first.
Contenders take turns: a pause, in which a peer's threads stop spinning; a call of one token, which wakes them; then the calls that are
measured. For each number of threads there is a table, of the median of the turns and the spread as (longest - shortest) / median, with
the bandwidth that the loop of fusion_moe/runtime/bandwidth.cpp reads with. Times are CPU time for one thread (of the calling one and of
the peer's worker, not of its thread that spins meanwhile), wall time for more. With GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the
environment the peer's weights are on large pages, as ours are. The tables go into docs/performance.md.
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
from typing import Any

import torch
from cpu_moe import bf16_layer
from cpu_peers import KtKernel, Layer
from page import put
from torch import Tensor
from torch.nn.functional import linear, silu

import fusion_moe
from fusion_moe.encodings import MXFP4, NVFP4, Encoding, Quantized, dequantize, quantize
from fusion_moe.runtime import bandwidth, isa, pages

HIDDEN, INTERMEDIATE, EXPERTS, SLOTS = 2048, 768, 128, 8
PAUSE = 0.1  # s; the threads of kt-kernel spin for up to 0.05
CHECKED = 64  # tokens
DISTINCT = 8  # experts whose weights differ; the others have theirs
ONE_BY_ONE = 4  # tokens, at most, for which torch computes a product for each expert
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
        each = [quantize(torch.randn(n, k) / k**0.5, encoding=encoding) for _ in range(DISTINCT)] * (EXPERTS // DISTINCT)
        return each[0].of(pages.on_large_pages(torch.stack(parts)) for parts in zip(*each, strict=True))

    return matrices(2 * INTERMEDIATE, HIDDEN), matrices(HIDDEN, INTERMEDIATE)


def ours(weights: Weights) -> Layer:
    """The operation that nn.Experts calls, on a copy of the weights."""
    gate_up, down = ([pages.empty(part.shape, part.dtype).copy_(part) for part in q] for q in weights)
    return lambda x, ids, w: torch.ops.fusion_moe.fused_experts(x, ids, w, gate_up, down, weight_format=weights[0].encoding.name)


def in_torch(weights: Weights) -> Layer:
    """The layer by torch's products of the weights in bf16, eagerly."""
    gate_up, down = (torch.stack([dequantize(q.of(parts), torch.bfloat16) for parts in zip(*q, strict=True)]) for q in weights)
    return lambda x, ids, w: (one_by_one if len(x) <= ONE_BY_ONE else bf16_layer)(x, ids, w, gate_up, down)


def one_by_one(x: Tensor, ids: Tensor, w: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The layer in torch for few tokens: a product for each expert that has some."""
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token], gate_up[expert]).chunk(2, -1)
        y.index_add_(0, token, linear(silu(gate) * up, down[expert]) * w[token, slot, None].to(x.dtype))
    return y


def contenders(weights: Mapping[Encoding, Weights], layers: int) -> list[Contender]:
    """Those that run on any number of threads."""
    first, given = next(iter(weights.items()))
    mine = [Contender(f"fusion_moe, {e.name}", e, [ours(w) for _ in range(layers)]) for e, w in weights.items()]
    return [*mine, Contender("torch, bf16", first, [in_torch(given) for _ in range(layers)])]


def peers(kt: KtKernel, weights: Mapping[Encoding, Weights], layers: int) -> tuple[list[Contender], list[str]]:
    """Those of a pool of threads that run here; the names of those that do not."""
    found, missing = list[Contender](), list[str]()
    int8 = "AMX" if kt.variant == "amx" else "AVX-512"
    for name, kernel, encoding, make, most in (
        ("nvfp4, AVX2", "AVX2MXFP4_MOE", NVFP4, kt.fp4, 0.01),
        ("mxfp4, AVX-512", "AMXFP4_KGroup_MOE", MXFP4, kt.fp4, 0.01),
        ("mxfp4, AVX2", "AVX2MXFP4_MOE", MXFP4, kt.fp4, 0.01),
        (f"AMXINT4, {int8}", "AMXInt4_MOE", NVFP4, kt.int4, 0.35),  # 4 bits for each of three weights, one scale a row
    ):
        if encoding not in weights:
            continue
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


Checks = Mapping[Encoding, tuple[tuple[Tensor, ...], Tensor]]  # a call, and what it returns


def check(found: Sequence[Contender], checks: Checks) -> None:
    """Sets the error of each: the norm of the difference over that of the result. ValueError for more than it may have."""
    for c in found:
        call, want = checks[c.of]
        for layer in c.copies:
            c.error = float((layer(*call).double() - want).norm() / want.norm())
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


def of_threads(threads: int, mine: Sequence[Contender], weights: Mapping[Encoding, Weights], checks: Checks, told: Any) -> list[str]:
    """The part of the page for so many threads."""
    torch.set_num_threads(threads)
    memory, kt = bandwidth.of(threads), peer(threads, max(CHECKED, *told.tokens)) if told.peers else None
    more, missing = peers(kt, weights, told.layers) if kt else ([], [])
    found, others = [*mine, *more], Others()
    check(found, checks)
    for tokens in told.tokens:
        measure(clock(kt, threads), found, tokens, told.repeats)
    has_peer = f"; kt-kernel {kt.version} ({kt.variant})" if kt else ""
    about = f"{threads} thread{'s' * (threads > 1)}, reading {memory.bytes_per_second / 1e9:.1f} GB/s; {others}{has_peer}:"
    lines = [about, "", *table(found, missing, told.tokens), ""]
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--formats", nargs="+", choices=("nvfp4", "mxfp4"), default=["nvfp4", "mxfp4"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=2, help="copies of the weights that calls go round")
    parser.add_argument("--peers", action="store_true", help="measure kt-kernel too")
    parser.add_argument("--no-torch", action="store_true", help="leave torch's bf16 products out")
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md as it is")
    told = parser.parse_args()
    torch.manual_seed(0)
    weights = {e: random_weights(e) for e in (NVFP4, MXFP4) if e.name in told.formats}
    pages_of_peer = "large" if "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "") else "small"
    lines = [
        f"{bandwidth.cpu()}, {bandwidth.cpus()} cores, {datetime.date.today()}; fusion_moe {fusion_moe.__version__} ({isa.selected()}),"
        f" torch {torch.__version__}; medians of {told.repeats}; kt-kernel's weights on {pages_of_peer} pages.", "",
    ]  # fmt: skip
    with torch.inference_mode():
        (call,) = calls(CHECKED, 1)
        checks = {encoding: (call, exact(w, *call)) for encoding, w in weights.items()}
        mine = [c for c in contenders(weights, told.layers) if not told.no_torch or not c.name.startswith("torch")]
        for threads in told.threads:
            lines += of_threads(threads, mine, weights, checks, told)
    if not told.no_page:
        print(put(f"kt-kernel, {isa.selected()}", "cpu_layers.py", "\n".join(lines)))


if __name__ == "__main__":
    main()
