"""Builds a report from what was seen in the graphs of a call: lowers every region and computes the
cost of its segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import torch
from torch.fx import Graph

from .. import __version__, backends, options, target as targets
from ..arch import AUTO, Arch, is_capability, shown, with_article
from ..backends import cuda
from ..compile import Lowered, lower
from ..definitions import translate
from ..definitions.nodes import called_op
from ..frontends.regions import Found, NotFused, Region, find_regions
from ..ir import Dim, Groups, Rows, TensorType, value
from ..ir.text import text
from ..options import Options
from ..passes import dropped_roundings
from ..runtime import cuda as gpus
from ..runtime.host_memory import bandwidth
from ..schedule.segment import Segment
from ..target import Target
from . import cost, outside
from .backward import Step, is_backward, made_again, makers, rewritten
from .data import FusionReport, NotFusedReport, SegmentReport
from .kernels import Made, made_of, on_gpu, weight_layouts
from .listings import listings
from .measure import Watch, Watched, identity, numbers
from .report import Report


@dataclass
class Seen:
    """What was found in each graph of a call (a graph break makes several), and which operations
    have no translator.

    breaks: why no graph was captured; steps: the graphs of training steps; float_experts: the names
    of expert weights in floating point; requantized: what requantizing experts to FP8 rounded, and
    what packages say of the modules; watch: what was noted while the call ran, if it ran. of,
    advice: as of a Report.
    """

    graphs: list[Found] = field(default_factory=list)
    breaks: list[NotFused] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    custom_ops: dict[str, None] = field(default_factory=dict)
    float_experts: dict[str, None] = field(default_factory=dict)
    requantized: str = ""
    watch: Watch | None = None
    of: str = ""
    advice: tuple[str, ...] = ()

    def add(self, graph: Graph, switches: Options) -> Found:
        """Adds a graph: what is found in it, and its operations that neither belong to torch nor
        have a translator.
        """
        regions = find_regions(graph, switches)
        self.graphs.append(regions)
        ops = [op for n in graph.nodes if (op := called_op(n))]
        self.custom_ops.update(
            (op.name(), None)
            for op in ops
            if op.namespace not in ("aten", "prims", "prim", "inductor")
            and not translate.find(op.name())
        )
        return regions

    def add_float_experts(self, names: Iterable[str]) -> None:
        """Adds names of expert weights in floating point."""
        self.float_experts.update(dict.fromkeys(names))


@dataclass(frozen=True)
class _Wanted:
    """What the report is made for. why_not: why programs for the target cannot run on the tensors'
    device; "" if they can. gpu: the GPU for which CUDA's kernels are chosen.
    """

    target: Target
    why_not: str
    switches: Options
    gpu: Arch


_Place = tuple[Region, Watched | None]  # one occurrence of a fusion


def report_of(seen: Seen, switches: Options) -> Report:
    """The report of what was seen, for the target and the GPU in `switches`: if they name none,
    that of the tensors, else the one at hand, or an H200 if there is none.
    """
    graphs = seen.graphs
    regions = [region for graph in graphs for region in graph.regions]
    calls = (*seen.breaks, *(x for graph in graphs for x in graph.not_fused))
    not_fused = Counter(calls)
    wanted = _wanted(regions, switches)
    watched = seen.watch.watched if seen.watch else [None] * len(regions)
    programs: dict[Hashable, list[_Place]] = {}
    for place in zip(regions, watched, strict=True):
        programs.setdefault(identity(place[0]), []).append(place)
    fusions = tuple(
        _fusion(f"fusion{i}", equal, wanted) for i, equal in enumerate(programs.values())
    )
    origins = {
        n: (segment, op)
        for equal, fusion in zip(programs.values(), fusions, strict=True)
        for region, _ in equal
        for n, segment, op in zip(
            region.outputs, fusion.made_by, makers(region.fusion), strict=True
        )
    }
    calls_outside = [n for graph in graphs for n in graph.outside]
    sources = {source for f in fusions for s in f.segments for source in s.sources}
    sources |= {x.source for x in not_fused}
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Report(
        target=wanted.target.name,
        executed=not wanted.why_not,
        graphs=len(graphs),
        calls=sum(graph.calls for graph in graphs),
        fused_calls=sum(region.calls for region in regions),
        fusions=fusions,
        not_fused=tuple(NotFusedReport(**vars(x), times=n) for x, n in not_fused.items()),
        custom_ops=tuple(seen.custom_ops),
        machine=seen.watch.machine() if seen.watch else None,
        saved=tuple(saved for step in seen.steps for saved in step.saved(origins)),
        gradients=tuple(gradient for step in seen.steps for gradient in step.gradients(origins)),
        float_experts=tuple(seen.float_experts),
        requantized=seen.requantized,
        unfused_flops=outside.flops(calls_outside),
        unfused_bytes=outside.moved(calls_outside),
        chosen_by_sizes=outside.by_sizes(calls_outside),
        version=__version__,
        # those that change what is compiled
        options={k: str(v) for k, v in switches.compared().items() if k != "target"},
        listings=listings(
            [*calls_outside, *(n for region in regions for n in region.nodes)], sources
        ),
        of=seen.of,
        advice=seen.advice,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        where=bandwidth.cpu() if wanted.target.device != "cuda" else here or wanted.gpu.name,
    )


def _wanted(regions: list[Region], switches: Options) -> _Wanted:
    device = regions[0].device if regions else torch.device("cpu")
    target = backends.find(switches.target, device)
    of_process = switches.cuda_arch == options.variable()[1].cuda_arch
    with options.using(switches):
        here = of_process and torch.cuda.is_available()
        gpu = gpus.arch(gpus.index_of(device)) if here else gpus.facts()
    why_not = targets.why_not_on(target, device)
    if target.device == "cuda" and switches.cuda_arch != AUTO and not here:
        why_not = _why_not_here(switches.cuda_arch, gpu, target) or why_not
    return _Wanted(target, why_not, switches, gpu)


def _why_not_here(asked: str, gpu: Arch, target: Target) -> str:
    """Why kernels for a GPU do not run here; "" if it is the one at hand."""
    if torch.cuda.is_available():
        with options.override(cuda_arch=AUTO):
            if gpus.facts().name == gpu.name:
                return ""
    of = with_article(gpu)
    why = f"for {of}, which is not here"
    if is_capability(asked):
        why = f"for compute capability {shown(gpu.capability)}; {of} stands for it"
    never = targets.never_run(target, gpu.capability)
    return f"{why}; {never}" if never else why


def _fusion(id: str, places: list[_Place], wanted: _Wanted) -> FusionReport:
    region, ran = places[0]
    lowered, env = lower(region.fusion, wanted.target, wanted.switches), numbers(region)
    kernels = ran.program.kernels if ran else [None] * len(lowered.segments)
    with options.using(wanted.switches):
        results = [
            made_of(s, wanted.target, wanted.why_not, kernel)
            for s, kernel in zip(lowered.segments, kernels, strict=True)
        ]
    fusion = lowered.stages[-1][1]
    more: dict[str, Any] = {}
    if any(m.backend == cuda.NAME for m in results) and set(fusion.symbols) <= set(env):
        results, more = on_gpu(fusion, results, env, wanted.gpu)
    if is_backward(region.nodes[0].graph):
        more.update(backward=True, made_again=made_again(region), rewritten=rewritten(region))
    times = ran.kernels if ran and ran.kernels else [None] * len(results)
    ways = ran.ways if ran else {}
    segments = tuple(
        replace(_segment(id, i, lowered, m, env, wanted), measured=measured)
        for i, (m, measured) in enumerate(zip(results, times, strict=True))
    )
    makers_ = {
        v: s.id for x, s in zip(lowered.segments, segments, strict=True) for v in x.fusion.outputs
    }
    return FusionReport(
        id,
        len(places),
        env,
        segments,
        {name: text(stage) for name, stage in lowered.stages},
        ways.get("here"),
        unfused=ways.get("unfused"),
        bf16=ways.get("bf16"),
        loads=tuple(load for _, one in places if one for load in one.loads),
        made_by=tuple(makers_.get(v, "") for v in fusion.outputs),
        **more,
    )


def _segment(
    fusion: str,
    i: int,
    lowered: Lowered,
    result: Made,
    env: Mapping[str, int],
    wanted: _Wanted,
) -> SegmentReport:
    segment = lowered.segments[i]
    program = segment.fusion
    ops = [op for op in program.ops if not op.kind.view]
    known = set(program.symbols) <= set(env)
    counts = cost.flops, cost.bytes_read, cost.bytes_written, cost.bytes_avoided
    costs: dict[str, Any] = {f.__name__: f(program, env) if known else None for f in counts}
    return SegmentReport(
        id=f"{fusion}.{i}",
        kind=segment.kind,
        ops=tuple(op.kind.name for op in ops),
        sources=tuple(dict.fromkeys(op.source for op in ops if op.source)),
        inputs=tuple(str(_bound(v.type, env)) for v in program.inputs),
        outputs=tuple(str(_bound(v.type, env)) for v in program.outputs),
        **costs,
        roundings=_roundings(segment),
        schedule=str(segment.plan.schedule or ""),
        backend=result.backend,
        backend_why=result.why,
        after=tuple(
            f"{fusion}.{j}"
            for j, s in enumerate(lowered.segments)
            if set(s.fusion.outputs) & set(segment.fusion.inputs)
        ),
        boundary=segment.boundary,
        ir=text(program),
        source=result.source,
        layouts=weight_layouts(program, wanted.target),
        launched=result.launched,
    )


def _bound(type: TensorType, env: Mapping[str, int]) -> TensorType:
    """The type with the sizes of the call in it."""
    return (
        type.with_(shape=tuple(_dim(d, env) for d in type.shape))
        if set(type.symbols()) <= set(env)
        else type
    )


def _dim(dim: Dim, env: Mapping[str, int]) -> Dim:
    if isinstance(dim, Rows):
        return Rows(
            value(dim.total, env), Groups(dim.groups.name, value(dim.groups.count, env)), dim.align
        )
    return value(dim, env)


def _roundings(segment: Segment) -> tuple[str, ...]:
    """The casts that are left out, as "bf16 after grouped_mm"."""
    fusion = segment.fusion
    if segment.plan.fusion is fusion:  # nothing is left out
        return ()
    casts = ((op, fusion.producers.get(op.values[0])) for op in dropped_roundings(fusion))
    return tuple(
        f"{op.attrs['dtype']} after {before.kind.name if before else 'an input'}"
        for op, before in casts
    )
