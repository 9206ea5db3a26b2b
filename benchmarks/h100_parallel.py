"""Experts of one layer divided between the GPUs of a node, inference and training, beside what they
compute and what they send, each alone.

    python benchmarks/h100_parallel.py [--out FILE.jsonl] [--models deepseek ...] [--tokens 8 ...]
        [--passes forward fp8 lora] [--routing uniform zipf] [--ways symmetric ...] [--seconds 480]
    torchrun --nproc-per-node 4 benchmarks/h100_parallel.py ...      the same; without torchrun a
        process for each GPU is started
    python benchmarks/h100_parallel.py --page FILE.jsonl ...         writes what runs found to
        benchmarks/results/parallel.md
    python benchmarks/h100_parallel.py --device cpu --ranks 2 --tiny    over gloo

A run that ends after --seconds leaves what it found in --out, and the next one goes on from there.
So does one after an error, which becomes a row that is not tried again.

Cells: tokens of each rank, routing as --routing says, bf16. Passes: "forward" of NVFP4 experts;
"fp8", the same of weights and rows in e4m3; forward and backward of "lora", adapters of rank 16 on
NVFP4 experts, with gradients of tokens, router weights and adapters; of "floats", experts in bf16
that train themselves, which DeepSeek-V3's size has room for beside nothing else. Ways: "all_gather"
and "all_to_all", by collectives (docs/guides/distributed.md; the number behind is the capacity);
"symmetric", through memory that the ranks share, with sums in 16 bits, or sent in float32;
"replicated", all ranks have the tokens of all, as in decoding under tensor parallelism, and add up
with an all-reduce. Columns, medians of calls in CUDA graphs, the slowest rank's:

    EP              a call of the divided module
    local           this rank's experts on all ranks' tokens, with nothing sent
    collectives     of a forward, without experts, for the same bytes
    one             all experts on one GPU with all tokens, and how many times faster EP is
    transformers    its experts in bf16 by torch's grouped_mm with its expert parallelism: ids of
                    other ranks are masked, an all-reduce
    error           relative Frobenius error of the result against that of one GPU; the largest one
                    of the gradients

A second table has what "symmetric" has to reach: its time in "local", or what it adds to that; and
how many times as fast it is as the better of the collectives that dropped nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from parallel_layers import FORWARDS, LAYERS, MODELS_BY_NAME, PASSES, Cell, Theirs, World
from parallel_ways import Clock, collectives, compiled, own_share, results, trained, ways
from results import table, write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fusion_moe
from fusion_moe.distributed import parallelize_
from fusion_moe.integrations.distributed.symmetric import NO_MULTICAST

TOKENS = (8, 128, 2048, 64)  # the most telling first
LIMIT, GRADIENTS_LIMIT = 1e-2, 2e-2
WAIT = timedelta(seconds=180)  # for ranks that are lost
# by tokens of a rank: the most of "local", or microseconds more
OF_LOCAL = {8: (1.10, 15), 128: (1.15, 20), 2048: (1.15, 0)}
FASTER, FASTER_IN_TRAINING = {64: 1.35, 2048: 1.3}, 1.1  # than the better of the collectives
HEAD = (
    "layer",
    "tokens a rank",
    "passes",
    "way",
    "EP us",
    "local us",
    "EP / local",
    "collectives us",
    "one us",
    "times faster",
    "transformers us",
    "error",
)
GOALS_HEAD = (
    "layer",
    "tokens a rank",
    "passes",
    "symmetric / local",
    "float32 sums",
    "goal",
    "x the better of the collectives",
    "goal",
)
WAYS = ("all_gather", "all_to_all", "symmetric", "replicated", "transformers")
Row, Ways = dict[str, Any], dict[str, dict[str, Any]]


# Measuring ----------------------------------------------------------------------------------------


class Layers:
    """Whole layers, the same on all ranks, made when they are wanted."""

    def __init__(self, world: World):
        self.world = world
        self._made: dict[tuple[str, str], Any] = {}
        self._theirs: dict[str, Theirs | str] = {}

    def of(self, cell: Cell) -> Any:
        key = cell.name, cell.passes
        if key not in self._made:
            if cell.passes == "floats":  # nothing else has room
                self._made, self._theirs = {}, {}
            self._made[key] = LAYERS[cell.passes](cell.model, self.world.device)
        return self._made[key]

    def theirs(self, cell: Cell) -> Theirs | str:
        """transformers', or why there is none."""
        if cell.name not in self._theirs:
            whole = LAYERS["forward"](cell.model, self.world.device)
            try:
                self._theirs[cell.name] = Theirs(cell.model, whole, self.world)
            except (ImportError, AttributeError, TypeError) as error:
                self._theirs[cell.name] = f"{type(error).__name__}: {error}"
        return self._theirs[cell.name]


