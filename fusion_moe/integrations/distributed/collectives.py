"""Collectives as operations of torch (`_c10d_functional`), which compilers can trace, reorder or
leave alone; or among ranks that are threads of one process.

group: the name of a process group, which has `ranks` ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

import torch
from torch import Tensor

ops = torch.ops._c10d_functional
T = TypeVar("T")


def all_reduce(x: Tensor, group: str, ranks: int) -> Tensor:
    """The sum over all ranks, on each of them."""
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...]"""
    if (here := _here()) is not None:
        return torch.cat(here.shown(x))
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))


def reduce_scatter(x: Tensor, group: str, ranks: int) -> Tensor:
    """[ranks T, ...] on each rank -> the sums of the rank's own [T, ...]"""
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))


def all_to_all(x: Tensor, group: str, ranks: int) -> Tensor:
    """[ranks M, ...], M rows for each rank -> [ranks M, ...], M rows from each rank"""
    if (here := _here()) is not None:
        return torch.cat([t.tensor_split(ranks)[here.rank()] for t in here.shown(x)])
    sizes = [x.shape[0] // ranks] * ranks
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), sizes, sizes, group))


# Ranks in one process -----------------------------------------------------------------------------


class Together:
    """All ranks of a group as threads of this process: `Together(4).run(f)` -> f(rank) of each.

    If one raises, the others end too, and its error is raised.
    """

    def __init__(self, ranks: int):
        self._threads: dict[int, int] = {}
        self._barrier, self._given = threading.Barrier(ranks), [torch.empty(0)] * ranks

    def run(self, f: Callable[[int], T]) -> list[T]:
        """f(rank) of each rank, in a thread of its own. Raises the first error of any."""

        def of_rank(rank: int) -> T:
            self._threads[threading.get_ident()] = rank
            _local.here = self
            try:
                return f(rank)
            except threading.BrokenBarrierError:
                raise
            except BaseException:
                self._barrier.abort()
                raise
            finally:
                _local.here = None

        with ThreadPoolExecutor(len(self._given)) as pool:
            results = [
                pool.submit(copy_context().run, of_rank, rank) for rank in range(len(self._given))
            ]
        errors = [e for e in (m.exception() for m in results) if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [m.result() for m in results]

    def rank(self) -> int:
        """That of the current thread."""
        return self._threads[threading.get_ident()]

    def shown(self, x: Tensor) -> list[Tensor]:
        """x of each rank."""
        self._given[self.rank()] = x
        self._barrier.wait()
        results = list(self._given)
        self._barrier.wait()
        return results


_local = threading.local()


def _here() -> Together | None:
    return getattr(_local, "here", None)
