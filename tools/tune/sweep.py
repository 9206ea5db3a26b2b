"""Times the kernels of products on the GPU that is here: each way to compute a product, captured in
a CUDA graph, in turns.

A call reads the weights of a layer that the calls before it did not read, and other routings: they
rotate. Products are those of two layers' halves: gate and up with SwiGLU, down. Rows are sorted,
and come in the order in which the kernels read them, as from the product before: what puts them in
that order is not timed. The grid is of rows of a group on average, each whole number of them and
then steps of a tenth, and of the tokens that have fewer.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import torch
from timings import Cell, Timings, way
from torch import Tensor

from fusion_moe.arch import Arch
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda import one_group
from fusion_moe.backends.cuda.grouped_mm import ByVariants
from fusion_moe.backends.cuda.heuristics import (
    AUTO,
    Chosen,
    SizeClass,
    choose_from,
)
from fusion_moe.backends.cuda.launch import Launch, build
from fusion_moe.backends.cuda.product import Product
from fusion_moe.backends.cuda.table import ALWAYS, Table, kind_of
from fusion_moe.backends.cuda.variants import Matrices
from fusion_moe.compile import lower
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.layouts import W16X64
from fusion_moe.options import Options
from fusion_moe_translators.moe import grouped_mm, scaled_swiglu

FEW_TOKENS = (1, 2, 3, 5, 8, 12, 17, 24)
# rows of a group: each number of them, then so much more each time, up to the most
_EACH, _STEP, _MOST = 32, 1.1, 320
_MANY = (450, 600, 800, 1100, 1500, 2048, 3000, 4096, 8192)  # rows of one group, too
ROUTINGS = ("uniform", "zipf")
LAYOUTS = ("w16x64", "linear")
_ZIPF = 1.2
_GRAPH_SECONDS, _MOST_CALLS = 5e-4, 16
_ROUTED = 4  # routings, to rotate over
_FLOPS = 8e14  # a second
# of weights, to rotate over: several times what a cache holds
_ENOUGH_BYTES, _MOST_COPIES = 2e8, 128
_AT_ONCE = 2**28  # elements of a weight that change their layout at once
# rows of a group, in heights of an M tile, for which a kernel may be the fastest
_LOWEST, _HIGHEST = 1 / 5, 3
_HIGHEST_OF_ONE = 24  # the same of one group, for small M; of it others are all timed
_SLOW = 1.25  # of the fastest's first time: such ways are not timed again


@dataclass(frozen=True)
class Layer:
    """Experts, slots of a token, hidden and intermediate features."""

    name: str
    experts: int
    slots: int
    hidden: int
    intermediate: int

    @property
    def routings(self) -> tuple[str, ...]:
        """Those that differ."""
        return ROUTINGS if self.experts > 1 else ROUTINGS[:1]


LAYERS = (
    Layer("qwen3", 128, 8, 2048, 768),
    Layer("gpt-oss", 128, 4, 2880, 2880),
    Layer("mixtral", 8, 2, 4096, 14336),
    Layer("scout", 16, 1, 5120, 8192),
    Layer("deepseek", 256, 8, 7168, 2048),
)
OTHERS = (  # that no table is fitted to
    Layer("qwen3-235b", 128, 8, 4096, 1536),
    Layer("olmoe", 64, 8, 2048, 1024),
    Layer("gpt-oss-20b", 32, 4, 2880, 2880),
    Layer("deepseek-ep8", 32, 1, 7168, 2048),
)
DENSE = (  # one group: projections of attention, shared experts, dense layers
    Layer("dense-256", 1, 1, 2048, 256),
    Layer("dense-4096", 1, 1, 2048, 4096),
    Layer("deepseek-shared", 1, 1, 7168, 2048),
    Layer("qwen3-8b", 1, 1, 4096, 12288),
    Layer("llama-70b", 1, 1, 8192, 28672),
)
PARTS = ("gate_up", "down")


class Forced(ByVariants):
    """A product by given kernels, whose rows come as these read them."""

    def __init__(self, product: ByVariants, classes: tuple[SizeClass, ...]):
        vars(self).update(vars(product))  # the same source: to make it again takes long
        self._classes = classes

    def choose(self, sizes: object, arch: Arch, variant: str = AUTO) -> Chosen:
        """Those."""
        chosen = Chosen(self._classes)
        return replace(chosen, rows_given=self.needs_reordering(chosen.activation_reader))


@dataclass(frozen=True)
class Task:
    """A product that is swept. [N, K]: of its matrices."""

    layer: Layer
    part: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.layer.name} {self.part}"

    @property
    def n(self) -> int:
        return 2 * self.layer.intermediate if self.part == "gate_up" else self.layer.hidden

    @property
    def k(self) -> int:
        return self.layer.hidden if self.part == "gate_up" else self.layer.intermediate

    @property
    def layer_bytes(self) -> int:
        """Of its weights in NVFP4."""
        return self.layer.experts * self.n * self.k * 9 // 16

    def floor(self, rows: int, arch: Arch) -> float:
        """Seconds to read the weights of groups that have a row, or to multiply."""
        read = (
            _touched(self.layer.experts, rows)
            / self.layer.experts
            * self.layer_bytes
            / arch.memory_bandwidth
        )
        return max(read, 2 * rows * self.n * self.k / _FLOPS)

    def product(self) -> tuple[ByVariants, list[int]]:
        """Its source, and which of (activations, codes, block scales, decode scales, ends) are its
        inputs, in order.
        """
        fd, g, n, k = FusionDefinition(), self.layer.experts, self.n, self.k
        a = fd.define_tensor(shape=[-1, k], dtype="bf16")
        shapes = ((g, n, k // 2), "u8"), ((g, n, k // 16), "f8e4m3"), ((g,), "f32")
        weight = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in shapes]
        offs = fd.define_tensor(shape=[g], dtype="i32")
        y = grouped_mm(fd, a, weight, offs, weight_format="nvfp4", weight_layout=self.layout)
        fd.add_output(scaled_swiglu(fd, y) if self.part == "gate_up" else y)
        lowered = lower(fd.fusion(), TARGETS["cuda"], Options())
        (segment,) = lowered.segments
        source = segment.plan.work
        assert isinstance(source, Product), segment.plan.why
        assert source.by_variants
        inputs = lowered.stages[-1][1].inputs
        return source.by_variants, [inputs.index(v) for v in segment.fusion.inputs]


def grid(layer: Layer) -> list[int]:
    """The counts of tokens of a layer's cells."""
    averages, found = (
        [*range(1, _EACH + 1)],
        {t for t in FEW_TOKENS if t * layer.slots < layer.experts},
    )
    while averages[-1] < _MOST:
        averages.append(averages[-1] * _STEP)
    averages += _MANY if layer.experts == 1 else ()
    return sorted(found | {round(average * layer.experts / layer.slots) for average in averages})


