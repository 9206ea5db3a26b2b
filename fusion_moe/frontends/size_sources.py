"""Finds where in a graph the values of its symbolic sizes can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class SizeSource:
    """Where a size can be read: a node that is the size, or a dimension of a tensor; the value
    there is `by` times the size.
    """

    node: Node
    dim: int | None
    by: int


def size_sources(nodes: Sequence[Node]) -> dict[Any, list[SizeSource]]:
    """Where each symbolic size can be read. A whole multiple of a symbol is also a source of it."""
    sources: dict[Any, list[SizeSource]] = {}
    for n in nodes:
        val = n.meta.get("val")
        dims: Iterable[tuple[int | None, Any]] = (
            enumerate(val.shape) if isinstance(val, torch.Tensor) else [(None, val)]
        )
        for dim, size in dims:
            if isinstance(size, torch.SymInt):
                by, rest = size.node.expr.as_coeff_Mul()
                sources.setdefault(size.node.expr, []).append(SizeSource(n, dim, 1))
                if by != 1 and by.is_Integer and rest.is_Symbol:
                    sources.setdefault(rest, []).append(SizeSource(n, dim, int(by)))
    return sources
