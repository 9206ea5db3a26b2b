"""Device, the interface: what the module of offloaded experts (experts.py) asks of a GPU (cuda.py)
or of its stand-in (pretended.py). And HostStorage, the experts in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..definitions.operations import each_tensor
from ..encodings.encoded import plain
from ..nn import Experts
from .long_steps import missed_of
from .split import Constants, Split, split
from .steps import Steps, steps_of

_CAST = ("gate_up_bias", "down_bias")  # to the dtype of activations


@dataclass
class Counters:
    """What steps did. hits, misses: slots of tokens; copied, computed: experts that missed; loaded:
    experts that the cache fetched; cpu_ns: of the host's products; wait_ns: of the device for them.
    """

    steps: int = 0
    hits: int = 0
    misses: int = 0
    copied: int = 0
    computed: int = 0
    loaded: int = 0
    bytes_copied: int = 0
    cpu_ns: int = 0
    wait_ns: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of slots whose expert was on the device; 1 if there were none."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Device(Protocol):
    """One layer's part of a device: slots for experts, a table of where each expert is, and the
    steps of a layer.
    """

    storage: HostStorage
    constants: Constants
    counters: Counters
    spare: int  # slots for what one step copies
    limit: int | None  # how many experts a short step copies at most; None: all
    on: torch.device
    slots: dict[str, Tensor]
    layout: str  # of weights in slots; "": as on the host
    copies_itself: bool  # whether `fetch` returns before the host has read what it copies

    @property
    def expert_map(self) -> Tensor:
        """i32[E]: the cache slot of each expert in the table that steps read now; -1 for experts
        that are not on the device.
        """

    def steps(self, x: Tensor, ids: Tensor, w: Tensor) -> Steps:
        """The programs of a step with such tensors."""

    def step(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """x [T, H], ids int[T, k], w [T, k] -> [T, H], on the device."""

    def load(self, slot: int, expert: int) -> None:
        """Begins to copy an expert into a slot that the table in use does not name."""

    def publish(self, expert_map: Tensor) -> None:
        """Makes expert_map i32[E] the table of the next steps; all that was loaded is there."""

    def uses(self) -> Tensor:
        """i64[E]: how many of the tokens' choices named each expert since this was last asked."""

    def fetch(self, experts: Sequence[int], arrival: Mapping[str, Tensor]) -> None:
        """Copies experts, as they are on the host, to their places among all in `arrival`."""

    def unpacker(
        self, arrival: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Callable[[int, int], None]:
        """What puts the experts from a first one on, so many, into the layout of slots."""

    def from_slots(
        self, slots: Tensor, experts: Tensor, weights: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """What copies slots int[n] of the cache to the places of experts int[n] among all."""

    def complete(self, arrival: Mapping[str, Tensor]) -> None:
        """Adds what is on the device of all experts anyway."""


class HostStorage:
    """The experts of a module in the host's memory, as arguments of `fused_experts`.

    tensors: those with an entry for each expert, by name (gate_up[0], ..., down_bias).
    """

    def __init__(self, module: Experts):
        up, down = (module._operand(name, of_fp8=False) for name in module.projections)
        how = module._arguments(_like_biases(module)) | module._format(of_fp8=False)
        inputs = {"gate_up": up, "down": down, **how}
        self.tensors = {name: plain(t) for name, t in each_tensor(inputs)}
        self._others = {name: v for name, v in inputs.items() if not _has_tensors(v)}
        self.experts = len(up[0])
        shapes = [module.shape_of(name) for name in module.projections]
        self.features = shapes[1][1]
        self.macs = sum(n * k for _, n, k in shapes)  # of one row by one expert
        self._steps: dict[Any, Steps] = {}
        for name, t in self.tensors.items():
            assert (len(t), t.is_contiguous()) == (self.experts, True), name

    @cached_property
    def nbytes(self) -> int:
        """The bytes of one expert."""
        return sum(t[0].nbytes for t in self.tensors.values())

    @property
    def in_files(self) -> list[Tensor]:
        """Those that lie in files (`pages.in_files`): GPUs do not read these by themselves."""
        return [t for t in self.tensors.values() if t.is_shared()]

    @property
    def weighs_input(self) -> bool:
        """Whether the router's weights multiply what experts get."""
        return self._others.get("scale_on") == "input"

    @property
    def format(self) -> str:
        """The encoding of the weights."""
        return str(self._others["weight_format"])

    @property
    def activation_format(self) -> str:
        """The format of activations in these experts' products, an `activation_format` of
        operations; "bf16" by default.
        """
        return str(self._others.get("activation_format", "bf16"))

    def empty(self, slots: int, device: torch.device | str) -> dict[str, Tensor]:
        """The same tensors for so many experts."""
        return {
            name: torch.zeros((slots, *t.shape[1:]), dtype=t.dtype, device=device)
            for name, t in self.tensors.items()
        }

    def arguments(
        self, x: Tensor, ids: Tensor, w: Tensor, tensors: Mapping[str, Tensor], **more: Any
    ) -> dict[str, Any]:
        """Those of a call of `fused_experts` with these tensors of experts."""
        results: dict[str, Any] = {"x": x, "ids": ids, "w": w}
        for name, t in self.cast(tensors, x.dtype).items():
            base, is_list, _ = name.partition("[")
            if is_list:
                results.setdefault(base, []).append(t)
            else:
                results[name] = t
        return results | self._others | more

    def cast(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The same tensors, those that activations are added to in their dtype."""
        return {name: t.to(dtype) if name in _CAST else t for name, t in tensors.items()}

    def compute(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """The operation itself, on the host."""
        return torch.ops.fusion_moe.fused_experts(**self.arguments(x, ids, w, self.tensors))

    def steps(
        self, x: Tensor, ids: Tensor, w: Tensor, slots: Mapping[str, Tensor], **more: Any
    ) -> Steps:
        """The programs of the device for tensors like these, any number of tokens. more: how it
        finds experts in slots.
        """
        key = x.dtype, ids.dtype, ids.shape[1], w.dtype, len(slots["down[0]"])
        if key not in self._steps:
            self._steps[key] = steps_of(self.arguments(x, ids, w, slots, **more))
        return self._steps[key]

    def given(
        self, x: Tensor, ids: Tensor, w: Tensor, slots: Mapping[str, Tensor], **more: Any
    ) -> dict[str, Tensor]:
        """The tensors of a call of the experts by their argument names, without arguments that are
        no tensors. slots: tensors of the cache.
        """
        return dict(each_tensor(self.arguments(x, ids, w, slots, **more)))


def decide(
    ids: Tensor, expert_map: Tensor, constants: Constants, spare: int, limit: int | None = None
) -> tuple[Split, Tensor]:
    """What a step with ids int[T, k] does with misses, and how many slots name each expert.
    expert_map i32[E]. Both on the CPU.
    """
    flat = ids.flatten()
    uses = torch.bincount(flat[flat >= 0], minlength=len(expert_map))
    missed = missed_of(uses, expert_map).tolist()
    rows = dict(zip(missed, uses[missed].tolist(), strict=True))
    there = int(((uses > 0) & (expert_map >= 0)).sum())
    return split(rows, constants, spare, limit, there), uses


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of the places of numbers that follow each other."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield first, i
            first = i


def _like_biases(module: Experts) -> Tensor:
    """A tensor of the dtype in which biases are stored."""
    biases = [getattr(module, name) for name in module.castable]
    return next((b for b in biases if b is not None), torch.empty(0, dtype=torch.bfloat16))[:0]


def _has_tensors(v: Any) -> bool:
    return isinstance(v, (Tensor, list))
