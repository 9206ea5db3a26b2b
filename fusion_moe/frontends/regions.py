"""Regions of an FX graph that become one Fusion each.

A region grows from calls whose translators make grouped products, over neighbours that have
translators, as long as no path leaves it and comes back. Calls that gain nothing from being inside
are then given back to the graph's own compiler (trim.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from .. import backends, compile as pipeline
from ..definitions import translate
from ..definitions.nodes import (
    SizeSource,
    call_of,
    called_op,
    device_of,
    has_tensors,
    is_call,
    is_torchs,
    is_view,
    op_name,
    size_sources,
    source_of,
    with_parts,
    writes,
)
from ..definitions.walk import Walk
from ..errors import Error, FusionError, TranslatorError, UnsupportedError, Untranslatable
from ..ir import Fusion
from ..messages import warn_once
from ..options import Options
from ..schedule.segment import by_structure
from ..target import Target
from .paths import Paths
from .reference_semantics import semantics_error
from .trim import trim


@dataclass(frozen=True)
class NotFused:
    """A call that was not fused: the operation, its line in the user's program, and the reason.
    broken: its translator is at fault.
    """

    op: str
    source: str
    why: str
    broken: bool = False


@dataclass(frozen=True)
class Region:
    """Calls that became one Fusion. inputs, outputs: nodes, in the order of the Fusion's; sizes:
    where the value of each symbol is found.

    transposed: the inputs whose last two dimensions the Fusion takes swapped, as they are stored.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    fusion: Fusion
    sizes: Mapping[str, SizeSource]
    transposed: Collection[Node] = ()

    @property
    def device(self) -> torch.device:
        """The device on which it runs."""
        return device_of(self.nodes[0])

    @property
    def calls(self) -> int:
        """How many calls of the graph the region replaces."""
        return sum(map(is_call, self.nodes))


@dataclass
class Found:
    """The regions of a graph, and what was not fused. outside: the calls in no region."""

    regions: list[Region] = field(default_factory=list)
    not_fused: list[NotFused] = field(default_factory=list)
    calls: int = 0  # calls of operations in the graph
    outside: list[Node] = field(default_factory=list)

    def leave(self, left: Sequence[Region], why: str) -> None:
        """Takes regions out again."""
        self.regions = [r for r in self.regions if r not in left]
        self.outside += [n for r in left for n in r.nodes]
        self.not_fused += [
            NotFused(str(called_op(n)), source_of(n), why)
            for r in left
            for n in r.nodes
            if is_call(n)
        ]


_counted = 0  # regions of this process


def limit(result: Found, with_: Options) -> None:
    """Leaves the regions beyond the option `bisect_limit`, which counts those of all graphs of a
    process; warns which region is the last that is fused.
    """
    global _counted
    left, _counted = max(0, with_.bisect_limit - _counted), _counted + len(result.regions)
    if left < len(result.regions):
        result.leave(result.regions[left:], "the option bisect_limit leaves it")
    if with_.bisect_limit <= _counted and left:
        warn_once(
            f"bisect_limit = {with_.bisect_limit}: the last region that is fused is\n"
            f"{result.regions[-1].fusion}"
        )


def find_regions(graph: Graph, with_: Options) -> Found:
    """The regions of a graph whose nodes carry fake values, as they are compiled under these
    options.
    """
    return _Search(graph, with_).run()


