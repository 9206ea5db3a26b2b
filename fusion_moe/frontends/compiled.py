"""The graphs that torch.compile(backend="fusion_moe") compiled in this process, kept without data,
so that they can be traced again.

Inductor's caches return compiled code without calling our pass; what is in that code is found by
tracing the graph again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule

from ..options import Options

_MOST = 256
_compiled: deque[Compiled] = deque(maxlen=_MOST)


@dataclass(frozen=True)
class Compiled:
    """A Dynamo graph. inputs: fakes and symbolic numbers; grad: the grad mode in which it was
    compiled.
    """

    model: GraphModule
    inputs: tuple[Any, ...]
    options: Options
    grad: bool

    def again(self, compile: Callable[..., Any], look: Callable[[Graph, bool], None]) -> None:
        """Traces the forward pass again. compile: `compile_graph.compile_calls`, which passes the
        traced graph to `look`.
        """
        mode = next(
            (x.fake_mode for x in self.inputs if isinstance(x, FakeTensor)), FakeTensorMode()
        )
        with tracing(TracingContext(mode)), _no_restart(mode), torch.set_grad_enabled(self.grad):
            compile(look, _copy(self.model), self.inputs)


@contextmanager
def _no_restart(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, no float that is an input has Dynamo begin again with a constant in its place: that
    was done when the graph was compiled, and who traces it again is not Dynamo.
    """
    from torch._dynamo.symbolic_convert import TensorifyState

    env, constants = mode.shape_env, TensorifyState.force_specializations
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    numbers: Mapping[Any, Any] = getattr(env, name, {})
    before = set(constants)
    constants.update(str(symbol) for symbol in numbers)
    try:
        yield
    finally:
        constants.clear()
        constants.update(before)


def as_made(model: GraphModule, options: Options) -> Compiled | None:
    """A graph as Dynamo made it, before compiling changes it. None for a graph from elsewhere,
    whose inputs have no fakes.
    """
    inputs = tuple(n.meta.get("example_value") for n in model.graph.nodes if n.op == "placeholder")
    if any(x is None for x in inputs):
        return None
    return Compiled(_copy(model), inputs, options, torch.is_grad_enabled())


def keep(compiled: Compiled | None) -> None:
    """Keeps a graph that was compiled. Dynamo may end compiling one and trace it another way."""
    if compiled:
        _compiled.append(compiled)


def kept() -> Sequence[Compiled]:
    """The graphs that torch.compile compiled with fusions in this process, the latest last; at most
    256.
    """
    return tuple(_compiled)


def _copy(model: GraphModule) -> GraphModule:
    return GraphModule(model, copy.deepcopy(model.graph))
