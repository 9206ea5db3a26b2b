"""The graphs that torch.compile(backend="fusion_moe") compiled in this process, kept without data,
so that they can be traced again.

Inductor's caches return compiled code without calling our pass; what is in that code is found by
tracing the graph again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
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
        with tracing(TracingContext(mode)), torch.set_grad_enabled(self.grad):
            compile(look, _copy(self.model), self.inputs)


def keep(model: GraphModule, options: Options) -> Compiled | None:
    """Keeps a graph as Dynamo made it, before compiling changes it. None for a graph from
    elsewhere, whose inputs have no fakes.
    """
    inputs = tuple(n.meta.get("example_value") for n in model.graph.nodes if n.op == "placeholder")
    if any(x is None for x in inputs):
        return None
    _compiled.append(Compiled(_copy(model), inputs, options, torch.is_grad_enabled()))
    return _compiled[-1]


def kept() -> Sequence[Compiled]:
    """The last 256 graphs that were compiled."""
    return tuple(_compiled)


def _copy(model: GraphModule) -> GraphModule:
    return GraphModule(model, copy.deepcopy(model.graph))
