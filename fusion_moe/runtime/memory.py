"""One block of memory for all arrays that a call makes for itself: arrays that are no longer needed
make room for later ones.

found = plan([Array("x", 1000, 0, 1), Array("y", 500, 1, 2), Array("z", 1000, 2, 2)])
found.offsets, found.nbytes    # (0, 1024, 0), 1536: z lies where x was
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..layouts import ceil_to

ALIGNMENT = 256  # bytes: arrays begin at multiples of it
_KEPT = 2**20  # bytes that each thread keeps for the arrays of small calls


@dataclass(frozen=True)
class Array:
    """nbytes that no one else may write from step `first` to step `last`, both included. name: for
    people.
    """

    name: str
    nbytes: int
    first: int
    last: int

    def lives_with(self, other: Array) -> bool:
        """Whether both are needed in some step."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Memory:
    """The offset of each array in a block of nbytes."""

    arrays: tuple[Array, ...]
    offsets: tuple[int, ...]
    nbytes: int


def plan(arrays: Sequence[Array]) -> Memory:
    """Places arrays so that those of one step do not overlap: large ones first, each in the
    smallest fitting gap, else at the end.
    """
    placed: dict[int, int] = {}
    for i in sorted(range(len(arrays)), key=lambda i: (-arrays[i].nbytes, i)):
        others = [j for j in placed if arrays[j].lives_with(arrays[i])]
        placed[i] = _place(
            ceil_to(arrays[i].nbytes, ALIGNMENT),
            sorted((placed[j], _end(arrays[j], placed[j])) for j in others),
        )
    nbytes = max((_end(array, placed[i]) for i, array in enumerate(arrays)), default=0)
    return Memory(tuple(arrays), tuple(placed[i] for i in range(len(arrays))), nbytes)


def _end(array: Array, offset: int) -> int:
    return offset + ceil_to(array.nbytes, ALIGNMENT)


def _place(nbytes: int, taken: Iterable[tuple[int, int]]) -> int:
    """taken: (start, end) of occupied ranges, in order."""
    gaps, end = list[tuple[int, int]](), 0
    for start, stop in taken:
        if start - end >= nbytes:
            gaps.append((start - end, end))
        end = max(end, stop)
    return min(gaps, default=(0, end))[1]


def allocate(memory: Memory, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """u8: the memory, and the address of each array: one allocation, since each takes as long as a
    launch.

    That of a small call on the CPU is kept by each thread: it is valid until the next one.
    """
    if device.type == "cpu" and memory.nbytes <= _KEPT:
        held, start = _of_thread.kept
    else:
        held = torch.empty(memory.nbytes, dtype=torch.uint8, device=device)
        start = held.data_ptr()
    return held, [start + offset for offset in memory.offsets]


def view(held: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An array of what `allocate` returned, as a tensor."""
    return held[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


class _OfThread(threading.local):
    def __init__(self) -> None:
        held = torch.empty(_KEPT, dtype=torch.uint8, device="cpu")
        self.kept = held, held.data_ptr()


_of_thread = _OfThread()
