"""The times of a call's programs and the distribution of its rows over groups, recorded while the
call runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from .. import backends, options
from ..backends.cpu import NAME as CPU
from ..compile import compile_fusion
from ..definitions.operations import fp4_as_bytes
from ..definitions.traced import hint
from ..encodings import Quantized, dequantize
from ..errors import Error
from ..frontends.regions import Region
from ..frontends.rewrite import replace_regions
from ..ir import DTYPES, Fusion, Op, Value, made_again
from ..ir.kinds.quantized import linear
from ..ir.text import text
from ..layouts import groups
from ..messages.progress import progress
from ..options import Options
from ..runtime import cuda, isa
from ..runtime.host_memory import bandwidth, pages
from ..runtime.program import Program
from . import cost
from .data import Load, Machine, Measured

REPEATS = 7


class Watch:
    """Takes over the regions of graphs. measure, load: what is recorded about them; watched: the
    regions, in the order found.

    preemptions: how often this process lost a CPU to another one during measurements.
    """

    def __init__(self, switches: Options, measure: bool, load: bool):
        self.switches, self.measure, self.load = switches, measure, load
        self.watched: list[Watched] = []
        self.preemptions = 0
        self._first: dict[Hashable, Watched] = {}  # the first region with each program

    def take_over(self, graph: Graph, regions: Sequence[Region]) -> None:
        """Replaces each region, in place, by a call that records what it does."""
        for region, call in zip(
            regions, replace_regions(graph, regions, self.switches), strict=True
        ):
            name = identity(region)
            self.watched.append(Watched(region, self, self._first.get(name)))
            self._first.setdefault(name, self.watched[-1])
            call.target = self.watched[-1].run

    @cached_property
    def cpu(self) -> Machine:
        """The CPU, as it reads memory while this report is made."""
        return this_cpu(REPEATS)

    def bytes_per_second(self, device: torch.device) -> float:
        """The bandwidth that floors assume for a device: measured for the CPU, as specified for a
        GPU.
        """
        if device.type == "cuda":
            return cuda.device_facts(cuda.index_of(device)).memory_bandwidth
        return max(self.cpu.bytes_per_second, self.cpu.now)

    def machine(self) -> Machine | None:
        """The machine on which times were measured, if they were."""
        device = next((w.region.device for w in self.watched if w.ways), None)
        if device is None:
            return None
        if device.type == "cuda":
            return Machine(
                cpu=bandwidth.cpu(),
                cpus=bandwidth.cpus(),
                threads=torch.get_num_threads(),
                repeats=REPEATS,
                preemptions=self.preemptions,
                bytes_per_second=self.bytes_per_second(device),
                now=self.bytes_per_second(device),
                read_by="as specified",
                gpu=torch.cuda.get_device_name(device),
            )
        weights = {t.data_ptr(): t for w in self.watched for t in w.weights}.values()
        with options.using(self.switches):
            isa_level = isa.selected() if any(w.in_cpp for w in self.watched) else ""
        return replace(
            self.cpu,
            preemptions=self.preemptions,
            isa_level=isa_level,
            weight_bytes=sum(t.nbytes for t in weights),
            weight_bytes_on_large_pages=pages.obtained(*weights),
        )


def this_cpu(repeats: int, preemptions: int = 0) -> Machine:
    """The CPU with as many threads as kernels use, and how fast it reads memory now."""
    threads = torch.get_num_threads()
    memory = bandwidth.of(threads)
    return Machine(
        cpu=bandwidth.cpu(),
        cpus=bandwidth.cpus(),
        threads=threads,
        repeats=repeats,
        preemptions=preemptions,
        bytes_per_second=memory.bytes_per_second,
        now=memory.now(bandwidth.pool()),
        read_by=memory.by,
    )


class Watched:
    """One region. equal: the first region with the same program, if it is not this one: then only
    that one is measured.

    kernels, ways: the times of the kernels, and of the ways to compute the whole program ("here",
    "unfused", "bf16": data.py); loads: of each run; weights: what it reads of them.
    """

    def __init__(self, region: Region, watch: Watch, equal: Watched | None):
        self.region, self.watch, self.equal = region, watch, equal
        self.kernels: list[Measured] = []
        self.ways: dict[str, Measured] = {}
        self.loads: list[Load] = []
        self.weights: list[Tensor] = []

    @cached_property
    def program(self) -> Program:
        """The program, compiled when the region first runs."""
        if self.equal is not None:
            return self.equal.program
        switches = self.watch.switches
        return compile_fusion(
            self.region.fusion, backends.find(switches.target, self.region.device), switches
        )

    @property
    def in_cpp(self) -> bool:
        """Whether some of its kernels are in C++."""
        return any(kernel.backend == CPU for kernel in self.program.kernels)

    def run(
        self, source: str, inputs: Sequence[Tensor], sizes: Sequence[int], key: str
    ) -> list[Tensor]:
        """The results of fusion_moe::run, which this replaces."""
        fusion, tensors = self.program.fusion, [fp4_as_bytes(t) for t in inputs]
        env = fusion.bind(tensors, dict(zip(self.program.stages[0][1].symbols, sizes, strict=True)))
        rows = {name: groups.sizes(ends) for name, ends in ends_of(fusion, tensors, env).items()}
        self.weights = [
            t for v, t in zip(fusion.inputs, tensors, strict=True) if fusion.role(v) == "weight"
        ]
        if self.watch.load:
            self.loads += [Load(name, tuple(n.tolist())) for name, n in rows.items()]
        if self.watch.measure and self.equal is None and not self.ways:
            self._measure(tensors, env, {name: int(n.count_nonzero()) for name, n in rows.items()})
        return self.program(tensors, env)

    def _measure(
        self, tensors: Sequence[Tensor], env: Mapping[str, int], used: Mapping[str, int]
    ) -> None:
        taken = self.program.taken(tensors, env)
        values: dict[Value, Any] = dict(zip(self.program.fusion.inputs, taken, strict=True))
        calls: list[_Call] = []
        for kernel in self.program.kernels:
            inputs = [values[v] for v in kernel.segment.fusion.inputs]
            # the first call builds the kernel
            values.update(zip(kernel.segment.fusion.outputs, kernel(inputs, env), strict=True))
            read = cost.bytes_read(kernel.segment.fusion, env, used)
            calls.append((partial(kernel, inputs, env), inputs, read))
        ways = self._ways(tensors, env, cost.bytes_read(self.program.fusion, env, used))
        for call, *_ in ways.values():
            call()
        before = preemptions()
        times = _times(
            [*calls, *ways.values()],
            self.region.device,
            self.watch.bytes_per_second(self.region.device),
        )
        self.watch.preemptions += preemptions() - before
        self.kernels = times[: len(calls)]
        self.ways = dict(zip(ways, times[len(calls) :], strict=True))

    def _ways(
        self, tensors: Sequence[Tensor], env: Mapping[str, int], read: int
    ) -> dict[str, _Call]:
        """Ways to compute the program as a whole; without those that there are not."""
        ways: dict[str, _Call] = {"here": (partial(self.program, tensors, env), tensors, read)}
        with suppress(Error):
            switches = self.watch.switches.replace(fuse=False)
            alone = compile_fusion(self.region.fusion, self.program.target, switches)
            ways["unfused"] = partial(alone, tensors, env), tensors, read
        if products := in_bf16(self.program.fusion, tensors, env):
            ways["bf16"] = (*products, 0)
        return ways


def in_bf16(
    fusion: Fusion, tensors: Sequence[Tensor], env: Mapping[str, int]
) -> tuple[Callable[[], object], Sequence[Tensor]] | None:
    """Torch's products of a program's rows by its weights in bf16, as one call, and their operands;
    None if torch has no such product.
    """
    calls, operands = list[Callable[[], Tensor]](), list[Tensor]()

    def product(op: Op) -> Callable[..., tuple[Tensor]]:
        def run(a: Any, w: Any, ends: Tensor, **attrs: Any) -> tuple[Tensor]:
            rows, weight = (
                dequantize(linear(t, t.encoding, attrs.get(order, "linear"), cut), torch.bfloat16)
                if isinstance(t, Quantized)
                else t.bfloat16()
                for t, order, cut in ((a, "a_layout", ends), (w, "w_layout", None))
            )
            if op.kind.name == "grouped_mm":
                weight = weight.transpose(1, 2)
            calls.append(partial(torch._grouped_mm, rows, weight, offs=ends.int()))
            operands.extend((rows, weight))
            return (calls[-1]().to(DTYPES[op.outputs[0].type.dtype]),)

        return run

    products = [op for op in fusion.ops if op.kind.name in ("grouped_mm", "grouped_mm_t")]
    try:
        fusion.evaluate(*tensors, sizes=env, using={op: product(op) for op in products})
    except (Error, RuntimeError, ValueError):  # of torch: sizes that it does not take, memory
        return None
    return (lambda: [call() for call in calls], operands) if calls else None


_Call = tuple[Callable[[], object], Sequence[Tensor], int]  # its inputs, and their bytes


def _times(calls: Sequence[_Call], device: torch.device, bytes_per_second: float) -> list[Measured]:
    """The times of calls, measured in turns. Before each, its inputs are evicted from caches, as
    other layers of a model would do.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in progress(range(REPEATS), "measuring a program, runs", REPEATS):
        for (call, inputs, _), seconds in zip(calls, times, strict=True):
            on_gpu = device.type == "cuda"
            seconds.append(_gpu_seconds(call, device) if on_gpu else cpu_seconds(call, inputs))
    return [
        Measured(median(s), min(s), max(s), read, read / bytes_per_second)
        for s, (_, _, read) in zip(times, calls, strict=True)
    ]


