"""Regions of an FX graph that become one Fusion each.

A region grows from calls whose translators make grouped products, over neighbours that have translators, as long as no path
leaves it and comes back. What then lies in segments without a grouped product is given back to the graph's own compiler.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import translate
from ..errors import Error, FusionError, TranslatorError, UnsupportedError, Untranslatable
from ..ir.builder import FusionDefinition
from ..ir.core import Fusion, Op, Value
from ..ir.types import TensorType
from ..segment import split
from ..target import Target
from ..translate import Sizes, plain_argument, tensor_type


@dataclass(frozen=True)
class Left:
    """A call that was not fused: the operation, its place in the user's program, and the reason. broken: its translator is at fault."""

    op: str
    source: str
    why: str
    broken: bool = False


@dataclass(frozen=True)
class Shown:
    """Where the graph shows a size: a node that is it, or a dimension of a tensor; `by` times too large."""

    node: Node
    dim: int | None
    by: int


@dataclass(frozen=True)
class Region:
    """Calls that became one Fusion. inputs, outputs: nodes, in the order of the Fusion's; sizes: where each of its symbols is shown."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    fusion: Fusion
    sizes: Mapping[str, Shown]

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return _device(self.nodes[0])

    @property
    def calls(self) -> int:
        """How many calls it replaces."""
        return sum(map(_is_call, self.nodes))


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
    """The search in one graph."""

    def __init__(self, graph: Graph, target: Callable[[torch.device], Target]):
        self.nodes = list(graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.paths = _Paths(self.nodes, self.place)
        self.shown = _shown_sizes(self.nodes)
        self.target = target
        self.taken: set[Node] = set()
        self.refused: dict[Node, Error] = {}
        self.alone: dict[Node, Error] = {}  # refused when tried alone: what stands around a call may change that
        self.trimmed: dict[Node, str] = {}
        self.found = Found(calls=sum(n.op == "call_function" and n.target is not operator.getitem for n in self.nodes))

    def run(self) -> Found:
        """All regions, one after the other."""
        for seed in [n for n in self.nodes if self._makes_product(n)]:
            if seed not in self.taken:
                region = self._region(seed)
                if region is not None:
                    self.found.regions.append(region)
                    self.taken |= set(region.nodes)
                    self.paths.contract(region.nodes)
        self._tell_refusals()
        return self.found

    def _makes_product(self, n: Node) -> bool:
        """Whether the translator of a call, tried on it alone, makes a grouped product."""
        if n.target is operator.getitem or not self._candidate(n):
            return False
        walk = _Walk(_with_parts(n))
        for call, error in walk.refused.items():
            if isinstance(error, TranslatorError) or not _is_torchs(call):
                self.alone[call] = error
        return not walk.refused and any(op.kind.role == "grouped" for ops in walk.made.values() for op in ops)

    def _region(self, seed: Node) -> Region | None:
        """The region around a seed. A refusal takes its call out, and the region grows anew without it."""
        while seed not in self.refused:
            walk = _Walk(self._grow(seed))
            self.refused.update(walk.refused)
            if not walk.refused:
                try:
                    return self._made(self._trimmed(walk, seed))
                except (FusionError, UnsupportedError, Untranslatable) as error:
                    self.refused[seed] = error
        return None

    def _grow(self, seed: Node) -> list[Node]:
        region = dict.fromkeys(_with_parts(seed))
        span = self.paths.span(region)
        edge = self._edge(region, region)
        while edge:
            joined: list[Node] = []
            for n in edge:
                if n not in region and (wider := span | self.paths.span(_with_parts(n))).convex:
                    span = wider
                    joined += _with_parts(n)
                    region.update(dict.fromkeys(_with_parts(n)))
            blocked = [n for n in edge if n not in region]
            edge = self._in_order({*self._edge(joined, region), *blocked}) if joined else []
        return self._in_order(region)

    def _edge(self, nodes: Iterable[Node], region: Collection[Node]) -> list[Node]:
        """The calls next to some nodes of a region that may join it."""
        device = _device(next(iter(region)))
        near = {_call(m) for n in nodes for m in (*n.all_input_nodes, *n.users) if m not in region}
        return [n for n in self._in_order(near) if self._candidate(n) and _device(n) == device]

    def _trimmed(self, walk: _Walk, seed: Node) -> _Walk:
        """The walk over the nodes that stay: neither torch's own in segments without a grouped product, nor views at the rim.

        Other operations the graph's compiler could only call: in the fusion they cost no more.
        """
        kept = dict.fromkeys(walk.nodes)
        why: dict[Node, str] = {}
        segments = [s for s in split(walk.fusion, self.target(_device(seed))) if not any(op.kind.role == "grouped" for op in s.fusion.ops)]
        before = None
        while before != len(kept):
            before = len(kept)
            for n in _rim_views(kept):
                kept.pop(n)
            for segment in segments:
                ops = set(segment.fusion.ops)
                alone = {
                    m for n in kept if (made := walk.made[n]) and ops.issuperset(made) and _is_torchs(_call(n)) for m in _with_parts(n)
                }
                if alone and self.paths.span(n for n in kept if n not in alone).convex:
                    why.update((n, segment.why or "it stands before or after them") for n in alone)
                    kept = {n: None for n in kept if n not in alone}
        again = _Walk(list(kept)) if len(kept) < len(walk.nodes) else walk
        if again.refused:  # what was trimmed told a translator something that it needs
            return walk
        self.trimmed.update((n, f"left to the graph's compiler: no grouped product to fuse with ({reason})") for n, reason in why.items())
        return again

    def _made(self, walk: _Walk) -> Region:
        """A walk as a Region. Untranslatable if a size that its program needs can be read nowhere."""
        span, symbols = self.paths.span(walk.nodes), walk.fusion.symbols
        sizes = {}
        for name, expr in walk.sizes.expressions().items():
            if name in symbols:
                places = [s for s in self.shown.get(expr, ()) if s.node.op == "placeholder" or span.follows(self.place[s.node])]
                if not places:
                    raise Untranslatable(f"no value outside of the fusion shows the size {expr}")
                sizes[name] = min(places, key=lambda s: (s.by, s.dim is not None, self.place[s.node]))
        return Region(walk.nodes, tuple(walk.inputs), tuple(walk.outputs), walk.fusion, sizes)

    def _candidate(self, n: Node) -> bool:
        """Whether a call may be part of a region: translated, and its results read by somebody."""
        if n in self.refused or n in self.taken or not _is_call(n) or not _has_tensors(n):
            return False
        return bool(n.users) and translate.find(_name(n)) is not None

    def _tell_refusals(self) -> None:
        """What stands next to a region, or makes products, and why it is not inside."""
        near = {_call(m) for r in self.found.regions for n in r.nodes for m in (*n.all_input_nodes, *n.users)}
        told = {n for n in (*near, *self.refused, *self.alone, *self.trimmed) if n not in self.taken and _is_call(n)}
        for n in self._in_order(told):
            reason = self.refused.get(n) or self.trimmed.get(n) or self.alone.get(n) or self._why_not(n)
            why = f"refused: {reason}" if isinstance(reason, Untranslatable) else str(reason)
            left = Left(str(n.target), source_of(n), why, broken=isinstance(reason, TranslatorError))
            if left not in self.found.left:
                self.found.left.append(left)

    def _why_not(self, n: Node) -> str:
        if not _has_tensors(n):
            return "its results are not tensors"
        if translate.find(_name(n)) is None:
            return "it has no translator"
        return "a path leads from the fusion to it and back" if n.users else "nobody reads its results"

    def _in_order(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.place.__getitem__)


# ------------------------------------------------------------------------------------------------------------------------ paths


@dataclass(frozen=True)
class _Span:
    """Nodes, and all those before and after them, as bit masks over the places of a graph."""

    inside: int = 0
    before: int = 0
    after: int = 0

    def __or__(self, other: _Span) -> _Span:
        return _Span(self.inside | other.inside, self.before | other.before, self.after | other.after)

    @property
    def convex(self) -> bool:
        """Whether no path leads out of the nodes and back in."""
        return not self.before & self.after & ~self.inside

    def follows(self, place: int) -> bool:
        """Whether a node outside comes before one of them."""
        return bool((self.before & ~self.inside) >> place & 1)


class _Paths:
    """What comes before and after each node: looked up, not walked."""

    def __init__(self, nodes: Sequence[Node], place: Mapping[Node, int]):
        self.nodes, self.place = nodes, place
        self.before = self._reach(nodes, lambda n: n.all_input_nodes)
        self.after = self._reach(list(reversed(nodes)), lambda n: n.users)

    def span(self, nodes: Iterable[Node]) -> _Span:
        """The nodes together."""
        return reduce(operator.or_, (_Span(1 << self.place[n], self.before[n], self.after[n]) for n in nodes), _Span())

    def contract(self, nodes: Sequence[Node]) -> None:
        """The nodes are one from now on: what comes before one of them comes before all. Else two regions could wait for each other."""
        one = self.span(nodes)
        for n, i in self.place.items():
            if (one.inside | one.before) >> i & 1:
                self.after[n] |= one.inside | one.after
            if (one.inside | one.after) >> i & 1:
                self.before[n] |= one.inside | one.before

    def _reach(self, order: Sequence[Node], next_to: Callable[[Node], Iterable[Node]]) -> dict[Node, int]:
        reach: dict[Node, int] = {}
        for n in order:
            reach[n] = reduce(operator.or_, (reach[m] | 1 << self.place[m] for m in next_to(n)), 0)
        return reach


# ----------------------------------------------------------------------------------------------------------------- translation


class _Walk:
    """One walk over nodes in order: their translators build a Fusion. made: the operations of each node; refused: who, and why."""

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = tuple(nodes)
        self.device = _device(nodes[0])
        self.fd = FusionDefinition()
        self.sizes = Sizes()
        self.inputs: dict[Node, Value] = {}
        self.values: dict[Node, Any] = {}
        self.made: dict[Node, tuple[Op, ...]] = {}
        self.refused: dict[Node, Error] = {}
        for n in nodes:
            if _call(n) not in self.refused:
                try:
                    self._translate(n)
                except Error as error:  # the walk goes on, to find all of them at once
                    self.refused[_call(n)] = error

    @property
    def outputs(self) -> list[Node]:
        """The nodes whose values are read outside."""
        return [n for n in self.nodes if isinstance(self.values[n], Value) and any(u not in self.made for u in n.users)]

    @cached_property
    def fusion(self) -> Fusion:
        """The Fusion of all nodes."""
        for n in self.outputs:
            self.fd.add_output(self.values[n])
        return self.fd.fusion()

    def _translate(self, n: Node) -> None:
        first = self.fd.count
        if n.target is operator.getitem:
            self.values[n] = self.values[_call(n)][n.args[1]]
        else:
            translator = translate.find(_name(n))
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
        if isinstance(val, (int, torch.SymInt)):
            return plain_argument(val, self.sizes)
        if not isinstance(val, torch.Tensor):
            raise Untranslatable(f"argument {a.name} is {_described(val)}", expected="a tensor or an integer")
        if val.device != self.device:
            raise Untranslatable(f"argument {a.name} is on {val.device}", expected=f"{self.device}, as the results")
        if a not in self.inputs:
            t = self._type(val)
            self.inputs[a] = self.fd.define_tensor(shape=t.shape, dtype=t.dtype)
        return self.inputs[a]

    def _type(self, val: torch.Tensor) -> TensorType:
        return tensor_type(val, self.sizes.shape(val.shape))


def _described(val: Any) -> str:
    return "of a type that the graph does not tell" if val is None else f"a {type(val).__name__}"


# ----------------------------------------------------------------------------------------------------------------------- nodes


def _call(n: Node) -> Node:
    """The call whose result a getitem takes; any other node itself."""
    return n.args[0] if n.target is operator.getitem else n  # type: ignore[return-value]


def _with_parts(n: Node) -> list[Node]:
    """A call and the getitems that take its results apart: they go together."""
    call = _call(n)
    return [call, *(u for u in call.users if u.target is operator.getitem)]


def _is_call(n: Node) -> bool:
    return n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)


def _name(n: Node) -> str:
    return n.target.name()  # type: ignore[union-attr]


def _is_torchs(n: Node) -> bool:
    return _name(n).split("::")[0] in ("aten", "prims")


def _has_tensors(n: Node) -> bool:
    val = n.meta.get("val")
    return bool(_tensors(val)) and len(_tensors(val)) == (len(val) if isinstance(val, (tuple, list)) else 1)


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, torch.Tensor)]


def _device(n: Node) -> torch.device:
    return _tensors(_call(n).meta["val"])[0].device


def _rim_views(region: Collection[Node]) -> list[Node]:
    """Views that read only from outside of a region or are read only there: to the graph's compiler they cost nothing."""
    found = []
    for n in region:
        if n.target is not operator.getitem and _is_view(n):
            parts = _with_parts(n)
            readers = [u for part in parts for u in part.users if u not in parts]
            if not any(m in region for m in n.all_input_nodes) or not any(u in region for u in readers):
                found += parts
    return found


def _is_view(n: Node) -> bool:
    return any(r.alias_info is not None for r in n.target._schema.returns)  # type: ignore[union-attr]


def _shown_sizes(nodes: Sequence[Node]) -> dict[Any, list[Shown]]:
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


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def source_of(n: Node) -> str:
    """The line of the user's program that a node comes from: "model.py:31, in forward: y = self.up(x)". Empty if the trace has none."""
    frames = list(_FRAME.finditer(n.meta.get("stack_trace") or ""))
    own = [m for m in frames if not m["file"].startswith(_LIBRARIES)] or frames
    return f"{Path(own[-1]['file']).name}:{own[-1]['line']}, in {own[-1]['function']}: {own[-1]['code'].strip()}" if own else ""
