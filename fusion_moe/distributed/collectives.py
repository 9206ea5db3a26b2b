"""Collectives as operations of torch (`_c10d_functional`), which compilers can trace, reorder or
leave alone.

group: the name of a process group, which has `ranks` ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: str, ranks: int) -> Tensor:
    """The sum over all ranks, on each of them."""
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, group: str, ranks: int) -> Tensor:
    """[T, ...] of each rank -> [ranks T, ...]"""
    return ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks, group))


def reduce_scatter(x: Tensor, group: str, ranks: int) -> Tensor:
    """[ranks T, ...] on each rank -> the sums of the rank's own [T, ...]"""
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))


def all_to_all(x: Tensor, group: str, ranks: int) -> Tensor:
    """[ranks M, ...], M rows for each rank -> [ranks M, ...], M rows from each rank"""
    sizes = [x.shape[0] // ranks] * ranks
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), sizes, sizes, group))
