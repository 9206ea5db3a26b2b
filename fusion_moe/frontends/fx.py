"""Regions of an FX graph that become one Fusion each.

A region grows from calls whose translators make grouped products, over neighbours that have translators, as long as no path
leaves it and comes back. What then lies in segments without a grouped product is given back to the graph's own compiler.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import translate
from ..errors import TranslatorError, Untranslatable
from ..ir.builder import FusionDefinition
from ..ir.core import Fusion, Op, Value
from ..ir.types import TensorType
from ..segment import split
from ..target import Target
from ..translate import Sizes, plain_argument, tensor_type


@dataclass(frozen=True)
class Left:
    """A call that was not fused: the operation, its place in the user's program, and the reason."""

    op: str
    source: str
    why: str


@dataclass(frozen=True)
class Region:
    """Calls that became one Fusion. inputs and outputs are nodes, in the order of the Fusion's; sizes: an expression for each symbol."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    fusion: Fusion
    sizes: dict[str, Any]


@dataclass
class Found:
    """The regions of one graph, and what was left out of them."""

    regions: list[Region] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    calls: int = 0  # calls of operations in the graph


def find_regions(graph: Graph, target: Callable[[torch.device], Target]) -> Found:
    """The regions of a graph whose nodes carry fake values. `target` says what a device's programs are compiled for."""
    return _Search(graph, target).run()


