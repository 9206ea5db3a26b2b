"""The ways in which h100_parallel.py divides a layer, and what a call of each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel_layers import FORWARDS, World
from torch import Tensor, nn

import fusion_moe
from fusion_moe.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from fusion_moe.integrations.distributed.all_to_all import AllToAll
from fusion_moe.integrations.distributed.symmetric import GroupMemory
from fusion_moe.nn.local import local

MOST_REPEATS, SECONDS = 30, 0.3
Call = Callable[[], Any]
Forward = Callable[..., Tensor]


def ways(world: World, slots: int, passes: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the options of parallelize_."""
    sent = {"tokens": "sharded", "dispatch": "all_to_all"}
    shared = {"tokens": "sharded", "dispatch": "symmetric"}
    yield "all_gather", {"tokens": "sharded"}
    mean = 1 - (1 - 1 / world.ranks) ** slots
    for capacity in dict.fromkeys((1.0, min(1.0, round(4 / 3 * mean, 2)))):
        yield f"all_to_all {capacity}", {**sent, "capacity": capacity}
    yield "symmetric", shared
    if passes in FORWARDS:
        yield "symmetric float32", {**shared, "float32_sums": True}
    yield "replicated", {}


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def results(
    forward: Forward, trains: Sequence[Tensor], passes: str, given: Sequence[Tensor]
) -> list[Tensor]:
    """The result of x, ids, w; with its gradient, the last of `given`, those of x, w and what
    trains, unless passes are a forward.
    """
    *inputs, dy = given
    if passes in FORWARDS:
        with torch.no_grad():
            return [forward(*inputs)]
    x, ids, w = inputs
    x, w = (t.detach().requires_grad_() for t in (x, w))
    with torch.enable_grad():
        y = forward(x, ids, w)
    return [y.detach(), *map(local, torch.autograd.grad(y, [x, w, *trains], dy))]


def own_share(world: World, module: nn.Module, given: Sequence[Tensor], passes: str) -> Call:
    """What a rank computes on the tokens of all ranks, of a module that gathers them, without its
    collectives.
    """
    there = [all_gather(t, world.group, world.ranks) for t in given]
    return partial(results, partial(type(module).forward, module), trained(module), passes, there)


def collectives(
    world: World, module: Any, options: dict[str, Any], given: Sequence[Tensor]
) -> Call:
    """Those of a forward, without experts."""
    group, ranks, inputs = world.group, world.ranks, given[:3]
    if not options:
        return partial(all_reduce, torch.empty_like(given[0]), group, ranks)
    if options.get("dispatch") == "symmetric":
        return exchange_alone(world, module, inputs)
    if options.get("dispatch") == "all_to_all":
        capacity = options["capacity"]
        rows, _ = AllToAll(group, ranks, ranks * len(module.down_proj), capacity).dispatch(
            module, tuple(inputs)
        )
        return lambda: [all_to_all(t, group, ranks) for t in (*rows, rows[0])]
    y = torch.cat([torch.empty_like(given[0])] * ranks)
    return lambda: [
        *(all_gather(t, group, ranks) for t in inputs),
        reduce_scatter(y, group, ranks),
    ]


def exchange_alone(world: World, module: Any, given: Sequence[Tensor]) -> Call:
    """Tokens there, and sums as large back."""
    experts = world.ranks * len(module.down_proj)
    (x, ids, w), group = given, world.mesh.get_group()
    layer = GroupMemory.of_group(group, world.device).layer(experts, x.shape[1])
    layer.need(len(x), x.element_size())
    fd = fusion_moe.FusionDefinition()
    values = [fd.define_tensor(shape=t.shape, dtype=t.dtype) for t in (x, ids, w, layer.peers)]
    ranks, how = fd.define_groups("ranks", world.ranks, len(x)), {"experts": experts}
    how |= {"group": world.group}
    rows, all_ids, _, ends = fd.ops.dispatch(*values, groups=ranks, **how)
    fd.add_output(fd.ops.combine_from(rows, all_ids, values[1], ends, values[3], **how))
    fusion = fd.fusion()
    return lambda: fusion_moe.run(fusion, [x, ids, w, layer.peers])


# Times --------------------------------------------------------------------------------------------


def compiled(call: Call) -> Any:
    """What a call makes, after its kernels are compiled at once."""
    with fusion_moe.preparing():
        call()
    return call()


class Clock:
    """Microseconds of calls; graphs: whether these are in CUDA graphs, until one cannot be
    captured.
    """

    def __init__(self, world: World):
        self.world = world
        self.graphs = self.cuda = world.device.type == "cuda"

    def of(self, call: Call) -> float:
        """A median, of the slowest rank."""
        compiled(call)
        times = self._on_gpu(call) if self.cuda else self._on_cpu(call)
        fusion_moe.synchronize()  # raises what kernels found wrong
        return self.world.slowest(statistics.median(times))

    def _on_cpu(self, call: Call) -> list[float]:
        times = []
        for _ in range(7):
            dist.barrier()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return times[2:]

    def _on_gpu(self, call: Call) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")

        def milliseconds(run: Call) -> float:
            start.record()
            run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            calls = int(self.world.slowest(max(1, min(16, 2 / max(milliseconds(call), 0.05)))))
        run = self._captured(call, calls, stream) if self.graphs else None
        if run is None:
            run, calls = call, 1
        run()
        torch.cuda.synchronize()
        most = SECONDS / 2 * 1e3 / milliseconds(run)
        times = []
        for _ in range(int(self.world.slowest(max(5, min(MOST_REPEATS, most))))):
            dist.barrier()
            run()  # ranks that wait for each other end it together
            times.append(milliseconds(run) / calls * 1e3)
        return times

    def _captured(self, call: Call, calls: int, stream: torch.cuda.Stream) -> Call | None:
        """What replays some calls; None, which is said, if any rank cannot capture them."""
        graph, before, why = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), ""
        try:
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    call()
        except Exception as error:
            torch.cuda.set_stream(before)
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"rank {self.world.rank} captures nothing: {why}", flush=True)
        self.graphs = not self.world.slowest(float(bool(why)))
        return graph.replay if self.graphs else None
