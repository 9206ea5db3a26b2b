"""When multiprocessors computed tiles, by what kernels marked (runtime/timeline.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime import timeline
from ..runtime.driver import checked, driver
from ..runtime.nvrtc import MARKS

# i64: how many marks there were, then for each its time, and the multiprocessor below what it is of
_WORDS = 1 + 2 * MARKS


@dataclass(frozen=True)
class Tile:
    """A work tile that a warpgroup computed on a multiprocessor. begin, end: ns, by the GPU's
    clock.
    """

    kernel: str
    multiprocessor: int
    begin: int
    end: int


def clear() -> None:
    """Forgets all marks so far; waits for the GPU."""
    if timeline.kernels:
        torch.cuda.synchronize()
    for name, address in timeline.kernels:
        checked(driver().cuMemsetD8(address, 0, 8 * _WORDS), name)


def read() -> list[Tile]:
    """The tiles since then; waits for the GPU."""
    if timeline.kernels:
        torch.cuda.synchronize()
    results = list[Tile]()
    for name, address in timeline.kernels:
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
