"""Whether a row's bits depend on that row and the weights alone: calls with few rows, and with the
same rows among others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

KEPT = 12  # rows
# what other rows are multiplied by: with the last three a CPU's fast kernels leave them to others
NEIGHBOURS = (1.0, 1e3, math.inf, math.nan, 1e-30)
Rows = tuple[Tensor, ...]  # of the same rows: activations, ids of experts, weights


def tokens(count: int, experts: int, slots: int, width: int, dtype: torch.dtype, seed: int) -> Rows:
    """x [count, width], ids i64[count, slots], different ones, w f32[count, slots]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, experts, generator=g).argsort(1)[:, :slots].contiguous()
    return torch.randn(count, width, generator=g).to(dtype), ids, torch.rand(ids.shape, generator=g)


def among(kept: Rows, others: Rows, seed: int) -> tuple[Rows, Tensor]:
    """All of them in some order, and where the kept ones are. A few of the others are multiplied by
    each of NEIGHBOURS.
    """
    g = torch.Generator().manual_seed(seed)
    x, *rest = others
    factor = torch.tensor(NEIGHBOURS)[torch.randint(len(NEIGHBOURS), (len(x), 1), generator=g)]
    others = ((x * factor).to(x.dtype), *rest)
    order = torch.randperm(len(kept[0]) + len(x), generator=g)
    return tuple(
        torch.cat(pair)[order] for pair in zip(kept, others, strict=True)
    ), order.argsort()[: len(kept[0])]


def changed(
    call: Callable[..., Sequence[Tensor]], make: Callable[[int, int], Rows], counts: Iterable[int]
) -> list[tuple[int, int]]:
    """(count, how many rows have other bits among so many others than alone), where some have.

    call(*rows) -> tensors with a row for each; make(count, seed) -> rows.
    """
    kept = make(KEPT, 0)
    each = [call(*(t[i : i + 1] for t in kept)) for i in range(KEPT)]
    alone = [torch.cat(parts) for parts in zip(*each, strict=True)]
    assert all(t.isfinite().all() for t in alone)
    found = []
    for count in counts:
        rows, at = among(kept, make(count, count), count)
        differ = torch.zeros(KEPT, dtype=torch.bool)
        for want, got in zip(alone, call(*rows), strict=True):
            differ |= (got[at.to(got.device)] != want).flatten(1).any(1).cpu()
        found.append((count, int(differ.sum())))
    return [(count, rows) for count, rows in found if rows]
