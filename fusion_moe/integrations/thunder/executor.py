"""thunder's executor "fusion_moe": regions of a trace become fusions, each one bound symbol that
runs a program of ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core.proxies import unvariableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import dce
from thunder.extend import FusionExecutor, register_executor
from torch.fx import Node

from ... import options
from ...compile import program_of
from ...definitions.nodes import source_of
from ...definitions.operations import fp4_as_bytes
from ...definitions.walk import Walk
from ...frontends.inductor.log_found import log_found
from ...frontends.regions import (
    Found,
    NotFused,
    Region,
    find_regions,
    limit,
)
from ...ir import one_line
from ...runtime.program import Program
from .graph import (
    TraceGraph,
    has_open_sizes,
    in_order,
    stays_in_place,
)
from .ops import Symbols
from .saved import SaveCopies

_listener: ContextVar[list[Found] | None] = ContextVar("fusion_moe_thunder_listener", default=None)


class FusionMoe(FusionExecutor):
    """The executor. It ignores what other executors claim: it sees the trace after them."""

    def __init__(self) -> None:
        super().__init__("fusion_moe")
        self.symbols = Symbols(self)
        self.keep = SaveCopies(self)
        self.for_nvfuser: Any = None  # a ForNvFuser, once it is requested

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Whether thunder must leave a bound symbol as it is: yes for our operations; others can be
        claimed by other executors.
        """
        return bsym.sym.executor is self and not bsym.sym.is_fusion

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The trace with regions replaced. Regions do not extend over writes into memory, nor from
        the forward into the backward.

        Tensors that the backward reads are protected from writes, with regions or without.
        """
        trace = self.keep(trace)
        if has_open_sizes(trace):
            return trace
        read_later = _read_later(trace.bound_symbols)
        fused: list[BoundSymbol] = []
        counter = itertools.count()
        heard: dict[bool, Found] = {}
        for kind, stretch in itertools.groupby(
            enumerate(trace.bound_symbols), key=lambda at: _kind(at[1])
        ):
            places, bsyms = zip(*stretch, strict=True)
            if kind is None:
                fused += bsyms
                continue
            output, value = self._fused(bsyms, read_later[places[-1]], counter)
            fused += output
            _add(heard.setdefault(kind, Found()), value)
        for backward, value in heard.items():
            log_found(value)
            if not backward and (listener := _listener.get()) is not None:
                listener.append(value)
        result = from_trace(trace)
        result.bound_symbols = fused
        result = dce(result)
        result.set_provenance(TraceProvenance("Fusion by fusion_moe"))
        return result

    def fuse(self, region: Any, fusion_counter: int) -> BoundSymbol:
        """One bound symbol in place of all those of a thunder region; thunder's passes call this
        for regions that they formed. Raises the reason of the first symbol that has no translation.
        fusion_counter: the number in its name.
        """
        outputs = [unvariableify(v) for v in region.outputs]
        inside = TraceGraph(region.bound_symbols, [p.name for p in outputs])
        walk = Walk([n for nodes in inside.nodes for n in nodes])
        if walk.refused:
            raise next(iter(walk.refused.values()))
        return self._bound(inside, walk, region.bound_symbols, fusion_counter)

    @contextmanager
    def listening(self) -> Iterator[list[Found]]:
        """Yields a list of what is found in forward passes traced in this context, in order. Such
        traces cannot be run.
        """
        heard: list[Found] = []
        with options.during(_listener, heard):
            yield heard

    def _fused(
        self, bsyms: Sequence[BoundSymbol], read: Sequence[str], counter: Iterator[int]
    ) -> tuple[list[BoundSymbol], Found]:
        """One stretch of a trace with its regions replaced."""
        whole: dict[int, NotFused] = {}  # bound symbols of which a region would take only a part
        while True:
            seen = TraceGraph(bsyms, read, whole)
            regions = find_regions(seen.graph, options.current())
            inside = {n: k for k, region in enumerate(regions.regions) for n in region.nodes}
            parts = {
                i: _would_split(nodes)
                for i, nodes in enumerate(seen.nodes)
                if len({inside.get(n) for n in nodes}) > 1
            }
            if not parts:
                break
            whole.update(parts)
        regions.not_fused += whole.values()
        if _listener.get() is None:
            limit(regions, options.current())
        groups: dict[int, list[int]] = {}
        for i, nodes in enumerate(seen.nodes):
            if nodes and inside.get(nodes[0], len(regions.regions)) < len(regions.regions):
                groups.setdefault(inside[nodes[0]], []).append(i)
        taken = {i for members in groups.values() for i in members}
        items = [(i, bsym) for i, bsym in enumerate(bsyms) if i not in taken]
        for k, members in groups.items():
            replaced = [bsyms[i] for i in members]
            one = self._bound(seen, regions.regions[k], replaced, next(counter))
            items.append((members[-1], one))
        return in_order(items), regions

    def _bound(
        self, seen: TraceGraph, part: Region | Walk, bsyms: Sequence[BoundSymbol], count: int
    ) -> BoundSymbol:
        """One bound symbol that runs the program of a Fusion; thunder prints the bound symbols that
        it replaces below it.
        """
        name = f"fusion_moe{count}"
        call: Any = _not_run
        if _listener.get() is None:  # else nothing is run, and the target may be absent
            call = _Run(program_of(one_line(part.fusion), part.device, options.current()))
        inputs, outputs = ([seen.proxies[n] for n in ns] for ns in (part.inputs, part.outputs))
        symbol = Symbol(name, meta=None, is_fusion=True, executor=self)
        bound = BoundSymbol(
            symbol, tuple(inputs), {}, outputs, tuple(bsyms), _call_ctx={name: call}
        )
        bound.source_filename, bound.source_positions = (
            bsyms[-1].source_filename,
            bsyms[-1].source_positions,
        )
        bound.tags |= bsyms[-1].tags & {BoundSymbolTag.BACKWARD}
        return bound


@dataclass(frozen=True)
class _Run:
    """A program in the form in which thunder calls it."""

    program: Program

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        # past torch's dispatcher, which negates what is only marked so
        given = (t.resolve_neg() if t.is_neg() else t for t in tensors)
        return self.program([fp4_as_bytes(t) for t in given])


def _not_run(*tensors: torch.Tensor) -> list[torch.Tensor]:
    raise NotImplementedError("traced to explain what it fuses, not to be run")


def _kind(bsym: BoundSymbol) -> bool | None:
    """Whether a bound symbol belongs to the backward; None for one that stays where it is."""
    return None if stays_in_place(bsym) else BoundSymbolTag.BACKWARD in bsym.tags


def _read_later(bsyms: Sequence[BoundSymbol]) -> list[set[str]]:
    """For each position in a trace, the names that are read after it."""
    later: list[set[str]] = [set() for _ in bsyms]
    for i in range(len(bsyms) - 1, 0, -1):
        later[i - 1] = later[i] | {p.name for p in bsyms[i].flat_proxy_args}
    return later


def _would_split(nodes: Sequence[Node]) -> NotFused:
    call = next((n for n in nodes if n.op == "call_function"), nodes[0])
    return NotFused(
        str(call.target), source_of(call), "fusing it would split an operation of thunder's"
    )


def _add(total: Found, result: Found) -> None:
    total.regions += result.regions
    total.not_fused += [x for x in result.not_fused if x not in total.not_fused]
    total.calls += result.calls
    total.outside += result.outside


executor: FusionMoe = register_executor(FusionMoe())