# What is timed ------------------------------------------------------------------------------------


def ways(table: Table, of: Matrices, rows: int, arch: Arch) -> list[tuple[SizeClass, ...]]:
    """What may be the fastest: the kernels of the table's sets by themselves, size classes of its
    regimes, what it chooses; of one group, the kernels of its model.
    """
    if one_group.admits(of):
        near = [
            v
            for v in one_group.VARIANTS
            if v.fits(of, arch) and (rows <= v.tile_m * _HIGHEST_OF_ONE or v.persistent)
        ]
        return [(SizeClass(v),) for v in near]
    regimes, average = tuple(table.regimes(of)), rows / _touched(of.groups, rows)
    variants = [
        v for v in dict.fromkeys(v for r in regimes for v in r.variants) if v.fits(of, arch)
    ]
    highest = max(v.tile_m for v in variants)
    near = [
        v
        for v in variants
        if v.tile_m * _LOWEST <= max(average, 1.6)
        and (average <= v.tile_m * _HIGHEST or v.tile_m == highest)
    ]
    found = [choose_from(table, rows, of, arch), *((SizeClass(v),) for v in near)]
    for regime in regimes:
        if (
            regime.size_classes
            and regime.max_average / 6 <= rows / of.groups <= regime.max_average * 2
        ):
            only = replace(
                table, **{kind_of(of): (replace(regime, max_average=ALWAYS), regimes[-1])}
            )
            found.append(choose_from(only, rows, of, arch))
    return list(dict.fromkeys(found))


