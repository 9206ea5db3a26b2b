"""When multiprocessors computed tiles: kernels that are compiled with the option
cuda_debug=timeline mark it (backends/cuda/kernels/timeline.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .driver import checked, driver
from .nvrtc import MARKS

# i64: how many marks there were, then for each its time, and the multiprocessor below what it is of
_WORDS = 1 + 2 * MARKS
_kernels: list[tuple[str, int]] = []  # those that are loaded: names, and where their marks lie


@dataclass(frozen=True)
class Tile:
    """A work tile that a warpgroup computed on a multiprocessor. begin, end: ns, by the GPU's
    clock.
    """

    kernel: str
    multiprocessor: int
    begin: int
    end: int


def add(name: str, library: Any, code: bytes) -> None:
    """Adds a kernel in a loaded library to those whose marks are read, if it makes any."""
    if marks(code):
        address, _ = checked(driver().cuLibraryGetGlobal(library, b"timeline"), name)
        _kernels.append((name, int(address)))


def marks(code: bytes) -> bool:
    """Whether machine code marks tiles."""
    return b"\0timeline\0" in code


def clear() -> None:
    """Forgets all marks so far; waits for the GPU."""
    if _kernels:
        torch.cuda.synchronize()
    for name, address in _kernels:
        checked(driver().cuMemsetD8(address, 0, 8 * _WORDS), name)


def read() -> list[Tile]:
    """The tiles since then; waits for the GPU."""
    if _kernels:
        torch.cuda.synchronize()
    results = list[Tile]()
    for name, address in _kernels:
        words = torch.empty(_WORDS, dtype=torch.int64, device="cpu")
        checked(driver().cuMemcpyDtoH(words.data_ptr(), address, words.nbytes), name)
        results += tiles(name, words)
    return results


def tiles(name: str, words: Tensor) -> Iterator[Tile]:
    """Those of one kernel's memory: a beginning and the next end of the same block and warpgroup.
    Where more were marked than are kept, of the last ones.
    """
    (count, *marks), begun = words.tolist(), dict[int, tuple[int, int]]()
    pairs: Iterable[tuple[int, int]] = zip(marks[::2], marks[1::2], strict=True)
    for time, place in sorted(list(pairs)[: min(count, MARKS)]):
        multiprocessor, of = place & 0xFFFFFFFF, place >> 32
        if of % 2 == 0:
            begun[of] = multiprocessor, time
        elif of - 1 in begun:
            yield Tile(name, *begun.pop(of - 1), time)