def cpu_seconds(call: Callable[[], object], inputs: Sequence[Tensor] = ()) -> float:
    """The time of one call on the CPU, with its inputs not in the caches."""
    bandwidth.evict(*inputs)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# cycles that the GPU waits, so that a call is queued before the first event passes
_QUEUED = 1_000_000


def _gpu_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call, between two CUDA events, with none of its inputs in the L2 cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    with torch.cuda.device(device):
        _other_memory(cuda.index_of(device)).zero_()
        torch.cuda._sleep(_QUEUED)
        start.record()
        call()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _other_memory(index: int) -> torch.Tensor:
    """u8: a buffer four times the size of the L2 cache."""
    return torch.empty(
        4 * cuda.device_facts(index).l2_bytes, dtype=torch.uint8, device=torch.device("cuda", index)
    )


def preemptions() -> int:
    """How often this process was preempted; 0 if the system does not count it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def identity(region: Region) -> Hashable:
    """A key that is equal for regions that the report shows as one fusion: equal operations from
    equal lines of the user's program, on equal sizes.
    """
    return (
        text(region.fusion),
        tuple(op.source for op in region.fusion.ops),
        tuple(numbers(region).items()),
    )


def numbers(region: Region) -> dict[str, int]:
    """The sizes of this call for the symbols of a region, without those that only the device
    knows.
    """
    sizes = {}
    for name, source in region.sizes.items():
        val = source.node.meta["val"]
        size = hint(val if source.dim is None else val.shape[source.dim])
        if size is not None:
            sizes[name] = int(size)
    return sizes


def ends_of(fusion: Fusion, tensors: Sequence[Tensor], env: Mapping[str, int]) -> dict[str, Tensor]:
    """The ends of each partition of a fusion, by name, computed from these inputs by only those
    operations that make the ends.
    """
    values = (*fusion.inputs, *(v for op in fusion.ops for v in op.outputs))
    ends = {v.type.ends.name: v for v in values if v.type.ends}
    ops = made_again(fusion.ops, ends.values())
    part = replace(fusion, ops=ops, outputs=tuple(ends.values()))
    return dict(zip(ends, part.evaluate(*tensors, sizes=env), strict=True))
