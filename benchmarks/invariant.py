"""What order="row" costs: layers of NVFP4 experts, by tokens, with the option order "free" and
"row"; and whether rows keep their bits.

    python benchmarks/invariant.py [--device cuda] [--models qwen3 ...] [--tokens 1 8 ...]
        [--cases auto-bfloat16 avx2-float32 ...] [--threads 1] [--repeats 7] [--no-page]
    python benchmarks/invariant.py --bits nvfp4 mxfp4  # hashes of results, to compare machines

On a GPU (h200_cells.py has the models) calls rotate over layers and routings in CUDA graphs; on a
CPU (cpu_moe.py) they are timed one by one, in CPU time for one thread. Both orders take turns.
Before that, bits of the first tokens, each in a call by itself, are compared with those in calls of
2 to 8,192 tokens.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import results
import torch
from torch import Tensor

from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.nn import Experts, prepare_
from fusion_moe.runtime import isa

ORDERS = ("free", "row")
FEW = 256  # tokens
TOKENS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
TOKENS["cpu"] = TOKENS["cuda"][:11]
ALONE, COMPARED = 8, (2, 7, 16, 33, 100, 256, 700, 2048, 8192)
Run = Callable[..., Tensor]  # x, ids, w -> y


def differing(run: Run, x: Tensor, ids: Tensor, w: Tensor) -> int:
    """How many of the first tokens have other bits in some larger call than alone."""
    alone = torch.cat([run(*(t[i : i + 1] for t in (x, ids, w))) for i in range(ALONE)])
    differ = torch.zeros(ALONE, dtype=torch.bool, device=x.device)
    for count in (c for c in COMPARED if c <= len(x)):
        n = min(count, ALONE)
        y = run(x[:count], ids[:count], w[:count])
        differ[:n] |= (y[:n] != alone[:n]).any(1)
    return int(differ.sum())


class OnGPU:
    """Layers of a model on the GPU, calls in graphs."""

    def __init__(self, name: str):
        import h200_cells
        import h200_contenders

        model = h200_cells.MODELS[name]
        self.title, self.cell = model.title, partial(h200_cells.Cell, name, "mlp")
        self.routed, self.ours = (
            h200_cells.routed,
            h200_contenders.Ours(model, h200_cells.Layers(model, model.layers)),
        )

    def prepare(self, tokens: Sequence[int]) -> None:
        """Compiles all kernels at once."""
        cells = [self.cell(t, "uniform") for t in {*tokens, *COMPARED, 1} if t <= max(tokens)]
        for order in ORDERS:
            with options.override(order=order):
                self.ours.prepare(cells)

    def rows(self, count: int) -> tuple[Tensor, ...]:
        to = self.routed(self.cell(count, "uniform"))[0]
        return to.x, to.ids, to.w

    def run(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        layer = self.ours.weights[0]
        return torch.ops.fusion_moe.expert_mlp(
            x, ids, w, *layer.gate_up, *layer.down, weight_layout=self.ours.layout
        )

    def times(self, tokens: int, repeats: int) -> dict[str, float]:
        """Microseconds of a call, by order."""
        from cuda_graphs import capture, medians

        cell, graphs = self.cell(tokens, "uniform"), {}
        to = self.routed(cell)
        count = min(32, max(len(self.ours.layers), math.ceil(1e-3 / cell.floor(to[0].touched))))
        for order in ORDERS:
            with options.override(order=order):
                calls = [
                    self.ours.run(cell, i % len(self.ours.layers), to[i % len(to)]).run
                    for i in range(count)
                ]
                graphs[order] = capture(calls)
        return medians(graphs, repeats)


class OnCPU:
    """A model's layer on the CPU, and a copy for each second call."""

    def __init__(self, name: str, dtype: torch.dtype):
        import cpu_moe

        self.model, self.dtype = cpu_moe.MODELS[name], dtype
        self.title, self.calls = self.model.name, partial(cpu_moe.calls, self.model)
        weights = cpu_moe.random_weights(cpu_moe.NVFP4, self.model)
        self.layers = [cpu_moe.ours(w, "bf16") for w in (weights, cpu_moe.copied(weights))]

    def prepare(self, tokens: Sequence[int]) -> None:
        """Nothing: a call of any size compiles all."""

    def rows(self, count: int) -> tuple[Tensor, ...]:
        ((x, ids, w),) = self.calls(count, 1)
        return x.to(self.dtype), ids, w

    def run(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return self.layers[0](x, ids, w)

    def times(self, tokens: int, repeats: int) -> dict[str, float]:
        """Microseconds of a call, by order."""
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        calls = [(x.to(self.dtype), ids, w) for x, ids, w in self.calls(tokens, 4)]
        count = max(1, 32 // tokens)
        found: dict[str, list[float]] = {order: [] for order in ORDERS}
        for _, order in itertools.product(range(repeats), ORDERS):
            with options.override(order=order):
                self.layers[1](*calls[-1])
                start = clock()
                for i in range(count):
                    self.layers[i % 2](*calls[i % len(calls)])
                found[order].append((clock() - start) / count * 1e6)
        return {order: statistics.median(us) for order, us in found.items()}


def mean(ratios: Sequence[float]) -> str:
    """The geometric mean, for people."""
    return f"{statistics.geometric_mean(ratios):.2f}" if ratios else ""


def measured(
    made: OnGPU | OnCPU, title: str, tokens: Sequence[int], repeats: int
) -> tuple[list[str], str]:
    """A line of the table, and what became of the bits."""
    made.prepare(tokens)
    rows, differ = made.rows(max(tokens)), []
    for order in ORDERS:
        with torch.no_grad(), options.override(order=order):
            differ.append(f"{differing(made.run, *rows)} ({order})")
    bits = f"{title}: of {ALONE} tokens, so many have other bits among others: {', '.join(differ)}"
    print(bits, flush=True)
    cells, ratios = list[str](), dict[int, float]()
    for t in tokens:
        us = made.times(t, repeats)
        ratios[t] = us["row"] / us["free"]
        cells.append(f"{us['free']:.1f}, {ratios[t]:.2f}")
        print(title, t, us, cells[-1], flush=True)
    means = [mean([r for t, r in ratios.items() if (t <= FEW) == few]) for few in (True, False)]
    print(title, means, flush=True)
    return [title, *cells, *means], bits


def digest(tensors: Iterable[Tensor]) -> str:
    """Of their bytes."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def print_bits(device: str, encodings: Sequence[str]) -> None:
    """Of results, by encoding and order. What is multiplied is made of whole numbers on the CPU, so
    that it is the same on all machines.
    """
    print(torch.cuda.get_device_name() if device == "cuda" else isa.selected())
    g = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=g) / 64

    x, ids = whole(COMPARED[-1], 2048).bfloat16(), torch.randint(8, (COMPARED[-1], 1), generator=g)
    ids, w = torch.cat([ids, (ids + 3) % 8], 1), whole(COMPARED[-1], 2)
    floats = [whole(8, 1536, 2048) / 8, whole(8, 2048, 768) / 8]
    counts = [c for c in COMPARED if device == "cuda" or c <= FEW]
    for name in encodings:
        layer = Experts(*(quantize(t, ENCODINGS[name]) for t in floats))
        given = digest(layer.state_dict().values())
        layer = layer.to(device)
        prepare_(layer)
        for order in ORDERS:
            with torch.no_grad(), options.override(order=order):
                rows = [[t[:count].to(device) for t in (x, ids, w)] for count in counts]
                found = digest(layer(*r) for r in rows)
                print(f"{name}, weights {given}, order {order}: {found}", flush=True)


def main() -> None:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default=here, choices=list(TOKENS))
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--cases", nargs="+", default=["auto-bfloat16", "auto-float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument("--bits", nargs="+", choices=ENCODINGS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if asked.bits:
        print_bits(asked.device, asked.bits)
        return
    tokens, found = asked.tokens or TOKENS[asked.device], list[tuple[list[str], str]]()
    if asked.device == "cuda":
        where = torch.cuda.get_device_name()
        for name in asked.models or ("qwen3", "gpt-oss", "mixtral"):
            made = OnGPU(name)
            found.append(measured(made, made.title, tokens, asked.repeats))
    else:
        where = f"a CPU, threads: {asked.threads}"
        for name, case in itertools.product(asked.models or ("qwen3",), asked.cases):
            tier, dtype = case.split("-")
            with options.override(cpu_isa=tier):
                made, title = OnCPU(name, getattr(torch, dtype)), f"{isa.selected()}, {dtype}"
                title = f"{made.title}, {title}"
                found.append(measured(made, title, tokens, asked.repeats))
    head = ["", *(f"{t:,}" for t in tokens), f"mean up to {FEW}", "above"]
    table = results.table(head, [line for line, _ in found])
    print(table)
    if not asked.no_page:
        about = (
            f"On {where}, {datetime.date.today()}: microseconds of a layer in free order, by "
            "tokens, and in row order as a multiple of these; geometric means of the multiples."
        )
        bits = "\n".join(f"- {said}" for _, said in found)
        results.write(
            f"row_order_{asked.device}", "python benchmarks/invariant.py", about, table, bits
        )


if __name__ == "__main__":
    main()
