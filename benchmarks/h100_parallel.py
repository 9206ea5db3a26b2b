"""Experts of one layer in NVFP4 divided between the GPUs of a node, beside what they compute and
what they send, each alone.

    python benchmarks/h100_parallel.py [--out FILE.jsonl] [--models qwen3-235b ...] [--tokens 1 32
        128 8192] [--minutes 5]
    torchrun --nproc-per-node 4 benchmarks/h100_parallel.py ...      the same; without torchrun a
        process for each GPU is started
    python benchmarks/h100_parallel.py --page FILE.jsonl             writes what a run found to
        docs/scaling.md
    python benchmarks/h100_parallel.py --device cpu --ranks 2 --tiny    over gloo

Cells: tokens of all ranks together, routing as --routing says, bf16. Ways: "replicated", all ranks
have all tokens, as in decoding under tensor parallelism, and add up with an all-reduce;
"all_gather" and "all_to_all", each rank has its part of the tokens (docs/guides/distributed.md; the
number behind is the capacity); "symmetric", through memory that the ranks share. A line below a
cell compares that with its local time and with the better of the two. Columns, medians of calls in
CUDA graphs, the slowest rank's:

    EP              a call of the divided module
    local           the same without its collectives: this rank's experts on the tokens that it gets
    collectives     NCCL alone, for the same bytes; of "symmetric" the exchange without experts
    EP / both       EP's time in that of local + collectives
    one             all experts on one GPU with all tokens, and how many times faster EP is
    transformers    its experts in bf16 by torch's grouped_mm with its expert parallelism: ids of
                    other ranks are masked, an all-reduce
    error           relative Frobenius error of EP's result against that of one GPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from h200_cells import MODELS, Model
from results import write
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusion_moe
from fusion_moe.distributed import parallelize_
from fusion_moe.distributed.all_to_all import AllToAll
from fusion_moe.distributed.symmetric import Exchange
from fusion_moe.encodings import NVFP4, Quantized, dequantize
from fusion_moe.ir.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from fusion_moe.nn import NVFP4Experts

LAYERS = {
    "qwen3-235b": Model("Qwen3-235B-A22B", 128, 8, 4096, 1536),
    "deepseek": MODELS["deepseek"],
    "tiny": Model("tiny", 16, 4, 128, 64),
}
TOKENS, LIMIT = (1, 32, 128, 8192), 1e-2
MOST_REPEATS, SECONDS = 30, 0.3
HEAD = (
    "| layer | tokens | way | EP us | local us | collectives us | EP / both | one us | times "
    "faster | transformers us | error |"
)
RULE = "|---" * (HEAD.count("|") - 1) + "|"
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class World:
    """The ranks, and where they compute."""

    mesh: DeviceMesh
    device: torch.device

    @property
    def kind(self) -> str:
        """What computes."""
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_rank()

    @property
    def group(self) -> str:
        return str(self.mesh.get_group().group_name)

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        t = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return float(t)

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of all tokens."""
        return [t.chunk(self.ranks)[self.rank].contiguous() for t in tensors]


# Layers -------------------------------------------------------------------------------------------