def apart(found: Tensor, want: Tensor) -> float:
    """The relative Frobenius error, in pieces: float32 copies of all may not fit."""
    pieces = [*zip(found.chunk(64), want.chunk(64), strict=True)]
    off = sum(float((a.float() - b.float()).square().sum()) for a, b in pieces)
    return float((off / max(sum(float(b.float().square().sum()) for _, b in pieces), 1e-30)) ** 0.5)


def measure(
    world: World, layers: Layers, cell: Cell, named: Ways, done: set[str], clock: Clock
) -> Iterator[Row]:
    """A row for each way that is not done; "transformers" is a column of all."""
    beside = named.pop("transformers", None) is not None
    if done.issuperset(named):
        return
    whole, every = layers.of(cell), cell.inputs(world)
    _compile(world, whole, named, cell.passes, every)
    mine = world.own(every)
    alone = partial(results, whole, trained(whole), cell.passes, every)
    y, *rest = compiled(alone)
    tokens, weights = [y, *rest[:2]], [world.of_experts(t) for t in rest[2:]]
    del rest
    common = {"one": clock.of(alone), "transformers": None}
    if cell.passes == "forward" and beside:
        common["transformers"] = _of_theirs(layers.theirs(cell), every[:3], clock)
    gathers = _divided(whole, world, {"tokens": "sharded"})
    common["local"] = clock.of(own_share(world, gathers, mine, cell.passes))
    del gathers
    for way, options in named.items():
        if way in done:
            continue
        module, given = _divided(whole, world, options), mine if options else every
        call = partial(results, module, trained(module), cell.passes, given)
        found = compiled(call)
        want = [*(world.own(tokens) if options else tokens), *weights]
        errors = [world.slowest(apart(a, b)) for a, b in zip(found, want, strict=True)]
        del found, want
        times = {"ep": clock.of(call), "collectives": None}
        if cell.passes == "forward" and not options.get("float32_sums"):
            times["collectives"] = clock.of(collectives(world, module, options, given))
        yield {
            "way": way,
            "error": errors[0],
            "gradients": max(errors[1:], default=None),
            "dropped": int(world.slowest(int(getattr(module, "dropped", 0)))),
            "graphs": clock.graphs,
            **common,
            **times,
        }
        del module, call


def _compile(world: World, whole: Any, named: Ways, passes: str, every: Sequence[Tensor]) -> None:
    """The kernels of all ways at once, which takes little longer than those of one."""
    mine = world.own(every)
    with fusion_moe.preparing():
        results(whole, trained(whole), passes, every)
        for options in ({"tokens": "sharded"}, *named.values()):
            module, given = _divided(whole, world, options), mine if options else every
            results(module, trained(module), passes, given)
            if passes == "forward":
                collectives(world, module, options, given)()


def _divided(whole: Any, world: World, options: dict[str, Any]) -> Any:
    module = deepcopy(whole)
    parallelize_(module, world.mesh, **options)
    return module


def _of_theirs(module: Theirs | str, given: Sequence[Tensor], clock: Clock) -> float | str:
    if isinstance(module, str):
        return module
    try:
        with torch.no_grad():
            return clock.of(partial(module, *given))
    except Exception as error:  # a line of the table, whatever it is
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """In the order in which they are measured."""
    for routing in args.routing:
        for tokens in args.tokens:
            for name in ["tiny"] if args.tiny else args.models:
                for passes in args.passes:
                    yield Cell(name, tokens, passes, routing)


