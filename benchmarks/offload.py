"""Layers of experts that the GPU has no room for, step by step: which way misses go, at how many
tokens, with how many experts there.

    python benchmarks/offload.py --json build/offload.json --seconds 420    # again and again
    python benchmarks/offload.py --json build/offload.json --page           # results/offload.md
    python benchmarks/offload.py --pretended --steps 4      # the same with the CPU as a small GPU

A run that ends after --seconds leaves what it found in the file, and the next one goes on from
there; --models, --resident, --routings, --tokens and --prompts choose cells.

Weights are made up, in the sizes of the models, in several layers that take turns, so that CPUs do
not find the last step's experts in their caches. Ids are drawn evenly, by Zipf's law with exponent
1.2, or are those that a text makes (`recorded` of offload_layers.py); the experts that are named
most often are there. Steps are CUDA graphs, alternated in one process, each way with other ones of
the same ids, in an order that is drawn for each step: with misses divided ("split"), all computed
by the CPU ("cpu"), all copied ("copy"), of a layer that is there whole ("whole"), of the operation
without any of this ("plain"), and, without a graph, plain offloading rebuilt ("peer"). Where
kt-kernel is installed (cpu_peers.py), steps with its experts on the CPU and ours on the GPU ("kt",
of offload_kt.py) follow after all others, since its threads spin.

Times are means of the middle half, in microseconds. The bound is the larger of the whole layer's
time and of the split's by its model (fusion_moe/offload/split.py), with the machine's constants.
What the model says of both pure ways is printed as a part of what was measured: it should be 0.85
to 1.15. Prompts stream the experts that are not there; their rate is that of the bytes copied.
offload_beside.py has what the CPU reads beside copies.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import results
import torch
from offload_beside import Beside, beside
from offload_kt import PAUSE, Kt, is_right
from offload_layers import (
    MODELS,
    SPARE,
    Direct,
    Gpu,
    Pretend,
    SharedHome,
    Sizes,
    drawn,
    filled,
    link_of,
    module,
    ways_of,
)
from torch import Tensor

from fusion_moe import synchronize
from fusion_moe.offload.device import Device
from fusion_moe.offload.split import Constants, split

WAYS = "plain", "whole", "split", "cpu", "copy", "peer"
FEWEST = 30  # steps of a cell that takes long, and of a block


@dataclass(frozen=True)
class Row:
    """Times of one cell, in microseconds; hits: the share of ids whose expert is there."""

    model: str
    routing: str
    resident: int
    tokens: int
    steps: int
    hits: float
    missed: float
    plain: float
    whole: float
    split: float
    cpu: float
    copy: float
    peer: float
    bound: float
    model_cpu: float
    model_copy: float
    kt: float | None = None
    kt_by: str = ""  # the kernel

    @property
    def better(self) -> float:
        """The better pure way."""
        return min(self.cpu, self.copy)

    @property
    def keeps(self) -> bool:
        """What the split promises."""
        return self.split <= max(1.05 * self.better, self.better + 5)

    def __str__(self) -> str:
        times = " ".join(f"{n} {getattr(self, n):.0f}" for n in WAYS)
        times += f" kt {self.kt:.0f} ({self.kt_by})" if self.kt else ""
        model = f"cpu {self.model_cpu / self.cpu:.2f}, copy {self.model_copy / self.copy:.2f}"
        return (
            f"{self.model} {self.routing} {self.resident} % there, {self.tokens} tokens: hits "
            f"{self.hits:.2f}, {self.missed:.1f} experts missed; {times} us of {self.steps} steps; "
            f"split / better {self.split / self.better:.3f}, bound / split "
            f"{self.bound / self.split:.2f}; by the model / measured: {model}"
        )


@dataclass(frozen=True)
class Prompt:
    """A long step: milliseconds, and GB/s that are copied; peer: plain offloading's time; there:
    that of the operation with all experts there; link: GB/s of one large copy.
    """

    model: str
    routing: str
    resident: int
    tokens: int
    ms: float
    rate: float
    peer: float
    there: float
    link: float

    @property
    def share(self) -> float:
        """Of what both copies and products need, whichever takes longer."""
        return max(self.rate / self.link, self.there / self.ms)

    def __str__(self) -> str:
        return (
            f"{self.model} {self.routing} {self.resident} % there, a prompt of {self.tokens} "
            f"tokens: {self.ms:.1f} ms, {self.rate:.1f} of {self.link:.1f} GB/s, peer "
            f"{self.peer:.1f} ms, all there {self.there:.1f} ms"
        )


class Layers:
    """Layers of one model on a machine."""

    def __init__(self, on: Gpu | Pretend, name: str, sizes: Sizes, most: Any):
        self.on, self.name, self.sizes = on, name, sizes
        self.modules = [module(sizes) for _ in range(most.layers)]
        self.stored = [SharedHome(m) for m in self.modules]
        self.rates = on.rates(self.stored[0])
        self.whole = [self._device(storage, sizes.experts, self.rates) for storage in self.stored]
        self.kt: Kt | None = None
        if most.tokens:
            try:
                self.kt = Kt(self.stored, max(most.tokens), sizes.of_token)
            except ImportError as error:
                print(f"{Kt.name}: {error}; cpu_peers.py says how to install it")
        print(f"{name}: {self.stored[0].nbytes / 1e6:.1f} MB an expert; {self.rates}", flush=True)

    def _device(self, storage: SharedHome, slots: int, costs: Constants, spare: int = 0) -> Device:
        # all have kernels for as many matrices
        spare = spare or self.sizes.experts + SPARE - slots
        return filled(self.on.make(storage, slots, spare, costs), slots)

    def cells(self, resident: int, wanted: list[tuple[str, int]], most: Any) -> Iterator[Row]:
        """A row for each routing and number of tokens."""
        slots = self.sizes.experts * resident // 100
        devices = [
            {n: self._device(storage, slots, costs) for n, costs in ways_of(self.rates).items()}
            for storage in self.stored
        ]
        for of_layer, whole in zip(devices, self.whole, strict=True):
            of_layer["whole"] = whole
        for routing, tokens in wanted:
            ids = drawn(routing, self.sizes, tokens, most.steps)
            times = self._times(devices, slots, ids, most)
            yield self._row(routing, resident, slots, ids[: len(times["split"])], times)

    def _times(
        self, devices: list[dict[str, Device]], slots: int, ids: Tensor, most: Any
    ) -> dict[str, list[float]]:
        tokens, k = ids.shape[1:]
        x = torch.randn(tokens, self.sizes.hidden, device=self.on.device).bfloat16()
        w = torch.full((tokens, k), 1.0 / k, device=self.on.device)
        on_device = ids.to(self.on.device)
        now = on_device[0].clone()
        runs, kt, kept = list[dict[str, Any]](), list[dict[str, Any]](), list[Any]()
        for layer, of_layer in enumerate(devices):
            steps = {n: self.on.replayed(d.step, x, now, w) for n, d in of_layer.items()}
            direct = Direct(of_layer["whole"], slots)
            steps["plain"] = self.on.replayed(direct.plain, x, now, w)
            steps["peer"] = partial(direct.offloading, x, now, w)
            steps["peer"]()
            runs.append(steps)
            if self.kt:
                want, by = of_layer["split"].step(x, now, w), self.kt.steps(layer, direct, x, w)
                by = {n: step for n, step in by.items() if is_right(n, step(x, now, w), want)}
                kept.append(by)  # whose memory graphs use
                kt.append({n: self.on.replayed(step, x, now, w) for n, step in by.items()})
        right = [n for n in kt[0] if all(n in by for by in kt)] if kt else []
        kt = [{n: by[n] for n in right} for by in kt if right]
        times = {n: list[float]() for n in (*WAYS, *right)}
        for of_layers in (runs, kt) if kt else (runs,):
            time.sleep(PAUSE if kt else 0)
            end = time.monotonic() + most.cell
            for first in range(0, len(ids), FEWEST):
                if first and time.monotonic() > end:
                    break
                block = on_device[first : first + FEWEST]
                for n, (number, name) in shuffled(len(block), of_layers[0]):
                    # ways have the same ids, but not one after the other: the CPU's caches have
                    # what it has just read
                    apart = number * len(block) // len(of_layers[0])
                    now.copy_(block[(n + apart) % len(block)])
                    run = of_layers[(n + number) % len(of_layers)][name]
                    times[name].append(self.on.microseconds(run))
        synchronize()
        return times

    def _row(
        self, routing: str, resident: int, slots: int, ids: Tensor, times: dict[str, list[float]]
    ) -> Row:
        experts, (steps, tokens) = self.sizes.experts, ids.shape[:2]
        named = [torch.bincount(i.flatten(), minlength=slots).tolist() for i in ids]
        missed = [{e: n for e, n in enumerate(row) if n and e >= slots} for row in named]
        there = [sum(map(bool, row[:slots])) for row in named]
        decided = [
            split(m, self.rates, experts, experts, n) for m, n in zip(missed, there, strict=True)
        ]
        middles = {n: middle(t) for n, t in times.items()}
        found: dict[str, Any] = {n: middles.pop(n) for n in WAYS}
        if middles:
            found["kt_by"] = best = min(middles, key=middles.__getitem__)
            found["kt"] = middles[best]
        bounds = {
            name: middle([max(found["whole"], getattr(d, of) / 1e3) for d in decided])
            for name, of in (
                ("bound", "time"),
                ("model_cpu", "all_computed"),
                ("model_copy", "all_copied"),
            )
        }
        hits, misses = float((ids < slots).float().mean()), sum(map(len, missed)) / steps
        return Row(self.name, routing, resident, tokens, steps, hits, misses, **found, **bounds)

    def prompts(self, resident: int, wanted: list[tuple[str, int]]) -> Iterator[Prompt]:
        """A row for each routing and number of tokens, by the first layer."""
        storage, slots = self.stored[0], self.sizes.experts * resident // 100
        device = self._device(storage, slots, self.rates, spare=SPARE)
        direct, link = Direct(self.whole[0], slots), link_of(self.on, storage)
        for routing, tokens in wanted:
            ids = drawn(routing, self.sizes, tokens, 1)[0].to(self.on.device)
            x = torch.randn(tokens, self.sizes.hidden, device=self.on.device).bfloat16()
            w = torch.full(ids.shape, 1.0 / ids.shape[1], device=self.on.device)
            steps = device.step, direct.offloading, direct.plain
            times, copied = [list[float]() for _ in steps], 0
            for _ in range(4):
                before = device.counters.bytes_copied
                for found, step in zip(times, steps, strict=True):
                    found.append(self.on.microseconds(partial(step, x, ids, w)))
                copied = device.counters.bytes_copied - before
            synchronize()
            ours, peer, there = (median(found[1:]) / 1e3 for found in times)
            cell = self.name, routing, resident, tokens
            yield Prompt(*cell, ours, copied / ours / 1e6, peer, there, link)
        storage.drop(self.sizes.experts + SPARE)


def shuffled(steps: int, ways: Sequence[Any]) -> Iterator[tuple[int, tuple[int, str]]]:
    """All ways of each step, numbered, in another order each time: a way that follows one with the
    same slots takes some microseconds less.
    """
    generator = random.Random(0)
    for n in range(steps):
        for numbered in generator.sample([*enumerate(ways)], len(ways)):
            yield n, numbered


def middle(times: Sequence[float]) -> float:
    """The mean of the middle half: a median is of some steps with a miss, or of some with none."""
    skipped = len(times) // 4
    return fmean(sorted(times)[skipped : len(times) - skipped])


_LISTS = "rows", "prompts", "beside"


class Found:
    """Rows, in a file if there is one."""

    def __init__(self, file: Path | None):
        self.file, self.rows, self.prompts = file, list[Row](), list[Prompt]()
        self.beside = list[Beside]()
        if file is not None and file.exists():
            said = json.loads(file.read_text())
            self.rows = [Row(**row) for row in said["rows"]]
            self.prompts = [Prompt(**row) for row in said["prompts"]]
            self.beside = [Beside(**row) for row in said.get("beside", [])]

    def add(self, row: Row | Prompt | Beside) -> None:
        print(row, flush=True)
        of: dict[type, list[Any]] = {Row: self.rows, Prompt: self.prompts, Beside: self.beside}
        of[type(row)].append(row)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            said = {n: [vars(row) for row in getattr(self, n)] for n in _LISTS}
            self.file.write_text(json.dumps(said, indent=1))

    def has(self, name: str, routing: str, resident: int, tokens: int) -> bool:
        return (name, routing, resident, tokens) in {
            (r.model, r.routing, r.resident, r.tokens) for r in (*self.rows, *self.prompts)
        }


def measure(arguments: argparse.Namespace, found: Found) -> bool:
    """Whether all cells are measured."""
    end = time.monotonic() + arguments.seconds
    for name in arguments.models:
        layers = None
        for resident in arguments.resident:
            cells, prompts = (
                [
                    (routing, n)
                    for routing in arguments.routings
                    for n in numbers
                    if not found.has(name, routing, resident, n)
                ]
                for numbers in (arguments.tokens, arguments.prompts)
            )
            if not (cells or prompts):
                continue
            if layers is None:
                layers = Layers(*_machine(arguments, name), arguments)
                if name not in [b.model for b in found.beside]:
                    found.add(beside(name, layers.whole[0], layers.sizes.of_token))
            of_cells = layers.cells(resident, cells, arguments)
            for row in chain(of_cells, layers.prompts(resident, prompts)):
                found.add(row)
                if time.monotonic() > end:
                    return False
    return True


def _machine(arguments: argparse.Namespace, name: str) -> tuple[Gpu | Pretend, str, Sizes]:
    if not arguments.pretended:
        return Gpu(), name, MODELS[name]
    return Pretend(), name, replace(MODELS[name], experts=32, hidden=128, inner=128)


def page(found: Found) -> None:
    """Writes benchmarks/results/offload.md."""
    rows = found.rows
    few, many = [r for r in rows if r.tokens < 8], [r for r in rows if r.tokens >= 8]
    missing = [r for r in rows if r.missed and r.tokens in (1, 4) and r.resident]
    worst = max(rows, key=lambda r: r.split / r.better)
    kept = sum(r.keeps for r in rows)
    goals = [
        ("split / better pure way, at most 1.05 or 5 us", f"kept in {kept} of {len(rows)} cells"),
        ("the worst of these", str(worst)),
        (
            "bound / split, 1, 4 tokens, at least 0.85",
            _least(r.bound / r.split for r in missing),
        ),
        ("whole - plain below 8 tokens, at most 2 us", _most(r.whole - r.plain for r in few)),
        ("whole / plain from 8 tokens on, at most 1.02", _most(r.whole / r.plain for r in many)),
        ("split / peer, at most 1", _most(r.split / r.peer for r in rows)),
        ("split / kt-kernel, at most 1", _most(r.split / r.kt for r in rows if r.kt)),
        ("prompts / peer, at most 1", _most(p.ms / p.peer for p in found.prompts)),
        ("prompts, of the link's rate", _least(p.rate / p.link for p in found.prompts)),
        ("prompts, of that or of products", _least(p.share for p in found.prompts)),
        (
            "the CPU's experts / a read loop, beside copies, at least 0.75",
            _least(b.share for b in found.beside),
        ),
    ]
    results.write(
        "offload",
        "python benchmarks/offload.py --page",
        "Times in microseconds; resident in percent. The script's text says what columns are.",
        results.table(("goal", "found"), goals),
        _table(Row, rows),
        "Prompts, in milliseconds and GB/s:",
        _table(Prompt, found.prompts),
        "Beside copies, in GB/s:",
        _table(Beside, found.beside),
    )


def _table(of: Any, rows: Sequence[Any]) -> str:
    """All fields of rows."""

    def shown(x: Any) -> Any:
        return f"{x:.4g}" if isinstance(x, float) else "" if x is None else x

    lines = [[shown(x) for x in vars(row).values()] for row in rows]
    return results.table([field.name for field in fields(of)], lines)


def _least(numbers: Iterator[float]) -> str:
    found = sorted(numbers)
    return f"{found[0]:.2f} at the least, {median(found):.2f} in the median" if found else "?"


def _most(numbers: Iterator[float]) -> str:
    found = sorted(numbers)
    return f"{found[-1]:.2f} at the most, {median(found):.2f} in the median" if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, usual in (
        ("models", ",".join(MODELS)),
        ("resident", "10,37,80,0"),
        ("tokens", "1,4,16,64,2,8"),
        ("routings", "zipf,recorded,uniform"),
        ("prompts", "8192,32768"),
    ):
        parser.add_argument(f"--{name}", default=usual)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cell", type=float, default=10, help="seconds of a cell, at most")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pretended", action="store_true")
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    for name in ("models", "routings"):
        setattr(arguments, name, getattr(arguments, name).split(","))
    for name in ("resident", "tokens", "prompts"):
        setattr(arguments, name, [int(n) for n in getattr(arguments, name).split(",") if n])
    found = Found(arguments.json)
    if arguments.page:
        page(found)
        return
    with torch.no_grad():
        done = measure(arguments, found)
    print("all cells are there" if done else "not all cells are there: run it again")


if __name__ == "__main__":
    main()
