"""explain: traces a call as torch.compile would, and tells of every region what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph

from .. import options
from .. import target as targets
from ..compile import Lowered, lower
from ..emit import BACKENDS
from ..frontends.regions import Found, find_regions
from ..frontends.inductor import compile_calls
from ..ir.core import Fusion, Op
from ..ir.text import text
from ..options import Options
from ..passes import dropped_roundings
from ..segment import Segment
from ..target import Target
from . import cost
from .data import FusionReport, LeftReport, Report, SegmentReport


def explain(model_or_fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Report:
    """What torch.compile(model_or_fn, backend="fusion_moe") fuses when it is called with these arguments, what it does not, and why.

    The call is traced and run once, in the grad mode in force, with the sizes of these arguments; of a training step the forward pass.
    Nothing is compiled to machine code and the model stays as it is. target: None follows the device of the tensors; else a name in
    target.py, also of one that this version runs nothing on. OptionError for a target that there is not.
    """
    switches = options.current().replace(**({} if target is None else {"target": target}))
    graphs = _graphs(model_or_fn, args, kwargs, switches)
    return _report(graphs, switches)


def _graphs(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], switches: Options) -> list[Found]:
    """What is found in each graph of the call; a graph break makes several."""
    graphs: list[Found] = []

    def look(graph: Graph, is_inference: bool = False) -> None:
        graphs.append(find_regions(graph, lambda device: targets.find(switches.target, device)))

    targets.find(switches.target, torch.device("cpu"))  # a name that is none raises here and not inside Dynamo
    compiled = torch.compile(
        getattr(function, "_orig_mod", function), backend=lambda model, inputs: compile_calls(look, model, inputs), dynamic=False
    )
    compiled(*args, **kwargs)
    return graphs


def _report(graphs: list[Found], switches: Options) -> Report:
    regions = [region for found in graphs for region in found.regions]
    left = Counter((x.op, x.source, x.why) for found in graphs for x in found.left)
    wanted = _target(regions, switches)
    programs: dict[tuple[str, str], tuple[Fusion, int]] = {}
    for region in regions:
        key = text(region.fusion), " ".join(op.source for op in region.fusion.ops)
        programs[key] = region.fusion, programs.get(key, (None, 0))[1] + 1
    return Report(
        target=wanted.name,
        executed=wanted.executed,
        graphs=len(graphs),
        calls=sum(found.calls for found in graphs),
        fused_calls=sum(region.calls for region in regions),
        fusions=tuple(_fusion(f"fusion{i}", fusion, times, wanted, switches) for i, (fusion, times) in enumerate(programs.values())),
        left=tuple(LeftReport(*key, times) for key, times in left.items()),
    )


def _target(regions: list[Any], switches: Options) -> Target:
    device = regions[0].device if regions else torch.device("cpu")
    return targets.find(switches.target, device)


def _fusion(id: str, fusion: Fusion, times: int, to: Target, switches: Options) -> FusionReport:
    lowered = lower(fusion, to, switches)
    segments = tuple(_segment(f"{id}.{i}", i, lowered, to, switches) for i in range(len(lowered.segments)))
    stages = [(name, text(f)) for name, f in lowered.stages]
    stages.append(
        ("segments", "\n\n".join(f"# {s.id}: {s.kind}\n{text(x.fusion)}" for s, x in zip(segments, lowered.segments, strict=True)))
    )
    stages.append(("schedules", "\n".join(f"{s.id}: {s.schedule}" for s in segments)))
    stages.append(
        ("source", "\n\n".join(f"# {s.id}: {s.backend}\n{source}" for s, source in zip(segments, _sources(lowered, to), strict=True)))
    )
    return FusionReport(id, times, segments, tuple(stages))


def _segment(id: str, i: int, lowered: Lowered, to: Target, switches: Options) -> SegmentReport:
    segment = lowered.segments[i]
    env = dict.fromkeys(segment.fusion.symbols, 0)  # none, but for sizes that only running tells
    backend, why = _backend(to)
    return SegmentReport(
        id=id,
        kind=segment.kind,
        ops=tuple(op.kind.name for op in segment.fusion.ops if not op.kind.view),
        sources=tuple(dict.fromkeys(op.source for op in segment.fusion.ops if op.source and not op.kind.view)),
        inputs=tuple(str(v.type) for v in segment.fusion.inputs),
        outputs=tuple(str(v.type) for v in segment.fusion.outputs),
        flops=cost.flops(segment.fusion, env),
        bytes_read=cost.bytes_read(segment, env),
        bytes_written=cost.bytes_written(segment, env),
        bytes_avoided=cost.bytes_avoided(segment, env),
        roundings=_roundings(segment, switches),
        schedule=str(lowered.schedules[i]),
        backend=backend,
        backend_why=why,
        why=segment.why,
    )


def _backend(to: Target) -> tuple[str, str]:
    """Who makes the kernels of a target, and why."""
    if not to.executed:
        return "none", f"emitted, unexecuted: this version runs nothing on {to.name}"
    name = BACKENDS[to.name].__module__.rsplit(".", 1)[1]
    why = f"there are no kernels for {to.name} yet: each operation in plain torch, by its meaning"
    return name, "asked for" if name == to.name else why


def _sources(lowered: Lowered, to: Target) -> list[str]:
    """The text of each kernel; the segment's own where nothing is emitted."""
    if not to.executed:
        return [text(s.fusion) for s in lowered.contracted]
    return [BACKENDS[to.name](s, c).source for s, c in zip(lowered.contracted, lowered.schedules, strict=True)]


def _roundings(segment: Segment, switches: Options) -> tuple[str, ...]:
    """The casts that are left out, as "bf16 after grouped_mm"."""
    if not switches.contract_rounding:
        return ()
    return tuple(_rounding(segment.fusion, op) for op in dropped_roundings(segment.fusion))


def _rounding(fusion: Fusion, op: Op) -> str:
    before = fusion.producers.get(op.values[0])
    return f"{op.attrs['dtype']} after {before.kind.name if before else 'an input'}"