class Found:
    """Rows, in a file."""

    def __init__(self, file: Path, world: World):
        self.file, self.world = file, world
        self.rows = rows_of(file) if file.exists() else []
        dist.barrier()  # nobody writes before all have read

    def of(self, cell: Cell) -> list[Row]:
        named = self._named(cell)
        return [row for row in self.rows if row.items() >= named.items()]

    def add(self, cell: Cell, row: Row) -> Row:
        made = {**self._named(cell), "torch": torch.__version__, **row}
        self.rows.append(made)
        return made

    def write(self, row: Row) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _named(self, cell: Cell) -> Row:
        return {
            "device": self.world.kind,
            "ranks": self.world.ranks,
            "layer": cell.model.title,
            "tokens": cell.tokens,
            "passes": cell.passes,
            "routing": cell.routing,
        }


def _chosen(args: argparse.Namespace, cell: Cell, world: World) -> Ways:
    named = {**dict(ways(world, cell.model.slots, cell.passes)), "transformers": {}}
    return {way: options for way, options in named.items() if way.split()[0] in args.ways}


def measure_all(args: argparse.Namespace, world: World) -> None:
    end = time.monotonic() + args.seconds
    found, layers = Found(args.out, world), Layers(world)
    clocks = {passes: Clock(world) for passes in PASSES}

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    say(f"{world.ranks} x {world.kind}, torch {torch.__version__}\n\n{table(HEAD, [])}")
    for cell in cells(args):
        done = {row["way"] for row in found.of(cell)}
        named = _chosen(args, cell, world)
        rows = measure(world, layers, cell, named, done, clocks[cell.passes])
        try:
            while not (late := world.slowest(float(time.monotonic() > end))):
                if (row := next(rows, None)) is None:
                    break
                row = found.add(cell, row)
                if world.rank == 0:
                    found.write(row)
                say(line(row))
        except Exception as error:  # of this rank; the others wait for it
            done = {row["way"] for row in found.of(cell)}
            way = next(w for w in named if w not in done)
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            found.write(found.add(cell, {"way": way, "failed": why}))
            raise
        for reached in goals(found.of(cell)):
            say(f"symmetric: {_line(reached[3:])}")
        if late:
            say("not all cells are there: run it again")
            return
    say("all cells are there")


# Tables -------------------------------------------------------------------------------------------


def rows_of(file: Path) -> list[Row]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def named(row: Row) -> list[str]:
    """The columns of a cell."""
    layer = row["layer"] + ("" if row["routing"] == "uniform" else f", {row['routing']}")
    graphs = row.get("graphs", True) or row["device"] == "CPU"
    return [layer, f"{row['tokens']:,}", PASSES[row["passes"]] + ("" if graphs else ", eager")]


def line(row: Row) -> str:
    """Of the table."""
    if "failed" in row:
        return _line([*named(row), row["way"], row["failed"]])
    ep, local, one = row["ep"], row["local"], row["one"]
    errors = f"{row['error']:.0e}"
    wrong = row["error"] > LIMIT
    if row["gradients"] is not None:
        errors += f", {row['gradients']:.0e}"
        wrong |= row["gradients"] > GRADIENTS_LIMIT
    if row["dropped"]:
        errors += f", {row['dropped']} dropped"
    elif wrong:
        errors += " WRONG"
    times = [_us(ep), _us(local), f"{ep / local:.2f}", _us(row["collectives"])]
    whole = [_us(one), f"{one / ep:.2f}", _us(row["transformers"])]
    return _line([*named(row), row["way"], *times, *whole, errors])


def _us(time: float | str | None) -> str:
    return f"{time:,.0f}" if isinstance(time, float) else time or ""


def _line(columns: Iterable[str]) -> str:
    return f"| {' | '.join(columns)} |"


