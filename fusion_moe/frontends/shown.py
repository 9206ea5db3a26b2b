"""Where the nodes of a graph show the values of its symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Shown:
    """Where the graph shows a size: a node that is it, or a dimension of a tensor; `by` times too large."""

    node: Node
    dim: int | None
    by: int


def shown_sizes(nodes: Sequence[Node]) -> dict[Any, list[Shown]]:
    """Where each symbolic size can be read. A whole multiple of a symbol shows the symbol."""
    shown: dict[Any, list[Shown]] = {}
    for n in nodes:
        val = n.meta.get("val")
        dims: Iterable[tuple[int | None, Any]] = enumerate(val.shape) if isinstance(val, torch.Tensor) else [(None, val)]
        for dim, size in dims:
            if isinstance(size, torch.SymInt):
                by, rest = size.node.expr.as_coeff_Mul()
                shown.setdefault(size.node.expr, []).append(Shown(n, dim, 1))
                if by != 1 and by.is_Integer and rest.is_Symbol:
                    shown.setdefault(rest, []).append(Shown(n, dim, int(by)))
    return shown