class _Search:
    """The search in one graph. Sets of nodes are bit masks over their places, so that paths are looked up and not walked."""

    def __init__(self, graph: Graph, target: Callable[[torch.device], Target]):
        self.nodes = list(graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.target = target
        self.refused: dict[Node, str] = {}
        self.taken: set[Node] = set()
        self.found = Found(calls=sum(n.op == "call_function" and n.target is not operator.getitem for n in self.nodes))
        self.before = self._reach(self.nodes, lambda n: n.all_input_nodes)
        self.after = self._reach(list(reversed(self.nodes)), lambda n: n.users)

    def run(self) -> Found:
        """All regions, one after the other."""
        for seed in [n for n in self.nodes if self._makes_product(n)]:
            if seed not in self.taken and seed not in self.refused:
                region = self._region(seed)
                if region is not None:
                    self.found.regions.append(region)
                    self.taken |= set(region.nodes)
        self._tell_refusals()
        return self.found

    def _region(self, seed: Node) -> Region | None:
        """The region around a seed. A refusal takes its call out, and the region grows anew without it."""
        while seed not in self.refused:
            nodes = self._grow(seed)
            walk = _Walk(nodes)
            if not walk.refused:
                kept = self._trim(walk, nodes, seed)
                return _Walk(kept).region() if kept != nodes else walk.region()
            self.refused.update(walk.refused)
        return None

    def _grow(self, seed: Node) -> list[Node]:
        region = set(self._with_parts(seed))
        grown = True
        while grown:
            grown = False
            edge = {m for n in region for m in (*n.all_input_nodes, *n.users)} - region
            for n in sorted(edge, key=self.place.__getitem__):
                unit = set(self._with_parts(n))
                if n not in region and self._candidate(n) and _device(n) == _device(seed) and self._convex(region | unit):
                    region |= unit
                    grown = True
        return sorted(region, key=self.place.__getitem__)

    def _trim(self, walk: _Walk, nodes: list[Node], seed: Node) -> list[Node]:
        """The nodes without those whose segments hold no grouped product, where that leaves no hole."""
        kept = set(nodes)
        for segment in split(walk.fusion, self.target(_device(seed))):
            ops = set(segment.fusion.ops)
            if any(op.kind.role == "grouped" for op in ops):
                continue
            alone = {n for n in kept if (mine := walk.made[n]) and set(mine) <= ops}
            alone = {m for n in alone for m in self._with_parts(n)}
            if alone and self._convex(kept - alone):
                kept -= alone
                why = f"left to the graph's compiler: no grouped product to fuse with ({segment.why or 'it stands before or after them'})"
                self.found.left += [Left(str(n.target), source_of(n), why) for n in sorted(alone, key=self.place.__getitem__) if _is_call(n)]
        return sorted(kept, key=self.place.__getitem__)

    def _makes_product(self, n: Node) -> bool:
        """Whether the translator of a call, tried on it alone, makes a grouped product."""
        if not self._candidate(n):
            return False
        walk = _Walk(self._with_parts(n))
        return not walk.refused and any(op.kind.role == "grouped" for ops in walk.made.values() for op in ops)

    def _candidate(self, n: Node) -> bool:
        n = _call(n)
        return n not in self.refused and n not in self.taken and _is_call(n) and _has_tensors(n) and translate.find(n.target.name()) is not None

    def _with_parts(self, n: Node) -> list[Node]:
        """A call and the getitems that take its results apart: they go together."""
        call = _call(n)
        return [call, *(u for u in call.users if u.target is operator.getitem)]

    def _convex(self, nodes: set[Node]) -> bool:
        """Whether no path leads out of the nodes and back in."""
        inside = before = after = 0
        for n in nodes:
            inside |= 1 << self.place[n]
            before |= self.before[n]
            after |= self.after[n]
        return not before & after & ~inside

    def _reach(self, order: Sequence[Node], next_to: Callable[[Node], Iterable[Node]]) -> dict[Node, int]:
        reach: dict[Node, int] = {}
        for n in order:
            mask = 0
            for m in next_to(n):
                mask |= reach[m] | 1 << self.place[m]
            reach[n] = mask
        return reach

    def _tell_refusals(self) -> None:
        """What stands next to a region, or makes products, and why it is not inside."""
        near = {m for r in self.found.regions for n in r.nodes for m in (*n.all_input_nodes, *n.users)} - self.taken
        near = {_call(n) for n in near}
        told = {n for n in (*near, *self.refused) if _is_call(n)}
        for n in sorted(told, key=self.place.__getitem__):
            name = str(n.target)
            if not any(left.op == name and left.source == source_of(n) for left in self.found.left):
                self.found.left.append(Left(name, source_of(n), self.refused.get(n) or self._why_not(n)))

    def _why_not(self, n: Node) -> str:
        if translate.find(n.target.name()) is None:  # type: ignore[union-attr]
            return "it has no translator"
        return "a path leads from the fusion to it and back" if _has_tensors(n) else "its results are not tensors"


class _Walk:
    """One walk over nodes in order: their translators build a Fusion. made: the operations of each node; refused: who, and why."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = tuple(nodes)
        self.fd = FusionDefinition()
        self.sizes = Sizes()
        self.inputs: dict[Node, Value] = {}
        self.values: dict[Node, Any] = {}
        self.made: dict[Node, tuple[Op, ...]] = {}
        self.refused: dict[Node, str] = {}
        for n in nodes:
            try:
                self._translate(n)
            except Untranslatable as refusal:
                self.refused[_call(n)] = f"refused: {refusal}"
                return
            except TranslatorError as error:
                self.refused[_call(n)] = str(error)
                return
        self.outputs = [n for n in nodes if isinstance(self.values[n], Value) and any(u not in self.made for u in n.users)]

    @cached_property
    def fusion(self) -> Fusion:
        """The Fusion of all nodes."""
        for n in self.outputs:
            self.fd.add_output(self.values[n])
        return self.fd.fusion()

    def region(self) -> Region:
        """The nodes as a Region."""
        return Region(self.nodes, tuple(self.inputs), tuple(self.outputs), self.fusion, dict(self.sizes.expressions()))

    def _translate(self, n: Node) -> None:
        first = self.fd.count
        if n.target is operator.getitem:
            self.values[n] = self.values[n.args[0]][n.args[1]]  # type: ignore[index]
        else:
            translator = translate.find(n.target.name())  # type: ignore[union-attr]
            assert translator is not None
            with self.fd.at(source_of(n), translator.where):
                args, kwargs = ([self._argument(a) for a in n.args], {k: self._argument(v) for k, v in n.kwargs.items()})
                outputs = translator(self.fd, args, kwargs, [self._type(v) for v in _tensors(n.meta["val"])])
            self.values[n] = outputs if isinstance(n.meta["val"], (tuple, list)) else outputs[0]
        self.made[n] = self.fd.ops_from(first)

    def _argument(self, a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return tuple(self._argument(x) for x in a)
        if not isinstance(a, Node):
            return plain_argument(a, self.sizes)
        if a in self.values:
            return self.values[a]
        val = a.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return plain_argument(val, self.sizes)
        if a not in self.inputs:
            t = self._type(val)
            self.inputs[a] = self.fd.define_tensor(shape=t.shape, dtype=t.dtype)
        return self.inputs[a]

    def _type(self, val: torch.Tensor) -> TensorType:
        return tensor_type(val, self.sizes.shape(val.shape))


def _call(n: Node) -> Node:
    return n.args[0] if n.target is operator.getitem else n  # type: ignore[return-value]


def _is_call(n: Node) -> bool:
    return n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)


def _has_tensors(n: Node) -> bool:
    val = n.meta.get("val")
    return bool(_tensors(val)) and len(_tensors(val)) == (len(val) if isinstance(val, (tuple, list)) else 1)


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, torch.Tensor)]


def _device(n: Node) -> torch.device:
    return _tensors(_call(n).meta["val"])[0].device


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')


def source_of(n: Node) -> str:
    """The line of the user's program that a node comes from: "model.py:31, in forward: y = self.up(x)". Empty if the trace has none."""
    frames = [m for m in _FRAME.finditer(n.meta.get("stack_trace") or "")]
    own = [m for m in frames if "/fusion_moe/" not in m["file"]] or frames
    return f"{own[-1]['file'].rsplit('/', 1)[-1]}:{own[-1]['line']}, in {own[-1]['function']}: {own[-1]['code'].strip()}" if own else ""

