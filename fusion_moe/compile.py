"""The pipeline, from a Fusion to a Program. The only file that names every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from . import options, target
from .backends import TARGETS, backend_for, backend_of, emit, find, in_place_of_kernel, plan
from .errors import FusionError, UnsupportedError
from .ir import Fusion, parse
from .ir.kinds import eight_bits
from .ir.kinds.quantized import format_of
from .ir.text import text
from .messages import warn_once
from .options import Options
from .passes import PASSES
from .runtime import cuda, dump
from .runtime.program import Program, device_of
from .schedule.plan import REFERENCE
from .schedule.segment import Segment, split
from .target import Target


@dataclass(frozen=True)
class Lowered:
    """A Fusion lowered for a target, before kernels are emitted. stages: the Fusion after each
    pass, by name; segments: with plans.
    """

    stages: tuple[tuple[str, Fusion], ...]
    segments: tuple[Segment, ...]


def lower(fusion: Fusion, to: Target, with_: Options) -> Lowered:
    """Passes, segments, plans: all stages that do not need the target's machine."""
    with options.using(with_):
        _check_formats(fusion, to)
    _check_order(to, with_)
    stages = [("translated", fusion)]
    for run in PASSES:
        fusion = run(fusion, to).verify()
        stages.append((run.__name__, fusion))
    for name, stage in stages:
        options.log("passes", "%s\n%s", name, stage)
    result = segments(fusion, to, with_)
    for i, s in enumerate(result):
        why = s.boundary or "the first"
        options.log("segments", "%d [%s, %s], %s\n%s", i, s.kind, s.plan.backend, why, s.fusion)
    return Lowered(tuple(stages), result)


def segments(fusion: Fusion, to: Target, with_: Options) -> tuple[Segment, ...]:
    """The segments of a Fusion that has been through the passes, each planned by the target's
    backend.

    With order="row" a row's numbers are the same in whatever segments its operations are: nothing
    is kept in float32 where the program rounds, and no product joins another.
    """
    contract = with_.contract_rounding and not with_.row_order
    if with_.row_order:
        to = replace(to, added_features={})
    alone = {} if with_.fuse else {frozenset([op]): "fuse=False" for op in fusion.ops}
    with options.using(with_):
        return split(fusion, to, partial(plan, target=to, contract=contract), alone)


def compile_fusion(fusion: Fusion, to: Target, with_: Options) -> Program:
    """The program of a Fusion for a target."""
    lowered = lower(fusion, to, with_)
    with options.using(with_):
        emitted = [in_place_of_kernel(s, to) or emit(s, to) for s in lowered.segments]
        kernels, joined = backend_of(to).join(lowered.stages[-1][1], emitted)
    program = Program(lowered.stages, lowered.segments, kernels, to, with_.check, joined)
    return replace(program, dumped=dump.program(lowered.stages, kernels, to.name, with_))


def check(fusion: Fusion, to: Target, with_: Options) -> str:
    """Raises what compiling a Fusion would, up to its kernels' source, whatever is installed.

    -> why grouped products would run in plain torch on this machine; "" if they would not, or if
    that was asked for.
    """
    lowered, why = lower(fusion, to, with_), ""
    with options.using(with_):
        for segment in lowered.segments:
            backend = backend_for(segment, to)
            if not backend.why_missing():
                backend.emit(segment)
            kernel = in_place_of_kernel(segment, to) if _has_products(segment) else None
            if kernel and kernel.backend == REFERENCE != to.name:
                why = why or kernel.why
    return why


def program_of(source: str, device: torch.device, with_: Options | None = None) -> Program:
    """The program of a printed Fusion for a device, under these options or those in force; compiled
    once.
    """
    with_ = with_ or options.current()
    to = find(with_.target, device)
    target.check_device(to, device)
    return _program(source, to.name, with_)


@lru_cache(maxsize=1024)
def _program(source: str, to: str, with_: Options) -> Program:
    program = compile_fusion(parse(source), TARGETS[to], with_)
    _warn_of_products_in_torch(program)
    return program


def _warn_of_products_in_torch(program: Program) -> None:
    """Without kernels for them the grouped products, nearly all of a program's work, are slow, and
    on a GPU each waits for the device.
    """
    for kernel in program.kernels if program.target.name != REFERENCE else ():
        if kernel.backend == REFERENCE and _has_products(kernel.segment):
            warn_once(f"grouped products run slowly {kernel.why}")


def _has_products(segment: Segment) -> bool:
    return any(op.kind.role == "grouped" for op in segment.fusion.ops)


def run(fusion: Fusion, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compiles a Fusion for the device of its inputs and runs it: `fusion_moe.run(fd.fusion(), [x,
    y])`. Gradients reach the inputs.

    Args:
        fusion: the program.
        tensors: its inputs, in order, of the types that it states.

    Returns:
        A tensor for each output of the program.

    Raises:
        FusionError: if `fusion` is not a Fusion or has no outputs, or if `tensors` is a tensor
            instead of a list.
    """
    if not isinstance(fusion, Fusion):
        raise FusionError(
            f"a {type(fusion).__name__}",
            expected="a Fusion, as fd.fusion() returns it",
            where="run",
        )
    if not fusion.outputs:
        raise FusionError(
            "a Fusion without outputs", expected="at least one: fd.add_output(value)", where="run"
        )
    if isinstance(tensors, torch.Tensor):
        raise FusionError(
            "a tensor in place of the inputs",
            expected="a list of tensors, one for each input",
            where="run",
        )
    source = text(fusion)
    program = program_of(source, device_of(tensors))
    sizes, symbols = program.sizes(tensors, {}), program.stages[0][1].symbols
    # by torch's dispatcher: autograd, transforms, and tensors without memory of their own
    return list(torch.ops.fusion_moe.run(source, list(tensors), [sizes[s] for s in symbols]))


def _check_order(to: Target, with_: Options) -> None:
    if with_.row_order and not backend_of(to).row_order:
        able = [name for name in TARGETS if backend_of(TARGETS[name]).row_order]
        raise UnsupportedError(
            f"the target {to.name!r} with order='row': its sums may depend on the batch",
            expected=f"one of {', '.join(able)}, or order='free'",
        )


def _check_formats(fusion: Fusion, to: Target) -> None:
    for op in fusion.ops:
        formats = [op.attrs.get("operands", "")]
        # trained in 8 bits: emulated
        if op.kind.role == "grouped" and op.values[0].type.quantized:
            formats += [] if eight_bits.is_trained(op) else [format_of(op.values[0].type)]
        for wanted in filter(None, formats):
            gpu = cuda.facts() if wanted in to.requires else None
            target.check_formats(to, wanted, op.kind.name, gpu)
