"""Cuda, the device (device.py) that is a GPU.

A step is five launches on the current stream, or more: `begin_step`, the program of the rows that
are there (steps.py), `end_step`. None waits for the host where nothing is missing, and a CUDA graph
can capture it after a call with the same specialization key. The worker (worker.py) computes what
the split leaves to the CPU; a GPU that it does not answer goes on without, and the next call raises
WorkerError.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import backends, options
from ..encodings import ENCODINGS, Encoding, Part
from ..errors import UnsupportedError
from ..layouts import W16X64, check_ids
from ..runtime import cuda
from ..runtime.host_memory import pages
from .device import Counters, HostStorage, runs
from .launches import Parts, Shape, why_not_tiled
from .long_steps import Turn, missed_of, turns_of
from .moves import LIMIT, Moves, Shared
from .pinned import copy, pinned
from .requester import register
from .split import Constants
from .steps import Steps

CAPACITY = 512  # rows of experts of a step that decodes
_PIECE = 2**24  # bytes of files that are copied at once


class Cuda:
    """A `Device` on a GPU. slots: for the cache; spare: for what one step copies.

    shared: of all layers of a model, whose steps follow each other; None: of this layer alone. It
    says how many rows a step may have at most that a graph captures. Longer ones stream experts
    through the spare slots: as they are on the host into one half of them, in two pieces of which
    one is copied while the other is put in order, into the other half, which is multiplied by.
    """

    def __init__(
        self,
        storage: HostStorage,
        slots: int,
        spare: int,
        constants: Constants,
        shared: Shared | None = None,
        device: torch.device | str = "cuda",
    ):
        device = torch.device("cuda", cuda.index_of(torch.device(device)))
        self.storage, self.constants, self.device = storage, constants, device
        self.on, self.copies_itself = device, not storage.in_files
        self.shared = shared or shared_of(storage, device)
        self.spare, self._cached = spare, slots
        self.limit = 0 if storage.in_files else spare
        self.layout = layout_of(storage, device)
        self.slots = storage.empty(max(slots + spare, 1), device)
        large = large_of(storage)
        self._pinned = {} if storage.in_files else {name: pinned(t) for name, t in large.items()}
        # few bytes stay on the GPU whole
        self._there = {n: t.to(device) for n, t in storage.tensors.items() if n not in large}
        # a step may read all this until it has ended
        weakref.finalize(self, _wait, device, os.getpid())
        self.moves = self._moves()
        self._side, self._changed = torch.cuda.Stream(device), torch.cuda.Event()
        self._copied = torch.cuda.Event(), torch.cuda.Event()  # pieces of a turn
        # whether this change of the cache waits for earlier steps already, and the next step for it
        self._changing, self._whole = False, True
        self._uses = torch.zeros(storage.experts, dtype=torch.int32).pin_memory()
        self._read, self._told = torch.cuda.Event(), torch.zeros(storage.experts, dtype=torch.int64)
        self._loaded, self._long = 0, Counters()  # of long steps

    def _moves(self) -> Moves:
        shapes, names = [*shapes_of(self.storage, self.layout).values()], list(self.storage.tensors)
        slots = [self.slots[name] for name in names]
        at = {n: t.data_ptr() for n, t in self._there.items()}
        at |= {n: p.address for n, p in self._pinned.items()}
        # what is copied of each expert: of the host, and of what is on the GPU anyway
        self._lines: tuple[list[tuple[int, int, int]], ...] = [], []
        for name, t in self.storage.tensors.items():
            storage = self._there.get(name, t)
            line = self.slots[name].data_ptr(), storage.data_ptr(), t[0].nbytes
            self._lines[name in self._there].append(line)
        # kernels do not ask where those are that lie in files
        parts = Parts(shapes, [at.get(name, 0) for name in names], slots)
        first = self._cached + self.spare // 2  # where long steps have them as they are on the host
        self._packed = Parts(shapes, [t[first:].data_ptr() for t in slots], slots)
        costs, e = astuple(self.constants), self.storage.experts
        shared = self.shared
        layer = register(shared.model, self.storage, shared.dtype, shared.capacity)
        return Moves(parts, e, self._cached, self.limit, costs, shared, layer)

    def step(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """As in `Device`."""
        x, ids, w = _aligned(x), ids.contiguous(), w.contiguous()
        if len(x) == 0:
            return torch.empty_like(x)
        with torch.cuda.device(self.device), self.shared.turns.next():
            if ids.numel() <= self.shared.capacity:
                return self._step(x, ids, w)
            if self.spare < 2:
                return self._in_pieces(x, ids, w)
            if cuda.capturing():
                raise UnsupportedError(
                    f"{ids.numel()} rows of offloaded experts in a CUDA graph",
                    expected=f"at most {self.shared.capacity}",
                    todo="capture steps of fewer tokens, or offload with a larger capacity",
                    where="offload",
                )
            try:
                return self._stream(x, ids, w)
            finally:  # after an error, too: the next step may copy into the same slots
                torch.cuda.current_stream().wait_stream(self._side)

    def _step(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        placed = self.moves.begin(x, ids, w if self.storage.weighs_input else None)
        steps = self.steps(x, placed, w)
        y, _, _, slot_of = steps.rows(self._given(x, placed, w))
        return self.moves.end(y, slot_of, None if self.storage.weighs_input else w)

    def _stream(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """A long step: all missed experts that it names are copied, in turns."""
        turns, table, experts = self._turns(ids)
        if len(turns) == 1:
            placed = table[1][experts].int().view(ids.shape)
            steps = self.steps(x, placed, w)
            y, _, _, slot_of = steps.rows(self._given(x, placed, w))
            return steps.sum(y, slot_of, w)
        count, k = ids.numel(), ids.shape[1]
        order = table[0].short()[experts].sort(stable=True).indices
        more = max(turn.size for turn in turns)  # rows of no turn, up to its size
        turn_of, slots = (pad(of[experts[order]], (0, more), value=-1) for of in table.int())
        order = pad(order, (0, more))
        to, tokens, weights = order.int(), order // k, w.flatten()[order, None]
        all_named = sum(t.rows for t in turns) == count
        y = (x.new_empty if all_named else x.new_zeros)(count, x.shape[1])
        for number, turn in self._in_slots(turns):
            part = slice(turn.first, turn.first + turn.size)
            placed = torch.where(turn_of[part] == number, slots[part], -1)[:, None]
            inputs = x[tokens[part]], placed, weights[part]
            result, ends, _, rows = self.steps(*inputs).rows(self._given(*inputs))
            self.moves.put(result, ends, rows, y, to[part])
        slot_of = torch.arange(count, dtype=torch.int32, device=self.device).view(ids.shape)
        return self.steps(x, slot_of, w).sum(y, slot_of, w)

    def _turns(self, ids: Tensor) -> tuple[list[Turn], Tensor, Tensor]:
        """`turns_of` these ids, with the table on the GPU; and the expert of each id, E for none.
        Waits for ids.
        """
        e = self.storage.experts
        check_ids(ids, e, least=-1)
        named = torch.bincount(ids.flatten() + 1, minlength=e + 1)[1:]
        self.moves.uses += named.int()
        rows, there = named.cpu(), self.expert_map
        half = self.spare // 2
        first = missed_of(rows, there)[:half].tolist()
        for piece in range(2 if first else 0):  # at once: the link waits for nothing else
            self._bring(first, piece)
        turns, table = turns_of(rows, there, half, self._cached)
        hits, all_rows = int(rows[there >= 0].sum()), int(rows.sum())
        self._long += Counters(1, hits, all_rows - hits, sum(len(t.copied) for t in turns))
        return turns, table.to(self.device), torch.where(ids < 0, e, ids).flatten().long()

    def _in_slots(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
        """Turns and their numbers, when what each copies is in slots. What the next one copies
        comes meanwhile.
        """
        main = torch.cuda.current_stream()
        for number, turn in enumerate(turns):
            for piece in range(2 if turn.copied else 0):
                main.wait_event(self._copied[piece])
                first, experts = self._piece(turn.copied, piece)
                # here: beside the host's copies it had them wait for a product to end
                self._copy(experts, first, there=True)
                self.moves.unpack(self._packed, first, self._cached + first, len(experts))
                if number + 1 < len(turns):
                    self._bring(turns[number + 1].copied, piece)
            if turn.rows:
                yield number, turn

    def _bring(self, copied: list[int], piece: int) -> None:
        """Begins to copy a piece of a turn's experts, when what was in its place is unpacked."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            first, experts = self._piece(copied, piece)
            self._copy(experts, first, there=False)
            self._copied[piece].record()

    def _piece(self, copied: list[int], piece: int) -> tuple[int, list[int]]:
        """The experts of a half of a turn's copies, and where they begin."""
        each = -(-(self.spare // 2) // 2)
        return piece * each, copied[piece * each :][:each]

    def _copy(self, experts: list[int], first: int, there: bool) -> None:
        """Copies experts as they are on the host, runs of them at once, on the current stream: by
        the GPU's copy engine, or what is there of them.
        """
        first += self._cached + self.spare // 2
        copies = (
            (to + (first + i) * each, storage + experts[i] * each, (j - i) * each)
            for i, j in runs(experts)
            for to, storage, each in self._lines[there]
        )
        copy(copies, cuda.stream(self.device))

    def _in_pieces(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """A long step without room for copies: as many short ones as it takes."""
        each = max(1, self.shared.capacity // ids.shape[1])
        pieces = (t.split(each) for t in (x, ids, w))
        return torch.cat([self._step(*piece) for piece in zip(*pieces, strict=True)])

    def steps(self, x: Tensor, ids: Tensor, w: Tensor) -> Steps:
        """As in `Device`. Slots are in place of ids."""
        return self.storage.steps(x, ids.int(), w, self.slots, weight_layout=self.layout)

    def _given(self, x: Tensor, placed: Tensor, w: Tensor) -> Mapping[str, Tensor]:
        return self.storage.given(x, placed, w, self.slots, weight_layout=self.layout)

    # Whole layers ---------------------------------------------------------------------------------

    def fetch(self, experts: Sequence[int], arrival: Mapping[str, Tensor]) -> None:
        """As in `Device`: by the copy engine, on the current stream."""
        away = {n: t for n, t in self.storage.tensors.items() if n not in self._there}
        copies = [
            (arrival[n][experts[i] : experts[j - 1] + 1], t[experts[i] : experts[j - 1] + 1])
            for i, j in runs(experts)
            for n, t in away.items()
        ]
        if self.storage.in_files:
            _staged(copies)
        else:
            numbers = ((to.data_ptr(), t.data_ptr(), t.nbytes) for to, t in copies)
            copy(numbers, cuda.stream(self.device))
        self._long += Counters(copied=len(experts))

    def unpacker(
        self, arrival: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Callable[[int, int], None]:
        """As in `Device`."""
        shapes = shapes_of(self.storage, self.layout).values()
        parts = Parts([*shapes], [t.data_ptr() for t in arrival.values()], [*weights.values()])

        def unpack(first: int, count: int) -> None:
            with torch.cuda.device(self.device):
                self.moves.unpack(parts, first, first, count)

        return unpack

    def from_slots(
        self, slots: Tensor, experts: Tensor, weights: Mapping[str, Tensor]
    ) -> Callable[[], None]:
        """As in `Device`."""
        here = self.slots.values()
        parts = Parts([*map(Shape.of, here)], [t.data_ptr() for t in here], [*weights.values()])
        pairs = torch.stack([slots, experts]).int().to(self.device)  # a copy that waits

        def place() -> None:
            with torch.cuda.device(self.device):
                self.moves.place(parts, pairs)

        return place

    def complete(self, arrival: Mapping[str, Tensor]) -> None:
        """As in `Device`."""
        for name, t in self._there.items():
            arrival[name].copy_(t)

    # The cache ------------------------------------------------------------------------------------

    @property
    def expert_map(self) -> Tensor:
        """As in `Device`: a copy on the CPU of what was published last."""
        return self.moves.table()

    def load(self, slot: int, expert: int) -> None:
        """As in `Device`: on a stream of its own, after all steps so far."""
        self._begin_change()
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            if not self.storage.in_files:
                self.moves.load(slot, expert)
            else:  # through a spare slot, which long steps use too
                with self.shared.turns.next():
                    for there in (False, True):
                        self._copy([expert], 0, there)
                    self.moves.unpack(self._packed, 0, slot, 1)
        self._whole = self._whole or int(self.expert_map[expert]) == slot  # which is filled again
        self._loaded += 1

    def publish(self, expert_map: Tensor) -> None:
        """As in `Device`. A step that runs meanwhile has the old table, whole."""
        self._begin_change()
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            self.moves.publish(expert_map)
            self._changed.record()
        if self._whole:
            self._changed.synchronize()
        self._changing = self._whole = False

    def _begin_change(self) -> None:
        """What is copied from now on may overwrite slots that the table in use does not name: so
        steps that began with the one before must have ended.
        """
        if not self._changing:
            self._changed.synchronize()
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            self._changing = True

    def uses(self) -> Tensor:
        """As in `Device`, as far as they were read by now: it does not wait for steps."""
        zeros_like = torch.zeros_like(self._told)
        if self._read.query():
            now = self._uses.long()
            zeros_like, self._told = now - self._told, now
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.device(self.device), torch.cuda.stream(self._side):
                self._uses.copy_(self.moves.uses, non_blocking=True)
                self._read.record()
        return zeros_like

    @property
    def counters(self) -> Counters:
        """What steps have done. Waits for them."""
        c, shared = self.moves.counted(), self.shared
        missed = c["copied_rows"] + c["computed_rows"]
        counters = Counters(c["steps"], c["hits"], missed, c["copied"], c["computed"], self._loaded)
        counters += self._long
        counters.wait_ns = c["waited"]
        counters.bytes_copied = (counters.copied + counters.loaded) * self.moves.parts.nbytes
        counters.cpu_ns = shared.model.busy(self.moves.layer)
        return counters


def shared_of(
    storage: HostStorage, device: torch.device, capacity: int = CAPACITY, limit: float = LIMIT
) -> Shared:
    """What the offloaded layers of one model share on a GPU: request ring, worker, exchange of
    rows.

    storage: of one of the layers, whose rows have as many features. capacity: the most rows of a
    step that the worker computes; limit: seconds that are waited for it.
    """
    return Shared(capacity, storage.features, torch.bfloat16, device, limit)


def _aligned(x: Tensor) -> Tensor:
    """x, contiguous and aligned for loads of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _staged(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies (to, from) of memory that is not pinned, on the current stream: by two pinned pieces
    in turns. All of torch's threads fill them, where the driver would take one.
    """
    pieces = [
        (torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
        for _ in range(2)
    ]
    for whole in copies:
        parts = (t.flatten().view(torch.uint8).split(_PIECE) for t in whole)
        for to, source in zip(*parts, strict=True):
            piece, sent = pieces[0]
            sent.synchronize()  # at once, if it was never recorded
            to.copy_(piece[: len(source)].copy_(source), non_blocking=True)
            sent.record()
            pieces.reverse()


def _wait(device: torch.device, process: int) -> None:
    if os.getpid() == process and not cuda.capturing():
        torch.cuda.synchronize(device)


def large_of(storage: HostStorage) -> dict[str, Tensor]:
    """The tensors that are pinned; the others have few bytes."""
    return {
        name: t
        for name, t in storage.tensors.items()
        if t.nbytes >= pages.PAGE and t.data_ptr() % pages.PAGE == 0
    }


def shapes_of(storage: HostStorage, layout: str) -> dict[str, Shape]:
    """How kernels copy an expert's part of each tensor of a host storage into a cache slot, by the
    tensor's name: as bytes, or reordered if the slots have the layout `w16x64`.
    """
    encoding = ENCODINGS[storage.format]
    order = encoding.element.tile_order if layout == W16X64.name else None
    return {n: Shape.of(t, _part(encoding, n), order) for n, t in storage.tensors.items()}


def layout_of(storage: HostStorage, device: torch.device) -> str:
    """In which experts lie in slots: that of the GPU's kernels, if experts can be copied into
    it.
    """
    encoding, target = ENCODINGS[storage.format], backends.find("auto", device)
    wanted = target.layout_of(encoding.name, storage.activation_format)
    weights = [t for name, t in storage.tensors.items() if name in ("gate_up[0]", "down[0]")]
    odd = [why for t in weights if (why := W16X64.why_not(*_shape(t, encoding), encoding))]
    tiled = wanted == W16X64.name and options.current().order_weights
    return wanted if tiled and not (odd or why_not_tiled(encoding)) else "linear"


def _shape(t: Tensor, encoding: Encoding) -> tuple[int, int]:
    return t.shape[1], encoding.elements(t.shape[2])


def _part(encoding: Encoding, name: str) -> Part | None:
    """The part of an encoding that an argument of the operation holds."""
    base, is_list, number = name.rstrip("]").partition("[")
    return encoding.parts[int(number)] if is_list and base in ("gate_up", "down") else None