def goals(rows: Sequence[Row]) -> list[list[str]]:
    """What "symmetric" reaches in each of some cells that have it."""
    return [
        reached
        for _, of_cell in groupby(rows, named)
        if (reached := _goals({row["way"]: row for row in of_cell if "ep" in row}))
    ]


def _goals(ways: dict[str, Row]) -> list[str] | None:
    if "symmetric" not in ways:
        return None
    row, in_float32 = ways["symmetric"], ways.get("symmetric float32")
    ep, local, tokens, forward = row["ep"], row["local"], row["tokens"], row["passes"] in FORWARDS
    goal, faster, more = "", "", FASTER.get(tokens) if forward else FASTER_IN_TRAINING
    if forward and tokens in OF_LOCAL:
        ratio, us = OF_LOCAL[tokens]
        either = f"{ratio:.2f}" + (f" or +{us} us" if us else "")
        goal = f"{either}: {_reached(ep / local <= ratio or ep - local <= us)}"
    others = [r["ep"] for way, r in ways.items() if way.startswith("all_") and not r["dropped"]]
    times = min(others) / ep if others else 0
    if times and more:
        faster = f"{more}: {_reached(times >= more)}"
    return [
        *named(row),
        f"{ep / local:.2f} ({ep - local:+,.0f} us)",
        f"{in_float32['ep'] / local:.2f}" if in_float32 else "",
        goal,
        f"{times:.2f}" if times else "",
        faster,
    ]


def _reached(goal: bool) -> str:
    return "reached" if goal else "missed"


def page(files: Sequence[Path]) -> None:
    """Writes the tables of runs."""
    rows = [row for file in files for row in rows_of(file) if "ep" in row]
    layers, orders = [m.title for m in MODELS_BY_NAME.values()], [*PASSES]

    def place(row: Row) -> tuple[Any, ...]:
        cell = layers.index(row["layer"]), orders.index(row["passes"]), row["tokens"]
        return row["ranks"], row["device"], row["torch"], row["routing"], cell

    parts = []
    for (ranks, device, version), of_run in groupby(
        sorted(rows, key=place), lambda r: place(r)[:3]
    ):
        found = [*of_run]
        parts += [
            f"## {ranks} x {device}, torch {version}",
            "\n".join([table(HEAD, []), *map(line, found)]),
            "What `symmetric` reaches:",
            table(GOALS_HEAD, goals(found)),
        ]
    print(write("parallel", "benchmarks/h100_parallel.py", *parts))


# --------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, **where: Any) -> None:
    """What each rank does. where: how ranks meet, unless torchrun says it."""
    cuda = args.device == "cuda"
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if cuda else None)
    if cuda:
        os.environ |= NO_MULTICAST  # before NCCL makes a communicator
        torch.cuda.set_device(device)
    backend, bound = ("nccl", device) if cuda else ("gloo", None)
    dist.init_process_group(backend, device_id=bound, timeout=WAIT, **where)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    measure_all(args, World(mesh, device))
    dist.destroy_process_group()


def _started(rank: int, args: argparse.Namespace, ranks: int, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    run(args, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def main() -> None:
    """Starts the ranks, unless torchrun did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/h100_parallel.jsonl"),
        help="where a run goes on; %(default)s",
    )
    several: dict[str, Any] = {"nargs": "+"}
    models = [*MODELS_BY_NAME][:2]
    parser.add_argument("--models", choices=models, default=models, **several)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each rank", **several)
    parser.add_argument("--passes", choices=PASSES, default=["forward", "lora"], **several)
    parser.add_argument("--routing", choices=("uniform", "zipf"), default=["uniform"], **several)
    parser.add_argument("--ways", choices=WAYS, default=WAYS, **several)
    parser.add_argument("--seconds", type=float, default=480, help="no way starts afterwards")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes without torchrun; one for each GPU"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.jsonl", help="write the tables of runs", **several
    )
    parser.add_argument("--tiny", action="store_true", help="a small layer")
    args = parser.parse_args()
    if args.page:
        page(args.page)
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        run(args)
    else:
        ranks = args.ranks or torch.cuda.device_count() or 1
        with TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_started, (args, ranks, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