def _touched(groups: int, rows: int) -> float:
    """Groups that have a row, if rows pick them evenly."""
    return groups * (1 - (1 - 1 / groups) ** rows)


class Swept:
    """A product whose kernels are compiled while others are timed."""

    def __init__(
        self, task: Task, tokens: Sequence[int], table: Table, arch: Arch, pool: ThreadPoolExecutor
    ):
        self.task, (product, self.order) = task, task.product()
        self.matrices = product.matrices
        self.symbol = product.fusion.symbols[0]
        self.ways = {t: ways(table, self.matrices, t * task.layer.slots, arch) for t in tokens}
        self.launches = {
            classes: Launch(Forced(product, classes))
            for found in self.ways.values()
            for classes in found
        }
        texts = {}
        for classes, launch in self.launches.items():
            having = [t for t in tokens if classes in self.ways[t]]
            # between them kernels change once at most, where blocks become more than a wave
            for t in (having[0], having[-1]):
                for kernel in launch.choose({self.symbol: t * task.layer.slots}, arch).kernels:
                    texts[kernel.text] = kernel
        self.kernels = len(texts)
        self._builds: list[Future[object]] = [
            pool.submit(build, kernel, arch) for kernel in texts.values()
        ]

    def wait(self) -> None:
        """Until all are compiled."""
        for built in self._builds:
            built.result()


# Inputs -------------------------------------------------------------------------------------------


def weights(task: Task) -> list[Quantized]:
    """Random ones in the task's layout, so many that calls which rotate over them find none in the
    cache.
    """
    copies = min(_MOST_COPIES, max(2, math.ceil(_ENOUGH_BYTES / task.layer_bytes)))
    return [_weight(task) for _ in range(copies)]


