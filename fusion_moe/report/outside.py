"""The cost of calls outside of fusions: flops and bytes, counted as if each were a kernel of its
own.

Flops come from torch's flop counter. If it has no formula, each element that a pointwise operation
makes or a reduction reads counts as one. Bytes are those of inputs and outputs. A view moves
nothing, and of a table only the gathered rows are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..definitions.nodes import is_call, is_view, tensors

_GATHERS = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")


def flops(calls: Iterable[Node]) -> int | None:
    """Floating-point operations of some calls; None if a size is known only on the device."""
    return _total(calls, _flops)


def moved(calls: Iterable[Node]) -> int | None:
    """Bytes that some calls read and write; None if a size is known only on the device."""
    return _total(calls, _bytes)


def _total(calls: Iterable[Node], cost: Callable[[Node], int]) -> int | None:
    counted = [n for n in calls if n.target is not operator.getitem and tensors(n.meta.get("val"))]
    if not all(_is_known(m) for n in counted for m in (n, *n.all_input_nodes)):
        return None
    return sum(cost(n) for n in counted)


def _flops(n: Node) -> int:
    formula = flop_registry.get(getattr(n.target, "overloadpacket", n.target))
    if formula is not None:
        args, kwargs = tree_map(_example, (n.args, n.kwargs))
        return _number(formula(*args, **kwargs, out_val=n.meta["val"]))
    tags = getattr(n.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return sum(_number(t.numel()) for t in tensors(n.meta["val"]))
    return sum(map(_elements, n.all_input_nodes)) if torch.Tag.reduction in tags else 0


def _bytes(n: Node) -> int:
    if is_call(n) and is_view(n):
        return 0
    written = sum(map(_size, tensors(n.meta["val"])))
    read = n.all_input_nodes
    if is_call(n) and n.target.name().partition(".")[0] in _GATHERS:  # type: ignore[union-attr]
        return 2 * written + sum(_size(t) for m in read[1:] for t in tensors(m.meta.get("val")))
    return written + sum(_size(t) for m in read for t in tensors(m.meta.get("val")))


def _elements(n: Node) -> int:
    return sum(_number(t.numel()) for t in tensors(n.meta.get("val")))


def _size(t: torch.Tensor) -> int:
    return _number(t.numel()) * t.element_size()


def _example(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, Node) else x


def _is_known(n: Node) -> bool:
    sizes = [s for t in tensors(n.meta.get("val")) for s in t.shape]
    return all(isinstance(s, int) or s.node.has_hint() for s in sizes)


def _number(n: Any) -> int:
    """A number, or the hint of a symbolic number."""
    return int(n if isinstance(n, int) else n.node.hint)