def experts_of(model: Model, device: torch.device) -> NVFP4Experts:
    """All experts, the same on all ranks: any codes, decode scales such that products of normal
    numbers are about 1 in size.
    """
    g = torch.Generator(device).manual_seed(0)
    weights = []
    for n, k in model.products("mlp"):
        codes = torch.randint(
            0, 256, (model.experts, n, k // 2), dtype=torch.uint8, device=device, generator=g
        )
        scales = torch.randint(
            0x60, 0x7F, (model.experts, n, k // 16), dtype=torch.uint8, device=device, generator=g
        )
        decode = (torch.rand(model.experts, device=device, generator=g) + 0.5) / (
            600 * math.sqrt(k)
        )
        weights.append(Quantized(codes, scales.view(torch.float8_e4m3fn), decode, encoding=NVFP4))
    return NVFP4Experts(*weights)


def inputs_of(
    model: Model, tokens: int, device: torch.device, routing: str = "uniform"
) -> list[Tensor]:
    """x bf16[T, H], ids i64[T, k], w bf16[T, k] of all tokens, the same on all ranks. routing:
    "zipf": expert e is named as often as 1 / (1 + e) ** 1.2, in an order that is spread over ranks.
    """
    g = torch.Generator(device).manual_seed(tokens)
    scores = torch.rand(tokens, model.experts, device=device, generator=g).log()
    if routing == "zipf":
        order = torch.randperm(model.experts, device=device, generator=g)
        scores = scores * (order + 1).float() ** 1.2  # the largest of exponential variables
    ids = scores.topk(model.slots).indices
    w = torch.rand(tokens, model.slots, device=device, generator=g) + 0.1
    x = torch.randn(tokens, model.hidden, device=device, generator=g)
    return [x.bfloat16(), ids, (w / w.sum(1, keepdim=True)).bfloat16()]


class Theirs:
    """transformers' experts on their grouped_mm, and the steps of its expert parallelism."""

    def __init__(self, model: Model, whole: NVFP4Experts, world: World):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

        here = model.experts // world.ranks
        config = Qwen3MoeConfig(
            hidden_size=model.hidden,
            moe_intermediate_size=model.intermediate,
            num_experts=here,
            num_experts_per_tok=model.slots,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            self.module = Qwen3MoeExperts(config)
        self.module._is_expert_parallel = world.ranks > 1
        self.first, self.here, self.world = world.rank * here, here, world
        for name in ("gate_up", "down"):
            weight = whole.weight_of(name)
            shares = [
                weight.of(t[e : e + 1] for t in weight)
                for e in range(self.first, self.first + here)
            ]
            made = torch.empty((here, *weight.shape[1:]), dtype=torch.bfloat16, device=world.device)
            for e, share in enumerate(shares):
                made[e] = dequantize(share, torch.bfloat16)[0]
            setattr(self.module, f"{name}_proj", nn.Parameter(made, requires_grad=False))

    def __call__(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """As AllReduceEP of 5.21; before, the hook of the router masks."""
        away = ids // self.here != self.world.rank
        y = self.module(x, torch.where(away, self.here, ids - self.first), w.masked_fill(away, 0))
        return all_reduce(y, self.world.group, self.world.ranks)


# Ways ---------------------------------------------------------------------------------------------


def ways(world: World, model: Model, tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the options of parallelize_."""
    yield "replicated", {}
    if tokens % world.ranks == 0:
        yield "all_gather", {"tokens": "sharded"}
        mean = 1 - (1 - 1 / world.ranks) ** model.slots
        for capacity in dict.fromkeys((1.0, min(1.0, round(4 / 3 * mean, 2)))):
            yield (
                f"all_to_all {capacity}",
                {"tokens": "sharded", "dispatch": "all_to_all", "capacity": capacity},
            )
        yield "symmetric", {"tokens": "sharded", "dispatch": "symmetric"}


def alone(
    world: World, module: Any, options: dict[str, Any], given: list[Tensor]
) -> tuple[Call, Call]:
    """What a rank computes on the tokens that come to it, and the collectives of a call."""
    # without the collectives that are around it
    inner, group, ranks = type(module).forward, world.group, world.ranks
    if not options:
        y = torch.empty_like(given[0])
        return partial(inner, module, *given), partial(all_reduce, y, group, ranks)
    if options.get("dispatch") != "all_to_all":
        there = [all_gather(t, group, ranks) for t in given]
        if "dispatch" in options:
            return partial(inner, module, *there), exchange_alone(world, module, given)
        y = torch.empty_like(there[0])

        def both() -> Tensor:
            for t in given:
                all_gather(t, group, ranks)
            return reduce_scatter(y, group, ranks)

        return partial(inner, module, *there), both
    rows, _ = AllToAll(
        group, ranks, world.ranks * len(module.down_proj), options["capacity"]
    ).dispatch(module, tuple(given))

    def there_and_back() -> Tensor:
        for t in rows:
            all_to_all(t, group, ranks)
        return all_to_all(rows[0], group, ranks)

    return partial(inner, module, *rows), there_and_back


def exchange_alone(world: World, module: Any, given: list[Tensor]) -> Call:
    """Tokens there, and sums as large back, without experts."""
    experts = world.ranks * len(module.down_proj)
    (x, ids, w), group = given, world.mesh.get_group()
    layer = Exchange.of_group(group, world.device).layer(experts, x.shape[1])
    layer.need(len(x), x.element_size())
    fd = fusion_moe.FusionDefinition()
    values = [fd.define_tensor(shape=t.shape, dtype=t.dtype) for t in (x, ids, w, layer.peers)]
    ranks, how = fd.define_groups("ranks", world.ranks, len(x)), {"experts": experts}
    how |= {"group": world.group}
    rows, all_ids, _, ends = fd.ops.dispatch(*values, groups=ranks, **how)
    fd.add_output(fd.ops.combine_from(rows, all_ids, values[1], ends, values[3], **how))
    fusion = fd.fusion()
    return lambda: fusion_moe.run(fusion, [x, ids, w, layer.peers])[0]


def measure(
    world: World,
    model: Model,
    whole: NVFP4Experts,
    theirs: Theirs | str,
    tokens: int,
    routing: str = "uniform",
) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    all_given = inputs_of(model, tokens, world.device, routing)
    want = whole(*all_given)
    one = microseconds(world, partial(whole, *all_given))
    peer: Any = theirs
    if isinstance(theirs, Theirs):
        try:
            peer = microseconds(world, partial(theirs, *all_given))
        except Exception as error:  # a line of the table, whatever it is
            peer = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    for name, options in ways(world, model, tokens):
        module = deepcopy(whole)
        parallelize_(module, world.mesh, **options)
        given = world.own(all_given) if options else all_given
        found, expected = module(*given), world.own([want])[0] if options else want
        error = world.slowest(
            float((found.float() - expected.float()).norm() / expected.float().norm())
        )
        local, collectives = alone(world, module, options, given)
        times = {"ep": partial(module, *given), "local": local, "collectives": collectives}
        yield {
            "device": world.kind,
            "torch": torch.__version__,
            "ranks": world.ranks,
            "layer": model.title + (f", {routing}" if routing != "uniform" else ""),
            "tokens": tokens,
            "way": name,
            "error": error,
            "one": one,
            "transformers": peer,
            "dropped": int(world.slowest(int(getattr(module, "dropped", 0)))),
            **{k: microseconds(world, f) for k, f in times.items()},
        }


# Times --------------------------------------------------------------------------------------------


@torch.no_grad()
def microseconds(world: World, call: Call) -> float:
    """A median, of the slowest rank."""
    return world.slowest((_of_graphs if world.device.type == "cuda" else _of_calls)(world, call))


def _of_calls(world: World, call: Call) -> float:
    times = []
    for _ in range(7):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e6


def _of_graphs(world: World, call: Call) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        call()
        end.record()
        end.synchronize()
    calls = int(world.slowest(max(1, min(16, 2 / max(start.elapsed_time(end), 0.05)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    repeats = int(world.slowest(max(5, min(MOST_REPEATS, SECONDS * 1e3 / start.elapsed_time(end)))))
    times = []
    for _ in range(repeats):
        dist.barrier()  # ranks start together
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times) * 1e3


# --------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    ep, both, peer = row["ep"], row["local"] + row["collectives"], row["transformers"]
    times = (
        f"{ep:,.0f} | {row['local']:,.0f} | {row['collectives']:,.0f} | {ep / both:.2f} | "
        f"{row['one']:,.0f} | {row['one'] / ep:.2f}"
    )
    left_out = f", {row['dropped']} dropped" if row["dropped"] else ""
    error = f"{row['error']:.0e}{left_out}" + (
        "" if row["error"] <= LIMIT or row["dropped"] else " WRONG"
    )
    peer = f"{peer:,.0f}" if isinstance(peer, float) else peer
    return f"| {row['layer']} | {row['tokens']} | {row['way']} | {times} | {peer} | {error} |"


def compared(rows: Sequence[dict[str, Any]]) -> str:
    """A line about "symmetric" in one cell; "" if it is not there."""
    times = {row["way"]: row["ep"] for row in rows if row["way"] != "replicated"}
    found = next((row for row in rows if row["way"] == "symmetric"), None)
    others = [time for way, time in times.items() if way != "symmetric"]
    if not found or not others:
        return ""
    ep, local = found["ep"], found["local"]
    return (
        f"symmetric: {ep / local:.2f} of local, {ep - local:+,.0f} us; {min(others) / ep:.2f} "
        "times as fast as the better of the collectives"
    )


def page(file: Path) -> None:
    """Writes the table of a run."""
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    title = f"{rows[0]['ranks']} x {rows[0]['device']}, torch {rows[0]['torch']}:"
    print(
        write(
            "parallel",
            "benchmarks/h100_parallel.py",
            title,
            "\n".join([HEAD, RULE, *map(line, rows)]),
        )
    )


def run(args: argparse.Namespace, **where: Any) -> None:
    """What each rank does. where: how ranks meet, unless torchrun says it."""
    device = torch.device(
        args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        **where,
    )
    world = World(init_device_mesh(device.type, (dist.get_world_size(),)), device)
    until = time.monotonic() + 60 * args.minutes
    if world.rank == 0:
        print(
            f"{world.ranks} x {world.kind}, torch {torch.__version__}\n\n{HEAD}\n{RULE}", flush=True
        )
    for name in ["tiny"] if args.tiny else args.models:
        model = LAYERS[name]
        whole = experts_of(model, device)
        try:
            theirs: Theirs | str = Theirs(model, whole, world)
        except (ImportError, AttributeError, TypeError) as error:
            theirs = f"{type(error).__name__}: {error}"
        for tokens in args.tokens:
            if world.slowest(float(time.monotonic() > until)):
                break
            rows = []
            for row in measure(world, model, whole, theirs, tokens, args.routing):
                rows.append(row)
                if world.rank == 0:
                    print(line(row), flush=True)
                    with args.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            if world.rank == 0:
                print(compared(rows), flush=True)
        del whole, theirs
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
        help="lines are added; %(default)s",
    )
    parser.add_argument(
        "--models", nargs="+", choices=tuple(LAYERS), default=["qwen3-235b", "deepseek"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform")
    parser.add_argument("--minutes", type=float, default=5, help="no cell starts afterwards")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes without torchrun; one for each GPU"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE.jsonl", help="write the table of a run, and run nothing"
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
