"""A layer of experts that the GPU has no room for, step by step: which way misses go, at how many
tokens, with how many experts there.

    python benchmarks/offload.py [--models deepseek-v3,gpt-oss,qwen3-235b] [--resident 0,10,37,80]
        [--tokens 1,2,4,8,16,64] [--prompts 8192,32768] [--steps 300] [--seconds 600] [--json FILE]

Weights are made up, in the sizes of the models; ids are drawn by Zipf's law with exponent 1.2 or
evenly, and the experts that are named most often are there. Steps are CUDA graphs, alternated in
one process: with misses divided ("split"), all computed by the CPU ("cpu"), all copied ("copy"), of
a layer that is there whole ("whole"), and of the operation without any of this ("plain"). Times are
medians in microseconds. The bound is the larger of the whole layer's time and of the split's by its
model (fusion_moe/offload/split.py), with the machine's constants. What the model says of both pure
ways is printed as a part of what was measured: it should be 0.85 to 1.15. Prompts stream the
experts that are not there; their rate is that of the bytes that are copied.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fusion_moe import synchronize
from fusion_moe.encodings import ENCODINGS, Quantized
from fusion_moe.nn import Experts
from fusion_moe.offload import machine
from fusion_moe.offload.cuda import Cuda, shared_of
from fusion_moe.offload.device import Home
from fusion_moe.offload.moves import Shared
from fusion_moe.offload.split import Constants, Split, split
from fusion_moe.runtime.host_memory import pages

# encoding, experts, of a token, hidden, intermediate features
MODELS = {
    "deepseek-v3": ("nvfp4", 256, 8, 7168, 2048),
    "gpt-oss": ("mxfp4", 128, 4, 2880, 2880),
    "qwen3-235b": ("nvfp4", 128, 8, 4096, 1536),
}
CAPACITY = 512
WAYS = "plain", "whole", "split", "cpu", "copy"
NEVER = 10**10  # nanoseconds: a way that is never chosen
SPARE = 16


@dataclass(frozen=True)
class Row:
    """Medians of one cell, in microseconds; hits: the share of ids whose expert is there."""

    model: str
    routing: str
    resident: int
    tokens: int
    hits: float
    missed: float
    plain: float
    whole: float
    split: float
    cpu: float
    copy: float
    bound: float
    model_cpu: float
    model_copy: float

    def __str__(self) -> str:
        times = " ".join(f"{n} {getattr(self, n):.0f}" for n in WAYS)
        better = min(self.cpu, self.copy)
        model = f"cpu {self.model_cpu / self.cpu:.2f}, copy {self.model_copy / self.copy:.2f}"
        return (
            f"{self.model} {self.routing} {self.resident} % there, {self.tokens} tokens: hits "
            f"{self.hits:.2f}, {self.missed:.1f} experts missed; {times} us; split / better "
            f"{self.split / better:.3f}, bound / split {self.bound / self.split:.2f}; by the "
            f"model / measured: {model}"
        )


def module(name: str) -> Experts:
    """Experts on the CPU, all of which have the same few random bytes."""
    encoding, experts, _, hidden, inner = MODELS[name]
    of = ENCODINGS[encoding]

    def weight(n: int, k: int) -> Quantized:
        parts = []
        for part in of.parts:
            t = pages.empty(of.part_shape(part, (experts,), n, k), part.dtype)
            if part.of_matrix:
                t.fill_(2.0**-6)
            elif part.of_blocks:
                t.view(torch.uint8).fill_(0x38 if encoding == "nvfp4" else 121)
            else:
                row = torch.randint(0, 256, (t[0].numel(),), dtype=torch.uint8)
                t.view(experts, -1).copy_(row)
            parts.append(t)
        return Quantized(*parts, encoding=of)

    made = Experts(weight(2 * inner, hidden), weight(hidden, inner))
    made.order()
    return made


class Way:
    """A device whose steps are replayed. rows: ids, and the experts there, by number."""

    def __init__(self, home: Home, shared: Shared, slots: int, constants: Constants, spare: int):
        self.device = Cuda(home, slots, spare, constants, shared)
        for expert in range(slots):
            self.device.load(expert, expert)
        table = torch.full((home.experts,), -1, dtype=torch.int32)
        table[:slots] = torch.arange(slots)
        self.device.publish(table)
        torch.cuda.synchronize()

    def plain(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """The operation by itself, on what is there."""
        device = self.device
        layout = device.layout
        given = device.home.arguments(x, ids, w, device.slots, weight_layout=layout)
        found: Tensor = torch.ops.fusion_moe.fused_experts(**given)
        return found


def captured(step: Callable[..., Tensor], *given: Tensor) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        step(*given)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*given)
    return graph


def drawn(routing: str, experts: int, k: int, tokens: int, steps: int) -> Tensor:
    """ids [steps, tokens, k]; expert 0 is named most often."""
    exponent = {"zipf": 1.2, "uniform": 0.0}[routing]
    weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    g = torch.Generator().manual_seed(0)
    found = torch.multinomial(weights.expand(steps * tokens, -1), k, generator=g)
    return found.view(steps, tokens, k)


def cells(arguments: argparse.Namespace, name: str) -> Iterator[Row]:
    _, experts, k, hidden, _ = MODELS[name]
    made = module(name)
    home = Home(made)
    rates = machine.of_gpu("cuda:0").constants(home.nbytes, home.macs)
    print(f"{name}: {home.nbytes / 1e6:.1f} MB an expert; {rates}", flush=True)
    ways = {
        "split": rates,
        "cpu": replace(rates, copy_start=NEVER),
        "copy": replace(rates, cpu_start=NEVER),
    }
    shared = shared_of(home, torch.device("cuda", 0), CAPACITY)
    whole = Way(home, shared, experts, rates, SPARE)
    for resident in arguments.resident:
        slots = experts * resident // 100
        # all have kernels for as many matrices
        spare = experts + SPARE - slots
        devices = {n: Way(home, shared, slots, costs, spare) for n, costs in ways.items()}
        devices["whole"] = whole
        for routing in arguments.routings:
            for tokens in arguments.tokens:
                ids = drawn(routing, experts, k, tokens, arguments.steps)
                yield cell(name, routing, resident, slots, devices, ids, hidden, experts, rates)
                if time.monotonic() > arguments.end:
                    return
        for tokens in arguments.prompts:
            ids = drawn("uniform", experts, k, tokens, 1)[0]
            prompt(name, resident, devices["split"], ids, hidden)
        del devices


def cell(
    name: str,
    routing: str,
    resident: int,
    slots: int,
    devices: dict[str, Way],
    ids: Tensor,
    hidden: int,
    experts: int,
    rates: Constants,
) -> Row:
    steps, tokens, k = ids.shape
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    w = torch.full((tokens, k), 1.0 / k, device="cuda")
    now, on_gpu = ids[0].cuda(), ids.cuda()
    graphs = {n: captured(way.device.step, x, now, w) for n, way in devices.items()}
    graphs["plain"] = captured(devices["whole"].plain, x, now, w)
    times: dict[str, list[float]] = {n: [] for n in graphs}
    for step in range(steps):
        now.copy_(on_gpu[step])
        for n, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[n].append(begin.elapsed_time(end) * 1e3)
    synchronize()
    named = [torch.bincount(i.flatten(), minlength=slots) for i in ids]
    missed = [{e: int(n) for e, n in enumerate(row.tolist()) if n and e >= slots} for row in named]
    decided = [split(m, rates, experts, experts) for m in missed]
    of_whole = median(times["whole"])

    def model(found: Callable[[Split], int]) -> float:
        return median(max(of_whole, found(d) / 1e3) for d in decided)

    return Row(
        name,
        routing,
        resident,
        tokens,
        float((ids < slots).float().mean()),
        sum(map(len, missed)) / steps,
        median(times["plain"]),
        of_whole,
        median(times["split"]),
        median(times["cpu"]),
        median(times["copy"]),
        model(lambda d: d.time),
        model(lambda d: d.all_computed),
        model(lambda d: d.all_copied),
    )


def prompt(name: str, resident: int, way: Way, ids: Tensor, hidden: int) -> None:
    """Prints the time of a long step, and the bytes per second that it copies."""
    x = torch.randn(len(ids), hidden, device="cuda").bfloat16()
    w, there = torch.full(ids.shape, 1.0 / ids.shape[1], device="cuda"), ids.cuda()
    times, before = [], 0
    for _ in range(4):
        before = way.device.counters.bytes_copied
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way.device.step(x, there, w)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    copied = way.device.counters.bytes_copied - before
    print(
        f"{name} {resident} % there, a prompt of {len(ids)} tokens: {median(times[1:]) * 1e3:.1f} "
        f"ms, {copied / median(times[1:]) / 1e9:.1f} GB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (
        ("models", ",".join(MODELS)),
        ("resident", "0,10,37,80"),
        ("tokens", "1,2,4,8,16,64"),
        ("routings", "zipf,uniform"),
        ("prompts", ""),
    ):
        parser.add_argument(f"--{name}", default=usual)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for name in ("resident", "tokens", "prompts"):
        setattr(arguments, name, [int(n) for n in getattr(arguments, name).split(",") if n])
    arguments.routings = arguments.routings.split(",")
    arguments.end = time.monotonic() + arguments.seconds
    rows = []
    with torch.no_grad():
        for name in arguments.models.split(","):
            for row in cells(arguments, name):
                print(row, flush=True)
                rows.append(row)
                if arguments.json:
                    arguments.json.write_text(json.dumps([vars(r) for r in rows], indent=1))


if __name__ == "__main__":
    main()
