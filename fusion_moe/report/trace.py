"""explain: traces a call as torch.compile would, and tells of every region what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph

from .. import options, translate
from .. import target as targets
from ..compile import Lowered, lower
from ..emit import BACKENDS
from ..frontends.inductor import compile_calls
from ..frontends.regions import Found, Region, find_regions
from ..ir.core import Fusion, Op
from ..ir.sizes import value
from ..ir.text import text
from ..ir.types import Dim, Groups, Rows, TensorType
from ..options import Options
from ..passes import dropped_roundings
from ..segment import Segment
from ..target import Target
from . import cost
from .data import FusionReport, LeftReport, Report, SegmentReport


def explain(model_or_fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Report:
    """What torch.compile(model_or_fn, backend="fusion_moe") fuses when it is called with these arguments, what it does not, and why.

    The call is traced and run once, in the grad mode in force, with the sizes of these arguments; of a training step the forward pass.
    Nothing is compiled to machine code and what torch.compile knows of the model stays as it is. target: None follows the device of the
    tensors; else a name in target.py, also of one that this version runs nothing on: the call itself then runs by the operations'
    meaning, as with target "reference". OptionError for a target that there is not.
    """
    switches = options.current().replace(**({} if target is None else {"target": target}))
    return _report(_look(model_or_fn, args, kwargs, switches), switches)


@dataclass
class _Seen:
    """What is found in each graph of a call (a graph break makes several), and the operations there that nobody translates."""

    graphs: list[Found] = field(default_factory=list)
    custom_ops: dict[str, None] = field(default_factory=dict)


def _look(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], switches: Options) -> _Seen:
    seen = _Seen()

    def look(graph: Graph, is_inference: bool = False) -> None:
        if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
            return  # a backward pass
        seen.graphs.append(find_regions(graph, lambda device: targets.find(switches.target, device)))
        seen.custom_ops.update((name, None) for n in graph.nodes if (name := _custom_op(n.target)))

    wanted = targets.find(switches.target, torch.device("cpu"))  # a name that is none raises here and not inside Dynamo
    has_isolation = "isolate_recompiles" in signature(torch.compile).parameters  # torch 2.13
    apart: dict[str, Any] = {"isolate_recompiles": True} if has_isolation else {}
    compiled = torch.compile(
        _called(_original(function)), backend=lambda model, inputs: compile_calls(look, model, inputs), dynamic=False, **apart
    )
    limits = torch._dynamo.config.patch(recompile_limit=2**16, accumulated_recompile_limit=2**16)
    with limits, nullcontext() if wanted.executed else options.override(target="reference"):
        compiled(*args, **kwargs)
    return seen


def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile was given, where it was called already: on a module, on a function, or as module.compile()."""
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    if isinstance(function, torch.nn.Module) and function._compiled_call_impl is not None:
        return function._call_impl
    return function


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another. Dynamo keeps what it compiles with the code of a function: this one's is its own, and goes with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _custom_op(op: Any) -> str:
    """The name of an operation that is not torch's and has no translator, else nothing."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace in ("aten", "prims", "prim", "inductor"):
        return ""
    return "" if translate.find(op.name()) else op.name()


def _report(seen: _Seen, switches: Options) -> Report:
    graphs = seen.graphs
    regions = [region for found in graphs for region in found.regions]
    left = Counter((x.op, x.source, x.why) for found in graphs for x in found.left)
    wanted = _target(regions, switches)
    programs: dict[Any, list[Region]] = {}
    for region in regions:
        key = text(region.fusion), tuple(op.source for op in region.fusion.ops), tuple(_numbers(region).items())
        programs.setdefault(key, []).append(region)
    return Report(
        target=wanted.name,
        executed=wanted.executed,
        graphs=len(graphs),
        calls=sum(found.calls for found in graphs),
        fused_calls=sum(region.calls for region in regions),
        fusions=tuple(_fusion(f"fusion{i}", equal, wanted, switches) for i, equal in enumerate(programs.values())),
        left=tuple(LeftReport(*key, times) for key, times in left.items()),
        custom_ops=tuple(seen.custom_ops),
    )


def _target(regions: list[Region], switches: Options) -> Target:
    device = regions[0].device if regions else torch.device("cpu")
    return targets.find(switches.target, device)


def _numbers(region: Region) -> dict[str, int]:
    """The sizes of this call, for the symbols of a region; those that only the device knows are left out."""
    found = {}
    for name, shown in region.sizes.items():
        val = shown.node.meta["val"]
        size = val if shown.dim is None else val.shape[shown.dim]
        if size.node.has_hint():
            found[name] = int(size.node.hint) // shown.by
    return found


def _fusion(id: str, equal: list[Region], to: Target, switches: Options) -> FusionReport:
    lowered, env = lower(equal[0].fusion, to, switches), _numbers(equal[0])
    segments = tuple(_segment(id, i, lowered, env, to, switches) for i in range(len(lowered.segments)))
    stages = [(name, text(f)) for name, f in lowered.stages]
    stages.append(
        ("segments", "\n\n".join(f"# {s.id}: {s.kind}\n{text(x.fusion)}" for s, x in zip(segments, lowered.segments, strict=True)))
    )
    stages.append(("schedules", "\n".join(f"{s.id}: {s.schedule}" for s in segments)))
    stages.append(
        ("source", "\n\n".join(f"# {s.id}: {s.backend}\n{source}" for s, source in zip(segments, _sources(lowered, to), strict=True)))
    )
    return FusionReport(id, len(equal), tuple(env.items()), segments, tuple(stages))


def _segment(fusion: str, i: int, lowered: Lowered, env: Mapping[str, int], to: Target, switches: Options) -> SegmentReport:
    segment = lowered.segments[i]
    backend, why = _backend(to)
    return SegmentReport(
        id=f"{fusion}.{i}",
        kind=segment.kind,
        ops=tuple(op.kind.name for op in segment.fusion.ops if not op.kind.view),
        sources=tuple(dict.fromkeys(op.source for op in segment.fusion.ops if op.source and not op.kind.view)),
        inputs=tuple(str(_bound(v.type, env)) for v in segment.fusion.inputs),
        outputs=tuple(str(_bound(v.type, env)) for v in segment.fusion.outputs),
        **_costs(segment, env),
        roundings=_roundings(segment, switches),
        schedule=str(lowered.schedules[i]),
        backend=backend,
        backend_why=why,
        after=tuple(f"{fusion}.{j}" for j, s in enumerate(lowered.segments) if set(s.outputs) & set(segment.inputs)),
        why=segment.why,
    )


def _costs(segment: Segment, env: Mapping[str, int]) -> dict[str, Any]:
    if not set(segment.fusion.symbols) <= set(env):
        return dict.fromkeys(("flops", "bytes_read", "bytes_written", "bytes_avoided", "intensity"))
    flops, read, written = cost.flops(segment.fusion, env), cost.bytes_read(segment, env), cost.bytes_written(segment, env)
    return {
        "flops": flops,
        "bytes_read": read,
        "bytes_written": written,
        "bytes_avoided": cost.bytes_avoided(segment, env),
        "intensity": flops / max(read + written, 1),
    }


def _bound(type: TensorType, env: Mapping[str, int]) -> TensorType:
    """The type with the sizes of the call."""
    return type.with_(shape=tuple(_dim(d, env) for d in type.shape)) if set(type.symbols()) <= set(env) else type


def _dim(dim: Dim, env: Mapping[str, int]) -> Dim:
    if isinstance(dim, Rows):
        return Rows(value(dim.total, env), Groups(dim.groups.name, value(dim.groups.count, env)), dim.align)
    return value(dim, env)


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
