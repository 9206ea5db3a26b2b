"""A case under torch.compile, with our backend: forward, on more rows where sizes are dynamic, and
backward at times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from fusion_moe import options
from fusion_moe.frontends.inductor import backend
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.options import Options

from .case import REFERENCE, Case
from .compare import difference, outcome

Backend = Callable[..., Any]


def with_inductor(gm: Any, inputs: Any) -> Any:
    """Our backend as it is."""
    return backend(gm, inputs, options={"fusion_moe.contract_rounding": False})


def without_code(gm: Any, inputs: Any) -> Any:
    """Our front end on the graph that Inductor makes; call by call, programs evaluated."""
    return compile_calls(FusionPass(REFERENCE), gm, inputs)


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing is remembered from graph to graph, and Inductor rounds where torch rounds."""
    torch._dynamo.reset()
    with (
        config.patch(emulate_precision_casts=True, force_disable_caches=True),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


def judged(case: Case, how: Backend) -> str:
    """What differs from eager; "" if nothing does, or if Inductor alone differs too."""
    with quiet():
        wrong = _differs(case, how)
    if wrong and how is with_inductor:
        with quiet():
            return "" if _differs(case, compile_fx) else wrong
    return wrong


def _differs(case: Case, how: Backend) -> str:
    rough = [n.meta["rough"] for n in case.outputs]
    compiled = _compiled(case, how)
    for inputs in (case.inputs, *grown(case)):
        want = outcome(replace(case, inputs=inputs).eager)
        if isinstance(want, Exception) and inputs is not case.inputs:
            continue
        with torch.no_grad():
            if wrong := difference(outcome(lambda inputs=inputs: compiled(*inputs)), want, rough):
                return f"{'with more rows ' if inputs is not case.inputs else ''}{wrong}"
    return _gradients_differ(case, how) if case.seed % 3 == 0 else ""


def _compiled(case: Case, how: Backend) -> Callable[..., Any]:
    """Not as a GraphModule: that makes its errors' messages with generators, which Dynamo then
    refuses to trace.
    """
    return torch.compile(case.module().forward, backend=how, dynamic=case.dynamic, fullgraph=True)


def grown(case: Case) -> Iterator[tuple[Tensor, ...]]:
    """The inputs with three more rows where the number of rows is dynamic: the old ones again."""
    places = [n for n in case.graph.nodes if n.op == "placeholder"]
    grows = [any(isinstance(d, torch.SymInt) for d in n.meta["val"].shape) for n in places]
    if any(grows):
        yield tuple(
            t[torch.arange(len(t) + 3) % len(t)] if more else t
            for t, more in zip(case.inputs, grows, strict=True)
        )


def _gradients_differ(case: Case, how: Backend) -> str:
    """The gradients of a sum of all that has one; what torch or we cannot differentiate must not be
    differentiated by either.
    """

    def gradients(f: Callable[..., Any]) -> list[Tensor]:
        inputs = [
            t.clone().requires_grad_()
            if t.dtype in (torch.float32, torch.bfloat16, torch.float16)
            else t
            for t in case.inputs
        ]
        with options.using(
            REFERENCE if how is without_code else Options().replace(contract_rounding=False)
        ):
            outputs = [
                o.float().sum() for o in f(*inputs) if o.requires_grad and o.is_floating_point()
            ]
        if not outputs:
            return []
        torch.stack(outputs).sum().backward()
        return [t.grad for t in inputs if t.requires_grad and t.grad is not None]

    want = outcome(lambda: gradients(case.module()))
    if isinstance(want, Exception):
        return ""
    torch._dynamo.reset()
    found = outcome(lambda: gradients(_compiled(case, how)))
    wrong = difference(found, want, [True] * len(want))
    return f"gradients: {wrong}" if wrong else ""
