"""A pretended device: the CPU in place of a GPU, so that hits, misses, copies, the split and the
cache do everywhere what they do on a GPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import options
from ..errors import BuildError, UnsupportedError
from ..layouts import check_ids
from .device import Counters, HostStorage, decide, runs
from .machine import copy_alone
from .requester import CAPACITY, Requester
from .split import Constants, Split
from .steps import Steps


class Pretended:
    """A `Device` on the CPU. All memory is the host's; what it copies is copied there.

    slots: for the cache; spare: for what one step copies, in turns if it copies more.
    """

    on, layout, copies_itself = torch.device("cpu"), "", False

    def __init__(self, storage: HostStorage, slots: int, spare: int, constants: Constants):
        self.limit = 0 if storage.in_files else None
        self.storage, self.constants, self.counters = storage, constants, Counters()
        self.slots = storage.empty(slots + spare, "cpu")
        self._first_spare, self.spare = slots, spare
        # two versions, of which a step reads one number, and the number
        self._tables = torch.full((2, storage.experts), -1, dtype=torch.int32)
        self._version = 0
        self._uses = torch.zeros(storage.experts, dtype=torch.int64)
        self._requesters: dict[Any, Requester | None] = {}
        self._running = threading.Lock()  # steps of one layer, which share spare slots

    @property
    def expert_map(self) -> Tensor:
        """i32[E]: the table in use."""
        return self._tables[self._version]

    def steps(self, x: Tensor, ids: Tensor, w: Tensor) -> Steps:
        """As in `Device`."""
        return self.storage.steps(x, ids, w, self.slots, expert_map=self.expert_map)

    def step(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """As in `Device`."""
        check_ids(ids, self.storage.experts, least=-1)
        with self._running:
            expert_map = self.expert_map
            decided, uses = decide(ids, expert_map, self.constants, self.spare, self.limit)
            self._uses += uses
            self._count(decided, uses, expert_map)
            return self._step(x, ids, w, expert_map, decided)

    def _step(
        self, x: Tensor, ids: Tensor, w: Tensor, expert_map: Tensor, decided: Split
    ) -> Tensor:
        steps = self.steps(x, ids, w)
        table, room = expert_map.clone(), max(self.spare, 1)
        self._bring(decided.copied[:room], table)
        y, _, _, slot_of = steps.rows(self.storage.given(x, ids, w, self.slots, expert_map=table))
        for first in range(room, len(decided.copied), room):  # what the first turn left at zero
            self._bring(decided.copied[first : first + room], table.fill_(-1))
            result, ends, _, rows = steps.rows(
                self.storage.given(x, ids, w, self.slots, expert_map=table)
            )
            there = rows < ends[-1]
            y[slot_of[there].long()] = result[rows[there].long()]
        if decided.computed:
            self._compute(x, ids, w, decided.computed, y, slot_of)
        return steps.sum(y, slot_of, w)

    def _bring(self, experts: Sequence[int], table: Tensor) -> None:
        for slot, expert in enumerate(experts, self._first_spare):
            self._copy(slot, expert)
            table[expert] = slot

    def _compute(
        self,
        x: Tensor,
        ids: Tensor,
        w: Tensor,
        experts: tuple[int, ...],
        y: Tensor,
        slot_of: Tensor,
    ) -> None:
        """The host's rows, each a token with one expert, in the order of tokens and slots."""
        missed = torch.isin(ids, torch.tensor(experts))
        tokens = missed.nonzero()[:, 0]
        weights = w[missed] if self.storage.weighs_input else w.new_ones(len(tokens))
        start = time.perf_counter_ns()
        hand_over = self._hand_over(x[tokens], ids[missed][:, None], weights[:, None])
        self.counters.cpu_ns += time.perf_counter_ns() - start
        y[slot_of[missed].long()] = hand_over

    def _hand_over(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """The host's rows, by the worker if they fit into the request ring."""
        # after a fork the child has a worker of its own
        key = x.dtype, os.getpid(), options.current()
        if key not in self._requesters:
            self._requesters[key] = _requester_of(self.storage, x.dtype)
        requester = self._requesters[key]
        computed = requester.computed(x, ids, w) if requester and len(x) <= CAPACITY else None
        return self.storage.compute(x, ids, w) if computed is None else computed

    def _count(self, decided: Split, uses: Tensor, expert_map: Tensor) -> None:
        c, here = self.counters, int(uses[expert_map >= 0].sum())
        c.steps, c.hits, c.misses = c.steps + 1, c.hits + here, c.misses + int(uses.sum()) - here
        c.copied, c.computed = c.copied + len(decided.copied), c.computed + len(decided.computed)

    def _copy(self, slot: int, expert: int) -> None:
        for name, t in self.storage.tensors.items():
            copy_alone(self.slots[name][slot], t[expert])
        self.counters.bytes_copied += self.storage.nbytes

    def load(self, slot: int, expert: int) -> None:
        """As in `Device`."""
        self._copy(slot, expert)
        self.counters.loaded += 1

    def fetch(self, experts: Sequence[int], arrival: Mapping[str, Tensor]) -> None:
        """As in `Device`."""
        for i, j in runs(experts):
            some = slice(experts[i], experts[i] + j - i)
            for name, t in self.storage.tensors.items():
                copy_alone(arrival[name][some], t[some])
        self.counters.copied += len(experts)
        self.counters.bytes_copied += len(experts) * self.storage.nbytes

    def unpacker(
        self, arrival: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Callable[[int, int], None]:
        """As in `Device`."""

        def unpack(first: int, count: int) -> None:
            for name, t in arrival.items():
                weights[name][first : first + count].copy_(t[first : first + count])

        return unpack

    def from_slots(
        self, slots: Tensor, experts: Tensor, weights: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """As in `Device`."""

        def place() -> None:
            for name, t in self.slots.items():
                to, bytes_of = weights[name], t.view(len(t), -1).view(torch.uint8)
                to.view(len(to), -1).view(torch.uint8)[experts] = bytes_of[slots]

        return place

    def complete(self, arrival: Mapping[str, Tensor]) -> None:
        """As in `Device`: nothing is."""

    def publish(self, expert_map: Tensor) -> None:
        """As in `Device`. After it no step runs that read the version before, so what that table
        alone names may be overwritten.
        """
        self._tables[1 - self._version] = expert_map
        with self._running:
            self._version = 1 - self._version

    def uses(self) -> Tensor:
        """As in `Device`."""
        with self._running:
            result = self._uses.clone()
            self._uses.zero_()
        return result


def _requester_of(storage: HostStorage, dtype: torch.dtype) -> Requester | None:
    """None where no C++ computes these experts."""
    try:
        return Requester(storage, dtype)
    except (UnsupportedError, BuildError):
        return None
