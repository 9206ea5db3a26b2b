"""Faults that CUDA kernels find: words of pinned memory, one for each program on each stream.

        faults = Faults("`route index_select grouped_mm ...`")  # for a program
        word = faults.word(device, stream)      # for its kernels; GroupsError if an earlier call of
                                                it there found a fault

Kernels make bad ends, ids and indices safe and write their findings into their word. No launch
waits for it, so an error that a call raises was found in an earlier call. Launches that a CUDA
graph captures have a separate word, since graphs may be replayed on any stream: any call of the
program on the device raises what replays found. `synchronize` waits, and raises the faults of all
programs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import Error, GroupsError, NonFiniteError
from . import cuda


def _as_reported(place: int, value: int) -> tuple[Any, Any]:
    return place, value - (value >> 31 << 32)


@dataclass(frozen=True)
class Fault:
    """found, with {place} and {value}; what was expected; what to do. words(place, value): what
    stands there for the 24 and the 32 bits that kernels report.
    """

    found: str
    expected: str
    error: type[Error] = GroupsError
    todo: str = (
        "fusion_moe.synchronize() after a call raises its errors; that call left bad ids out, and "
        "clamped ends and indices"
    )
    words: Callable[[int, int], tuple[Any, Any]] = _as_reported


# by the number of the Fault in backends/cuda/kernels/ragged.cuh; who has kernels that report
# others adds them
FAULTS = {
    1: Fault(
        "offs[{place}] = {value}",
        "cumulative ends that never decrease, and are at most the number of rows",
    ),
    2: Fault(
        "ids.flatten()[{place}] = {value} is out of range",
        "ids from 0 to the number of groups - 1, or -1 for no expert",
    ),
    3: Fault("an index of {value}", "an index within the dimension it selects from"),
    4: Fault(
        "row {value} of matrix {place} has another scale than the rows around it",
        "FP8 weights whose rows share scales in aligned runs of 32 beside fp8 activations",
    ),
    7: Fault(
        "expert_map[{place}] = {value}",
        "the index of an expert here, or -1 for one that is elsewhere",
    ),
    8: Fault(
        "group {place} of {value} rows does not fit offsets, problem_sizes and blockscale_offsets",
        "one partition of the rows: problem_sizes (m, N, K) of the weight, offsets the rows of the "
        "groups before, blockscale_offsets the same with each group in whole 128 rows",
    ),
    9: Fault(
        "a block scale of matrix {place} is NaN or negative: byte {value}",
        "block scales that are numbers and not negative, as every quantizer writes them",
        NonFiniteError,
        "that call's result is wrong; the weight is damaged, or these are bytes of another type",
    ),
}
_WORDS = 4096  # pinned at once. None is freed: a graph may hold its address
_STREAMS = 64  # how many streams of a device a table holds
_LIBRARIES = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_INDUCTOR = "torchinductor_"  # part of the names of files that Inductor writes
_entering = threading.Lock()


class Word:
    """The fault that kernels of one program on one stream found; 0 if none."""

    def __init__(self, address: int, where: str):
        self.address, self.where = address, where
        self.found = ctypes.c_ulonglong.from_address(address)

    def take(self) -> tuple[str, Fault] | None:
        """What was found, and the fault that it is; it is then reset. None if another thread took
        it.
        """
        found, self.found.value = self.found.value, 0
        if not found:
            return None
        number, place, low = found >> 56, found >> 32 & 0xFFFFFF, found & 0xFFFFFFFF
        fault = FAULTS[number]
        at, value = fault.words(place, low)
        text = fault.found.format(place=at, value=value)
        return f"{text}, in an earlier call of {self.where}", fault


class Faults:
    """The words of one program. title: what the program computes, for messages."""

    def __init__(self, title: str):
        self.title = title
        self._words: dict[tuple[int, int | None], tuple[Word, Word]] = {}
        self._tables: dict[int, ctypes.Array[ctypes.c_ulonglong]] = {}

    def prepare(self, device: int) -> None:
        """Allocates the pinned word in which kernels of captured graphs report faults, before a
        capture, during which no memory can be pinned. device: its index.
        """
        self._of_graphs(device)

    def word(self, device: int, stream: int) -> int:
        """The address of the word for kernels that are now launched on this device and stream,
        given by their numbers.

        GroupsError if kernels that ran there before, or those of graphs, found a fault. Does not
        wait.
        """
        # asking takes as long as everything else here; the default stream cannot be captured
        if stream and cuda.capturing():
            return self._of_graphs(device).address
        own, of_graphs = self._words.get((device, stream)) or self._add(device, stream)
        if own.found.value or of_graphs.found.value:
            _raise([own, of_graphs])
        return own.address

    def table(self, device: int) -> int:
        """The address of the table in which native.cpp looks up words: the word for graphs, a
        count, streams and their words.
        """
        found = self._tables.get(device)
        if found is None:
            found = self._tables.setdefault(
                device, (ctypes.c_ulonglong * (2 + 2 * _STREAMS))(self._of_graphs(device).address)
            )
            for (index, stream), (own, _) in list(self._words.items()):
                if index == device and stream is not None:
                    _enter(found, stream, own)
            _words.tables.append(found)
        return ctypes.addressof(found)

    def _add(self, device: int, stream: int) -> tuple[Word, Word]:
        of_graphs = self._of_graphs(device)
        found = self._words.setdefault(
            (device, stream), (self._new(f"cuda:{device}, stream {stream:#x}"), of_graphs)
        )
        if device in self._tables:
            _enter(self._tables[device], stream, found[0])
        return found

    def _of_graphs(self, device: int) -> Word:
        found = self._words.get((device, None))
        if found is None:
            made = self._new(f"cuda:{device}, in a CUDA graph")
            found = self._words.setdefault((device, None), (made, made))
        return found[1]

    def _new(self, place: str) -> Word:
        return _words.new(f"{self.title} on {place}, first called at {_caller()}")


def _enter(table: ctypes.Array[ctypes.c_ulonglong], stream: int, word: Word) -> None:
    """Adds a stream to a table, if there is room; Python handles other streams. The count is
    written last: C++ reads it meanwhile.
    """
    with _entering:
        count = table[1]
        if count < _STREAMS:
            table[2 + 2 * count], table[3 + 2 * count] = stream, word.address
            table[1] = count + 1


class _Words:
    """All words of the process."""

    def __init__(self) -> None:
        self.all: list[Word] = []
        self.tables: list[Any] = []  # kept alive: calls in C++ hold their addresses
        self._memory: list[torch.Tensor] = []
        self._free: list[int] = []

    def new(self, where: str) -> Word:
        try:
            address = self._free.pop()
        except IndexError:
            pinned = torch.cuda.is_available()
            # whatever the caller's default device
            memory = torch.zeros(_WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned)
            self._memory.append(memory)
            first, *others = (memory.data_ptr() + 8 * i for i in range(_WORDS))
            self._free += reversed(others)
            address = first
        made = Word(address, where)
        self.all.append(made)
        return made


_words = _Words()


def synchronize() -> None:
    """Waits for the current CUDA device, and raises GroupsError if kernels of any program found bad
    ends, ids or indices.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _raise(_words.all)


def _raise(words: Iterable[Word]) -> None:
    found = [text for word in words if word.found.value and (text := word.take())]
    if found:
        (first, fault), *others = found
        also = "".join(f"; also {text}" for text, _ in others)
        raise fault.error(first + also, expected=fault.expected, todo=fault.todo, where="cuda")


def _caller() -> str:
    """file:line of the nearest frame outside this library and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")) and _INDUCTOR not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
