"""Builds a report from what was seen in the graphs of a call: lowers every region and computes the
cost of its segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import __version__, arch, options
from .. import target as targets
from ..arch import Arch
from ..compile import Lowered, lower
from ..frontends.regions import Found, NotFused, Region
from ..ir.core import Fusion, Op
from ..ir.sizes import value
from ..ir.text import text
from ..ir.types import Dim, Groups, Rows, TensorType
from ..options import Options
from ..passes import dropped_roundings
from ..runtime import cuda
from ..schedule.segment import Segment
from ..target import Target
from . import cost, outside
from .backward import Step, is_backward, made_again, makers, rewritten
from .data import FusionReport, NotFusedReport, Report, SegmentReport
from .identity import identity, numbers
from .kernels import Launched, Made, in_cuda, launched, launched_at, made_of
from .listings import listings
from .measure import Watch, Watched
from .weights import weight_layouts


@dataclass
class Seen:
    """What was found in each graph of a call (a graph break makes several), and which operations
    have no translator.

    breaks: why no graph was captured; steps: the graphs of training steps; float_experts: the names
    of expert weights in floating point; watch: what was noted while the call ran, if it ran.
    """

    graphs: list[Found] = field(default_factory=list)
    breaks: list[NotFused] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    custom_ops: dict[str, None] = field(default_factory=dict)
    float_experts: dict[str, None] = field(default_factory=dict)
    watch: Watch | None = None


@dataclass(frozen=True)
class _Wanted:
    """What the report is made for. why_not: why programs for the target cannot run on the tensors'
    device; "" if they can.

    gpu: the GPU for which CUDA's kernels are chosen; None: that of the tensors, else the one at
    hand, or an H200 if there is none.
    """

    target: Target
    why_not: str
    switches: Options
    device: torch.device
    gpu: Arch | None

    def arch(self) -> Arch:
        """The facts of the GPU for which kernels are chosen."""
        if self.gpu or not torch.cuda.is_available():
            return self.gpu or arch.H200
        return cuda.arch(cuda.index_of(self.device))


_Place = tuple[Region, Watched | None]  # one occurrence of a fusion


def report_of(seen: Seen, switches: Options, gpu: Arch | None = None) -> Report:
    """The report of what was seen, for the target in `switches`. gpu: the GPU to choose CUDA's
    kernels for, if not the one at hand.
    """
    graphs = seen.graphs
    regions = [region for found in graphs for region in found.regions]
    not_fused = Counter(
        (x.op, x.source, x.why)
        for x in (*seen.breaks, *(x for found in graphs for x in found.not_fused))
    )
    wanted = _wanted(regions, switches, gpu)
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
    calls_outside = [n for found in graphs for n in found.outside]
    sources = {source for f in fusions for s in f.segments for source in s.sources} | {
        source for _, source, _ in not_fused
    }
    return Report(
        target=wanted.target.name,
        executed=not wanted.why_not,
        graphs=len(graphs),
        calls=sum(found.calls for found in graphs),
        fused_calls=sum(region.calls for region in regions),
        fusions=fusions,
        not_fused=tuple(NotFusedReport(*key, times) for key, times in not_fused.items()),
        custom_ops=tuple(seen.custom_ops),
        machine=seen.watch.machine() if seen.watch else None,
        saved=tuple(saved for step in seen.steps for saved in step.saved(origins)),
        gradients=tuple(gradient for step in seen.steps for gradient in step.gradients(origins)),
        float_experts=tuple(seen.float_experts),
        unfused_flops=outside.flops(calls_outside),
        unfused_bytes=outside.moved(calls_outside),
        version=__version__,
        options=_options(switches),
        listings=listings(
            [*calls_outside, *(n for region in regions for n in region.nodes)], sources
        ),
    )


def _options(switches: Options) -> tuple[tuple[str, str], ...]:
    """The options that change what is compiled, except the target."""
    return tuple(
        (name, str(value)) for name, value in switches.compared().items() if name != "target"
    )


def _wanted(regions: list[Region], switches: Options, gpu: Arch | None) -> _Wanted:
    device = regions[0].device if regions else torch.device("cpu")
    target = targets.find(switches.target, device)
    return _Wanted(target, targets.why_not_on(target, device), switches, device, gpu)


def _fusion(id: str, places: list[_Place], wanted: _Wanted) -> FusionReport:
    region, ran = places[0]
    lowered, env = lower(region.fusion, wanted.target, wanted.switches), numbers(region)
    with options.using(wanted.switches):
        made = [made_of(s, wanted.target, wanted.why_not) for s in lowered.segments]
    runs = _launched(lowered, made, env, wanted)
    segments = tuple(_segment(id, i, lowered, made[i], env, wanted) for i in range(len(made)))
    if runs:
        segments = tuple(
            replace(s, launched=kernels) for s, kernels in zip(segments, runs.kernels, strict=True)
        )
    if ran is not None and ran.kernels:
        segments = tuple(replace(s, measured=m) for s, m in zip(segments, ran.kernels, strict=True))
    stages = [(name, text(f)) for name, f in lowered.stages]
    stages.append(
        (
            "segments",
            "\n\n".join(
                f"# {s.id}: {s.kind}\n{text(x.fusion)}"
                for s, x in zip(segments, lowered.segments, strict=True)
            ),
        )
    )
    stages.append(("schedules", "\n".join(f"{s.id}: {s.schedule}" for s in segments)))
    sources = [m.source for m in made]
    if runs:
        stages.append(("choice", runs.text))
        sources = [run or source for run, source in zip(runs.sources, sources, strict=True)]
    stages.append(
        (
            "source",
            "\n\n".join(
                f"# {s.id}: {s.backend}\n{source}"
                for s, source in zip(segments, sources, strict=True)
            ),
        )
    )
    return FusionReport(
        id,
        len(places),
        tuple(env.items()),
        segments,
        tuple(stages),
        ran.whole if ran else None,
        loads=tuple(load for _, one in places if one for load in one.loads),
        gpu=runs.gpu if runs else "",
        workspace=runs.workspace if runs else None,
        launched_at=launched_at(lowered.stages[-1][1], made, wanted.arch())
        if runs and len(env) == 1
        else (),
        made_by=_made_by(lowered, segments),
        **(_of_backward(region) if is_backward(region.nodes[0].graph) else {}),
    )


def _of_backward(region: Region) -> dict[str, Any]:
    return {"backward": True, "made_again": made_again(region), "rewritten": rewritten(region)}


def _made_by(lowered: Lowered, segments: Sequence[SegmentReport]) -> tuple[str, ...]:
    """The segment that makes each output; "" for an output that is an input."""
    made = {
        v: report.id
        for segment, report in zip(lowered.segments, segments, strict=True)
        for v in segment.outputs
    }
    return tuple(made.get(v, "") for v in lowered.stages[-1][1].outputs)


def _launched(
    lowered: Lowered, made: list[Made], env: Mapping[str, int], wanted: _Wanted
) -> Launched | None:
    """The kernels that CUDA launches for the sizes of the call; None if there are no such kernels
    or a size is unknown.
    """
    fusion = lowered.stages[-1][1]
    return (
        launched(fusion, made, env, wanted.arch())
        if in_cuda(made) and set(fusion.symbols) <= set(env)
        else None
    )


def _segment(
    fusion: str, i: int, lowered: Lowered, made: Made, env: Mapping[str, int], wanted: _Wanted
) -> SegmentReport:
    segment = lowered.segments[i]
    return SegmentReport(
        id=f"{fusion}.{i}",
        kind=segment.kind,
        ops=tuple(op.kind.name for op in segment.fusion.ops if not op.kind.view),
        sources=tuple(
            dict.fromkeys(op.source for op in segment.fusion.ops if op.source and not op.kind.view)
        ),
        inputs=tuple(str(_bound(v.type, env)) for v in segment.fusion.inputs),
        outputs=tuple(str(_bound(v.type, env)) for v in segment.fusion.outputs),
        **_costs(segment, env),
        roundings=_roundings(segment),
        schedule=str(segment.plan.schedule or ""),
        backend=made.backend,
        backend_why=made.why,
        after=tuple(
            f"{fusion}.{j}"
            for j, s in enumerate(lowered.segments)
            if set(s.outputs) & set(segment.inputs)
        ),
        boundary=segment.boundary,
        layouts=weight_layouts(segment.fusion, wanted.target),
    )


def _costs(segment: Segment, env: Mapping[str, int]) -> dict[str, Any]:
    if not set(segment.fusion.symbols) <= set(env):
        return dict.fromkeys(("flops", "bytes_read", "bytes_written", "bytes_avoided", "intensity"))
    fusion = segment.fusion
    flops, read, written = (
        cost.flops(fusion, env),
        cost.bytes_read(fusion, env),
        cost.bytes_written(fusion, env),
    )
    return {
        "flops": flops,
        "bytes_read": read,
        "bytes_written": written,
        "bytes_avoided": cost.bytes_avoided(fusion, env),
        "intensity": flops / max(read + written, 1),
    }


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
    if segment.plan.fusion is segment.fusion:  # nothing is left out
        return ()
    return tuple(_rounding(segment.fusion, op) for op in dropped_roundings(segment.fusion))


def _rounding(fusion: Fusion, op: Op) -> str:
    before = fusion.producers.get(op.values[0])
    return f"{op.attrs['dtype']} after {before.kind.name if before else 'an input'}"