class _Search:
    """The search in one graph."""

    def __init__(self, graph: Graph, with_: Options):
        self.nodes = list(graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.paths = Paths(self.nodes, self.place)
        self.size_sources = size_sources(self.nodes)
        self.with_ = with_
        self.taken: set[Node] = set()
        self.compared: set[Node] = set()
        self.refused: dict[Node, Error] = {}
        # refused when tried alone: the calls around it may change that
        self.alone: dict[Node, Error] = {}
        self.trimmed: dict[Node, str] = {}
        self.found = Found(
            calls=sum(
                n.op == "call_function" and n.target is not operator.getitem for n in self.nodes
            )
        )

    def run(self) -> Found:
        """All regions, one after the other."""
        for seed in [n for n in self.nodes if self._makes_product(n)]:
            if seed not in self.taken:
                region = self._region(seed)
                if region is not None:
                    self.found.regions.append(region)
                    self.taken |= set(region.nodes)
                    self.paths.contract(region.nodes)
        self.found.outside = [
            n for n in self.nodes if n.op == "call_function" and n not in self.taken
        ]
        self._report_refusals()
        translate.warn_of_unknown()
        return self.found

    def _makes_product(self, n: Node) -> bool:
        """Whether a call, translated by itself, makes a grouped product."""
        if n.target is operator.getitem or not self._candidate(n):
            return False
        walk = Walk(with_parts(n))
        for call, error in walk.refused.items():
            failed = isinstance(error, TranslatorError) or error.__cause__ is not None
            if failed or not is_torchs(call):
                self.alone[call] = error
        results = (op for ops in walk.made.values() for op in ops)
        return not walk.refused and any(op.kind.role == "grouped" for op in results)

    def _region(self, seed: Node) -> Region | None:
        """The region around a seed. A refused call is taken out, and the region grows again without
        it.
        """
        while seed not in self.refused:
            walk = Walk(self._grow(seed))
            self.refused.update(walk.refused)
            if walk.refused or self._differ(walk):
                continue
            try:
                walk, trimmed = self._trimmed(walk)
                self._need_kernels(walk, seed)
                region = self._made(walk)
            except Exception as error:  # in what translators made, wherever it shows
                self._blame(walk, seed, error)
            else:
                self.trimmed.update(trimmed)
                return region
        return None

    def _need_kernels(self, walk: Walk, seed: Node) -> None:
        """Raises what compiling users' calls and torch's own products would raise, and
        Untranslatable if there is no kernel for the latter.
        """
        why = self._check(walk) if of_users(walk) or is_torchs(seed) else ""
        if why and is_torchs(seed):
            raise Untranslatable(
                why, expected="a product that the target has a kernel for: torch has its own"
            )

    def _blame(self, walk: Walk, seed: Node, error: Exception) -> None:
        """Refuses the users' calls that are at fault for an error, else the seed; raises an error
        that is not of a translator either.
        """
        at_fault = attribute_failure(walk, self._check)
        self.refused.update(at_fault)
        if not at_fault:
            if not isinstance(error, (FusionError, UnsupportedError, Untranslatable)):
                raise error
            self.refused[seed] = error

    def _differ(self, walk: Walk) -> bool:
        """Under the option `check`: refuses users' calls whose translators compute something else;
        returns whether there are any.
        """
        new = [n for n in of_users(walk) if n not in self.compared] if self.with_.check else []
        self.compared.update(new)
        wrong = {n: error for n in new if (error := semantics_error(n)) is not None}
        self.refused.update(wrong)
        return bool(wrong)

    def _check(self, walk: Walk) -> str:
        """Raises the errors that compiling a walk would raise. -> why the reference would compute a
        product of it; "" if it would not.
        """
        with _disable_current_modes():  # nvFuser calls torch, which would fail on fake tensors
            return pipeline.check(walk.fusion, self._target(walk), self.with_)

    def _target(self, walk: Walk) -> Target:
        return backends.find(self.with_.target, walk.device)

    def _grow(self, seed: Node) -> list[Node]:
        region = dict.fromkeys(with_parts(seed))
        span = self.paths.span(region)
        edge = self._edge(region, region)
        while edge:
            joined: list[Node] = []
            for n in edge:
                if n not in region and (wider := span | self.paths.span(with_parts(n))).convex:
                    span = wider
                    joined += with_parts(n)
                    region.update(dict.fromkeys(with_parts(n)))
            blocked = [n for n in edge if n not in region]
            edge = self._in_order({*self._edge(joined, region), *blocked}) if joined else []
        return self._in_order(region)

    def _edge(self, nodes: Iterable[Node], region: Collection[Node]) -> list[Node]:
        """The calls next to some of a region's nodes that may join it."""
        device = device_of(next(iter(region)))
        near = {
            call_of(m) for n in nodes for m in (*n.all_input_nodes, *n.users) if m not in region
        }
        return [n for n in self._in_order(near) if self._candidate(n) and device_of(n) == device]

    def _trimmed(self, walk: Walk) -> tuple[Walk, Mapping[Node, str]]:
        """The walk over the nodes that gain from being inside, and why others do not."""
        segments = by_structure(walk.fusion, self._target(walk))
        kept, why = trim(walk, segments, lambda nodes: self.paths.span(nodes).convex)
        again = Walk(kept) if len(kept) < len(walk.nodes) else walk
        # a translator may depend on a node that was trimmed
        return (walk, {}) if again.refused else (again, why)

    def _made(self, walk: Walk) -> Region:
        """A walk as a Region. Untranslatable if the value of a size of its program is found
        nowhere.
        """
        span, symbols = self.paths.span(walk.nodes), walk.fusion.symbols
        sizes = {}
        for name, expr in walk.sizes.expressions().items():
            if name in symbols:
                places = [
                    s
                    for s in self.size_sources.get(expr, ())
                    if s.node.op == "placeholder" or span.follows(self.place[s.node])
                ]
                if not places:
                    raise Untranslatable(
                        f"the size {expr} cannot be read from any value outside the fusion"
                    )
                sizes[name] = min(places, key=lambda s: (s.dim is not None, self.place[s.node]))
        return Region(
            walk.nodes, tuple(walk.inputs), tuple(walk.outputs), walk.fusion, sizes, walk.transposed
        )

    def _candidate(self, n: Node) -> bool:
        """Whether a call may be part of a region: it has a translator, and its results are read."""
        if (
            n in self.refused
            or n in self.taken
            or not is_call(n)
            or writes(n)
            or not has_tensors(n)
        ):
            return False
        return bool(n.users) and translate.find(op_name(n)) is not None

    def _report_refusals(self) -> None:
        """Reports why calls that are next to a region, make products, or write into their arguments
        are not in a region.
        """
        near = {
            call_of(m)
            for r in self.found.regions
            for n in r.nodes
            for m in (*n.all_input_nodes, *n.users)
        }
        writers = [n for n in self.nodes if writes(n) and not is_torchs(n)]
        reported = {
            n
            for n in (*near, *writers, *self.refused, *self.alone, *self.trimmed)
            if n not in self.taken and called_op(n)
        }
        for n in self._in_order(reported):
            reason = (
                self.refused.get(n) or self.trimmed.get(n) or self.alone.get(n) or self._why_not(n)
            )
            why = f"refused: {reason}" if isinstance(reason, Untranslatable) else str(reason)
            entry = NotFused(
                str(called_op(n)), source_of(n), why, broken=isinstance(reason, TranslatorError)
            )
            if entry not in self.found.not_fused:
                self.found.not_fused.append(entry)

    def _why_not(self, n: Node) -> str:
        if writes(n):
            return "it mutates its arguments, and a fusion only returns new tensors"
        if not has_tensors(n):
            return "its results are not tensors"
        if translate.find(op_name(n)) is None:
            return "it has no translator" if is_torchs(n) else translate.why_none()
        if not n.users:
            return "its results are unused"
        return (
            "a view, which is free outside the fusion"
            if is_view(n)
            else ("fusing it would create a cycle")
        )

    def _in_order(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.place.__getitem__)


# Translators at fault: passes and kernels know no translators -------------------------------------


def of_users(walk: Walk) -> list[Node]:
    """The calls in a walk whose translators did not come with the library."""
    return [
        n
        for n in walk.nodes
        if is_call(n) and (t := translate.find(op_name(n))) is not None and t.of_user
    ]


def attribute_failure(
    walk: Walk, compile: Callable[[Walk], object]
) -> Mapping[Node, TranslatorError]:
    """The users' calls without which the rest compiles, with the error for each: only those at
    fault if they can be told apart, else all.

    compile: raises the failure. The result is empty if the rest fails too.
    """
    users = of_users(walk)
    if not users or _error(walk, users, compile) is not None:
        return {}
    results = {n: _error(walk, [m for m in users if m is not n], compile) for n in users}
    errors = results if any(results.values()) else dict.fromkeys(users, _error(walk, (), compile))
    return {n: _at_fault(n, error) for n, error in errors.items() if error is not None}


def _error(
    walk: Walk, without: Collection[Node], compile: Callable[[Walk], object]
) -> Exception | None:
    """The error when a walk is compiled without some of its calls, whose results become inputs."""
    try:
        kept = [n for n in walk.nodes if call_of(n) not in without]
        if kept and not (again := Walk(kept)).refused:
            compile(again)
    except Exception as error:
        return error
    return None


def _at_fault(n: Node, error: Exception) -> TranslatorError:
    translator = translate.find(op_name(n))
    assert translator is not None
    what = "returned operations that do not compile"
    fault = translator.fault(
        what, error, f"operations that compile, or {translate.REFUSAL}", translator.where
    )
    fault.__cause__ = error
    return fault
