"""What benchmarks/offload.py measures: layers with made-up weights in the sizes of large models,
their routings, and the machine that they run on: a GPU, or the CPU in place of one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fusion_moe import synchronize
from fusion_moe.encodings import ENCODINGS, Quantized
from fusion_moe.nn import Experts
from fusion_moe.offload import machine as machines
from fusion_moe.offload.device import Device, HostStorage
from fusion_moe.offload.pretended import Pretended
from fusion_moe.offload.split import Constants
from fusion_moe.offload.worker import Worker
from fusion_moe.runtime.host_memory import pages

SMALL = Path(__file__).parents[1] / "examples" / "tiny_qwen3_moe"
CAPACITY, SPARE = 512, 16
NEVER = 10**10  # nanoseconds: a way that is never chosen
_IDLE = 30_000  # microseconds that the worker stays awake
_RECORDED = 512  # tokens of a recorded sequence


@dataclass(frozen=True)
class Sizes:
    """Of a layer; of_token: experts of a token."""

    encoding: str
    experts: int
    of_token: int
    hidden: int
    inner: int


MODELS = {
    "deepseek-v3": Sizes("nvfp4", 256, 8, 7168, 2048),
    "gpt-oss-120b": Sizes("mxfp4", 128, 4, 2880, 2880),
    "qwen3-235b": Sizes("nvfp4", 128, 8, 4096, 1536),
}


def module(sizes: Sizes) -> Experts:
    """Experts on the CPU, all of which have the same few random bytes."""
    of, experts = ENCODINGS[sizes.encoding], sizes.experts

    def weight(n: int, k: int) -> Quantized:
        parts = []
        for part in of.parts:
            t = pages.empty(of.part_shape(part, (experts,), n, k), part.dtype)
            if part.of_matrix:
                t.fill_(2.0**-6)
            elif part.of_blocks:
                t.view(torch.uint8).fill_(0x38 if sizes.encoding == "nvfp4" else 121)
            else:
                row = torch.randint(0, 256, (t[0].numel(),), dtype=torch.uint8)
                t.view(experts, -1).copy_(row)
            parts.append(t)
        return Quantized(*parts, encoding=of)

    made = Experts(weight(2 * sizes.inner, sizes.hidden), weight(sizes.hidden, sizes.inner))
    made.order()
    return made


class SharedHome(HostStorage):
    """A storage whose devices have the same slots: their steps follow each other."""

    def __init__(self, of: Experts):
        super().__init__(of)
        self._slots: dict[int, dict[str, Tensor]] = {}

    def empty(self, slots: int, device: torch.device | str) -> dict[str, Tensor]:
        """As in `HostStorage`; the same for the same number."""
        if slots not in self._slots:
            self._slots[slots] = super().empty(slots, device)
        return self._slots[slots]

    def drop(self, slots: int) -> None:
        """Keeps only slots of this number."""
        self._slots = {n: t for n, t in self._slots.items() if n == slots}


# Routings -----------------------------------------------------------------------------------------


def drawn(routing: str, sizes: Sizes, tokens: int, steps: int) -> Tensor:
    """ids i64[steps, tokens, k] by "uniform", "zipf" (exponent 1.2) or "recorded"; expert 0 is
    named most often.
    """
    experts, k = sizes.experts, sizes.of_token
    if routing == "recorded":
        return _by_use(recorded(experts, k, tokens, steps), experts)
    exponent = {"zipf": 1.2, "uniform": 0.0}[routing]
    weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    g = torch.Generator().manual_seed(0)
    found = torch.multinomial(weights.expand(steps * tokens, -1), k, generator=g)
    return found.view(steps, tokens, k)


def recorded(experts: int, k: int, tokens: int, steps: int) -> Tensor:
    """ids i64[steps, tokens, k] that texts make: `tokens` sequences, step by step; of one step, one
    sequence after the other.

    The small model has 16 experts. An expert here is a pair of one of a layer and one, or some, of
    the next layer; a pair is as good as the sum of both.
    """
    first, second = _scores()
    others = second.unflatten(-1, (experts // 16, -1)).amax(-1)
    ids = (first[..., :, None] + others[..., None, :]).flatten(-2).topk(k).indices
    if steps == 1:
        return ids.flatten(0, 1)[None, :tokens]
    return ids[:tokens, :steps].transpose(0, 1)


@cache
@torch.no_grad()
def _scores() -> tuple[Tensor, Tensor]:
    """What routers of two layers of the small model make of texts, f32[sequences, tokens, 16]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # else nobody needs it

    model = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32).eval()
    lines = (SMALL / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = "".join(json.loads(line)["text"] for line in lines)
    ids = AutoTokenizer.from_pretrained(SMALL)(texts, return_tensors="pt").input_ids[0]
    ids = ids[: 64 * _RECORDED].view(-1, _RECORDED)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer, kept in zip(model.model.layers[1:3], found, strict=True):
        router = layer.mlp.gate.weight.T
        layer.mlp.register_forward_pre_hook(
            lambda _, args, kept=kept, router=router: kept.append(args[0] @ router)
        )
    for some in ids.split(8):
        model.model(some)
    return torch.cat(found[0]), torch.cat(found[1])


def _by_use(ids: Tensor, experts: int) -> Tensor:
    order = torch.bincount(ids.flatten(), minlength=experts).argsort(descending=True, stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(experts)
    return number[ids]


# Machines -----------------------------------------------------------------------------------------


class Gpu:
    """GPU 0: steps are replayed CUDA graphs."""

    device = "cuda"

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}  # by features
        # as if layers followed each other at once: between ours there are other ways
        Worker.of_process(idle=_IDLE)

    def rates(self, storage: HostStorage) -> Constants:
        return machines.of_gpu("cuda:0", storage).constants(storage.nbytes, storage.macs)

    def make(self, storage: HostStorage, slots: int, spare: int, costs: Constants) -> Device:
        from fusion_moe.offload.cuda import Cuda, shared_of

        if storage.features not in self._shared:
            at = torch.device(self.device, 0)
            self._shared[storage.features] = shared_of(storage, at, CAPACITY)
        made: Any = Cuda(storage, slots, spare, costs, self._shared[storage.features])
        return made

    def replayed(self, step: Callable[..., Tensor], *given: Tensor) -> Callable[[], object]:
        for _ in range(2):
            step(*given)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(*given)
        return graph.replay

    def microseconds(self, run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


class Pretend:
    """The CPU in place of a GPU, to try the benchmark: its numbers mean nothing."""

    device = "cpu"

    def rates(self, storage: HostStorage) -> Constants:
        return machines.PRETENDED.constants(storage.nbytes, storage.macs)

    def make(self, storage: HostStorage, slots: int, spare: int, costs: Constants) -> Device:
        return Pretended(storage, slots, spare, costs)

    def replayed(self, step: Callable[..., Tensor], *given: Tensor) -> Callable[[], object]:
        return lambda: step(*given)

    def microseconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6


def filled(device: Device, slots: int) -> Device:
    """A device that has the first experts."""
    for expert in range(slots):
        device.load(expert, expert)
    table = torch.full((device.storage.experts,), -1, dtype=torch.int32)
    table[:slots] = torch.arange(slots)
    device.publish(table)
    return device


def link_of(on: Gpu | Pretend, storage: HostStorage) -> float:
    """GB/s of copies of a GiB to the device, or of as much as the largest tensor has."""
    largest = max(storage.tensors.values(), key=lambda t: t.nbytes)
    source = largest.view(torch.uint8).flatten()[: 2**30]
    to = torch.empty_like(source, device=on.device)
    copies = [on.microseconds(lambda: to.copy_(source, non_blocking=True)) for _ in range(5)]
    return source.nbytes / median(copies) / 1e3


def ways_of(rates: Constants) -> Mapping[str, Constants]:
    """What may be done with misses: divided, all computed by the CPU, all copied."""
    return {
        "split": rates,
        "cpu": replace(rates, copy_start=NEVER),
        "copy": replace(rates, cpu_start=NEVER),
    }


class Direct:
    """A layer's slots without any of this: the operation on ids that are all there, and plain
    offloading as others do it, rebuilt.
    """

    def __init__(self, device: Device, there: int):
        made: Any = device
        self.storage, self.slots, self.there = device.storage, made.slots, there
        self._stored = self.storage.tensors | getattr(
            made, "_there", {}
        )  # few bytes are on the GPU
        self._layout = getattr(made, "layout", "") or "linear"

    def plain(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """The operation."""
        given = self.storage.arguments(x, ids, w, self.slots, weight_layout=self._layout)
        found: Tensor = torch.ops.fusion_moe.fused_experts(**given)
        return found

    def offloading(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """Ids go to the host, which has the copy engine bring what misses, and launches the
        operation then. Bytes are taken to be in the order of the GPU's kernels on the host, so that
        the time is right and the result is not.
        """
        e = self.storage.experts
        missed = [n for n in ids.flatten().unique().tolist() if n >= self.there]
        table = torch.arange(e)
        table[missed] = torch.arange(self.there, self.there + len(missed))
        for slot, expert in enumerate(missed, self.there):
            for name, t in self._stored.items():
                self.slots[name][slot].copy_(t[expert], non_blocking=True)
        return self.plain(x, table.to(ids.device)[ids], w)
