"""The cost of calls outside of fusions: flops and bytes, counted as if each were a kernel of its
own.

Flops come from torch's flop counter. If it has no formula, each element that a pointwise operation
makes or a reduction reads counts as one. Bytes are those of inputs and outputs. A view moves
nothing, and of a table only the gathered rows are read.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ..definitions.nodes import is_call, is_view, tensors
from ..definitions.traced import hint

_GATHERS = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select")


def flops(calls: Iterable[Node]) -> int | None:
    """Floating-point operations of some calls; None if a size is known only on the device."""
    return _total(calls, _flops)


def moved(calls: Iterable[Node]) -> int | None:
    """Bytes that some calls read and write; None if a size is known only on the device."""
    return _total(calls, _bytes)


def by_sizes(calls: Iterable[Node]) -> tuple[str, ...]:
    """The operations that torch has several kernels for and chooses among by sizes: products and
    attention (not all of which has a flop formula); with how often each is called.
    """
    names = Counter(
        name
        for n in calls
        if (name := str(n.target)).startswith("aten.")
        and (_formula(n) is not None or "attention" in name)
    )
    return tuple(name if times == 1 else f"{name} x {times}" for name, times in names.items())


def _total(calls: Iterable[Node], cost: Callable[[Node], int]) -> int | None:
    counted = [n for n in calls if n.target is not operator.getitem and tensors(n.meta.get("val"))]
    if not all(_is_known(m) for n in counted for m in (n, *n.all_input_nodes)):
        return None
    return sum(cost(n) for n in counted)


def _flops(n: Node) -> int:
    formula = _formula(n)
    if formula is not None:
        args, kwargs = tree_map(_example, (n.args, n.kwargs))
        return int(hint(formula(*args, **kwargs, out_val=n.meta["val"])))
    tags = getattr(n.target, "tags", ())
    if torch.Tag.pointwise in tags:
        return _elements(n)
    return sum(map(_elements, n.all_input_nodes)) if torch.Tag.reduction in tags else 0


def _formula(n: Node) -> Callable[..., int] | None:
    return flop_registry.get(getattr(n.target, "overloadpacket", n.target))


def _bytes(n: Node) -> int:
    if is_call(n) and is_view(n):
        return 0
    written, read = _size(n), n.all_input_nodes
    if is_call(n) and n.target.name().partition(".")[0] in _GATHERS:  # type: ignore[union-attr]
        return 2 * written + sum(map(_size, read[1:]))
    return written + sum(map(_size, read))


def _elements(n: Node) -> int:
    return sum(hint(t.numel()) for t in tensors(_example(n)))


def _size(n: Node) -> int:
    return sum(hint(t.numel()) * t.element_size() for t in tensors(_example(n)))


def _example(x: Any) -> Any:
    return x.meta.get("val") if isinstance(x, Node) else x


def _is_known(n: Node) -> bool:
    return None not in [hint(size) for t in tensors(_example(n)) for size in t.shape]
