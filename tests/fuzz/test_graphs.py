"""Random graphs through our front end, against eager: evaluated, and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, note
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config

from fusion_moe import FusionDefinition, options
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.ir.kinds import OWN
from fusion_moe.runtime.check import check_stages

from . import NUMBERS, examples, hostile
from .builder import Skip
from .case import REFERENCE, Case, case_of
from .compare import agree, outcome
from .regions import Evaluated
from .values import FLOATS

pytestmark = [pytest.mark.once, pytest.mark.slow]


def drawn(rng: Any) -> Case:
    """A case of random numbers, which is shown where a test of it fails."""
    try:
        case = case_of(rng)
    except Skip:
        assume(False)
    note(str(case))
    return case


def check(case: Case) -> None:
    """The case by way of our front end, against eager. Each region's stages must agree bit for bit,
    on the CPU's segments too.
    """
    walk = Evaluated(case)
    agree(walk.result, outcome(case.eager), case.rough)
    for run in walk.runs:
        if not isinstance(run.result, Exception):
            lowered = run.lowered()
            check_stages(lowered.stages, lowered.segments, run.inputs, run.sizes)


@given(NUMBERS)
@examples(2)
def test_regions_mean_what_eager_computes(rng):
    check(drawn(rng))


@pytest.mark.exhaustive
def test_a_fault_is_found(monkeypatch):
    """relu that forgets what is negative"""
    monkeypatch.setitem(OWN, "relu", replace(OWN["relu"], evaluate=lambda x: (x,)))
    for rng in map(Random, range(60)):
        case = case_of(rng)
        if "aten.relu" in str(case) and isinstance(
            outcome(lambda case=case: check(case)), AssertionError
        ):
            return
    pytest.fail("not found")


def without_code(gm: Any, inputs: Any) -> Any:
    """Our front end on the graph that Inductor makes; call by call, programs evaluated."""
    return compile_calls(FusionPass(REFERENCE), gm, inputs)


@given(NUMBERS)
@examples(0.3)
def test_compiled_graphs_compute_what_eager_does(rng):
    """On more rows too where sizes are dynamic, and with gradients."""
    case = drawn(rng)
    torch._dynamo.reset()
    with (
        config.patch(emulate_precision_casts=True, force_disable_caches=True),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        # not of a GraphModule, whose errors Dynamo cannot trace
        compiled = torch.compile(
            torch.fx.GraphModule({}, case.graph).forward,
            backend=without_code,
            dynamic=case.dynamic,
            fullgraph=True,
        )
        for inputs in (case.inputs, *grown(case)):
            want = outcome(lambda inputs=inputs: case.eager(*inputs))
            if inputs is case.inputs or not isinstance(want, Exception):
                with torch.no_grad():
                    agree(outcome(lambda inputs=inputs: compiled(*inputs)), want, case.rough)
        want = outcome(lambda: gradients(case, case.eager))
        if not isinstance(want, Exception):
            found = outcome(lambda: gradients(case, compiled))
            agree(found, want, [True] * len(want))


def grown(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """The inputs with three more rows where the number of rows is dynamic: the old ones again."""
    places = [n for n in case.graph.nodes if n.op == "placeholder"]
    grows = [any(isinstance(d, torch.SymInt) for d in n.meta["val"].shape) for n in places]
    if any(grows):
        yield tuple(
            t[torch.arange(len(t) + 3) % len(t)] if more else t
            for t, more in zip(case.inputs, grows, strict=True)
        )


def gradients(case: Case, f: Callable[..., Any]) -> list[Tensor]:
    """The gradients of a sum of all that has one."""
    inputs = [t.clone().requires_grad_() if t.dtype in FLOATS else t for t in case.inputs]
    with options.using(REFERENCE):
        outputs = [o.float().sum() for o in f(*inputs) if o.requires_grad and o.is_floating_point()]
    if outputs:
        torch.stack(outputs).sum().backward()
    return [t.grad for t in inputs if t.grad is not None]


@given(NUMBERS)
@examples(1)
def test_changed_texts_verify_or_are_refused(rng):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[fd.define_size("m"), 16], dtype="f32")
    fd.add_output(fd.ops.mul(fd.ops.neg(x), 2.0))
    for fusion in hostile.verified(rng, fd.fusion()):
        given = hostile.inputs_of(rng, fusion)
        if given is not None:
            fusion.bind(*given)