def _weight(task: Task) -> Quantized:
    g, n, k = task.layer.experts, task.n, task.k
    codes = torch.randint(0, 256, (g, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x60, 0x7F, (g, n, k // 16), dtype=torch.uint8, device="cuda").view(
        torch.float8_e4m3fn
    )
    decode = (torch.rand(g, device="cuda") + 0.5) / (600 * math.sqrt(k))
    if task.layout == "w16x64":
        step = max(1, _AT_ONCE // (n * k))
        for some in (slice(start, start + step) for start in range(0, g, step)):
            codes[some], scales[some] = W16X64.pack(codes[some], scales[some], encoding=NVFP4)
    return Quantized(codes, scales, decode, encoding=NVFP4)


def ends(layer: Layer, tokens: int, routing: str, seed: int, device: str = "cuda") -> Tensor:
    """i32[experts]: each token picks different experts, all as likely; or expert i in proportion to
    1 / i^1.2, the same i at all tokens.
    """
    generator = torch.Generator(device).manual_seed(seed)
    # exponential
    score = (
        -torch.rand(tokens, layer.experts, device=device, generator=generator)
        .clamp_min(1e-20)
        .log_()
    )
    if routing == "zipf":
        rank = (
            torch.randperm(
                layer.experts, device=device, generator=torch.Generator(device).manual_seed(7)
            )
            + 1.0
        )
        score *= rank**_ZIPF
    ids = score.topk(layer.slots, largest=False).indices
    return ids.flatten().bincount(minlength=layer.experts).cumsum(0).int()


# Times --------------------------------------------------------------------------------------------


def sweep(
    timings: Timings,
    table: Table,
    tasks: Sequence[Task],
    tokens: Sequence[int] | None,
    seconds: float,
    repeats: int,
    keep: Callable[[Timings], None],
    say: Callable[[str], None],
) -> Timings:
    """The timings with those of cells that are not in them, as far as the time allows: products
    share what is left of it.

    tokens: of all products, in place of their grids. keep: is given the timings after each product.
    """
    deadline, done = time.monotonic() + seconds, {cell.key for cell in timings.cells}
    _raise_clocks()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        swept = [
            Swept(task, tokens or grid(task.layer), table, timings.arch, pool) for task in tasks
        ]
        say(
            f"{timings.arch.name}: {len(swept)} products, {sum(s.kernels for s in swept)} kernels "
            "to compile meanwhile"
        )
        for i, s in enumerate(swept):
            wanted = [
                (t, r)
                for t in s.ways
                for r in s.task.layer.routings
                if (s.task.name, t, r) not in done
            ]
            if wanted and time.monotonic() < deadline:
                s.wait()
                begun = time.monotonic()
                until = begun + (deadline - begun) / (len(swept) - i)
                found = sorted(
                    _cells(s, wanted, timings.arch, repeats, until),
                    key=lambda cell: (cell.tokens, cell.routing),
                )
                timings = replace(timings, cells=(*timings.cells, *found))
                spent, left = time.monotonic() - begun, deadline - time.monotonic()
                say(
                    f"{s.task.name}: {len(found)} of {len(wanted)} cells in {spent:.1f} s, "
                    f"{left:.0f} s left"
                )
                keep(timings)
                torch.cuda.empty_cache()  # of graphs that are gone
        pool.shutdown(cancel_futures=True)
    return timings


def _raise_clocks() -> None:
    """Works for a while: an idle GPU is slow at first."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(1000):
        a = torch.mm(a, a) / 64
    torch.cuda.synchronize()


def _cells(
    s: Swept, wanted: Sequence[tuple[int, str]], arch: Arch, repeats: int, deadline: float
) -> Iterator[Cell]:
    """The cells, every fourth one first: whatever the time allows is spread over all."""
    layer, stored, pool, graphs = (
        s.task.layer,
        weights(s.task),
        torch.cuda.graph_pool_handle(),
        dict[str, torch.cuda.CUDAGraph](),
    )
    for tokens, routing in (cell for first in (0, 2, 1, 3) for cell in wanted[first::4]):
        if time.monotonic() > deadline:
            return
        rows = tokens * layer.slots
        a = torch.randn(rows, s.task.k, device="cuda").bfloat16()
        routed = [ends(layer, tokens, routing, seed) for seed in range(_ROUTED)]
        count = max(
            len(stored), min(_MOST_CALLS, math.ceil(_GRAPH_SECONDS / s.task.floor(rows, arch)))
        )
        given = [(a, *stored[i % len(stored)], routed[i % _ROUTED]) for i in range(count)]
        calls = [[tensors[j] for j in s.order] for tensors in given]
        graphs = {
            way(classes): _captured(s.launches[classes], calls, {s.symbol: rows}, pool)
            for classes in s.ways[tokens]
        }
        us = {name: round(t / count, 3) for name, t in _times(graphs, repeats).items()}
        yield Cell(s.task.name, s.matrices, tokens, rows, routing, us)


@cache
def _stream() -> torch.cuda.Stream:
    """Where all graphs are captured: memory that one has used serves the next."""
    return torch.cuda.Stream()


def _captured(
    launch: Launch,
    calls: Sequence[Sequence[Tensor]],
    sizes: Mapping[str, int],
    pool: tuple[int, int],
) -> torch.cuda.CUDAGraph:
    """The calls, one after the other, in a graph. pool: of memory, which graphs that do not run at
    once share.
    """
    launch(*calls[0], sizes=sizes)  # loads
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(_stream()):  # torch.cuda.graph would empty the cache of memory each time
        graph.capture_begin(pool)
        for call in calls:
            launch(*call, sizes=sizes)
        graph.capture_end()
    return graph


def _times(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Microseconds of each graph: the median of its replays, in turns, so that no one follows the
    same one always; of slow ones, one.
    """
    for graph in graphs.values():
        graph.replay()
    first = _replayed(list(graphs), graphs, 1)
    names = [name for name, (t,) in first.items() if t <= _SLOW * min(first.values())[0]]
    return {
        name: statistics.median(ts)
        for name, ts in (first | _replayed(names, graphs, repeats)).items()
    }


def _replayed(
    names: list[str], graphs: dict[str, torch.cuda.CUDAGraph], repeats: int
) -> dict[str, list[float]]:
    """Microseconds of replays."""
    events = {
        name: [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
        for name in names
    }
    for i in range(repeats):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start, end = events[name][i]
            start.record()
            graphs[name].replay()
            end.record()
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs] for name, pairs in events.items()}
