"""Calls of torch as nodes of an FX graph: the operations that are dispatched while a function runs
on fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ..definitions.operations import SPECS
from ..errors import UnsupportedError


class Recorder(TorchDispatchMode):
    """Writes the calls that run under it into a graph. Tensors are fakes without memory, contiguous
    unless something else is known.
    """

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.fakes = FakeTensorMode()
        self.source = ""  # the stack trace of what is running
        # the tensor is kept alive, so that no other one gets its id
        self._nodes: dict[int, tuple[Node, torch.Tensor]] = {}

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, k_major: bool = False
    ) -> torch.Tensor:
        """A fake tensor without a node; k_major: the transposed view of a contiguous one."""
        with torch.inference_mode(False), self.fakes:
            if k_major:
                return torch.empty(
                    (*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device
                ).mT
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def give(self, node: Node, value: Any) -> None:
        """Assigns a node to a tensor, or to a tuple whose tensors are its getitems."""
        node.meta.update(val=value, stack_trace=self.source)
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = (node, value)
            return
        for i, part in enumerate(value if isinstance(value, (tuple, list)) else ()):
            if isinstance(part, torch.Tensor):
                self.give(self.graph.call_function(operator.getitem, (node, i)), part)

    def node(self, value: Any) -> Any:
        """The node of a tensor; any other value unchanged. UnsupportedError for a tensor that no
        recorded call made.
        """
        if not isinstance(value, torch.Tensor):
            return value
        # a number, as the dispatcher passes it
        if not isinstance(value, FakeTensor) and value.dim() == 0:
            with _disable_current_modes():
                return value.item()
        if id(value) not in self._nodes:
            raise UnsupportedError(
                "a tensor that is neither an input nor the result of an operation",
                expected="constants as numbers",
            )
        return self._nodes[id(value)][0]

    @contextmanager
    def running(self, source: str = "") -> Iterator[None]:
        """A context in which calls are recorded, without autocast, whose casts traces have. If it
        fails, what it recorded is removed.
        """
        before, self.source = list(self.graph.nodes), source
        try:
            with torch.inference_mode(False), torch._C._DisableAutocast(), self.fakes, self:
                yield
        except BaseException:
            for n in reversed(list(self.graph.nodes)[len(before) :]):
                self.graph.erase_node(n)
            raise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query about a tensor
            return result
        if func._schema.is_mutable:
            raise UnsupportedError(
                f"{func} mutates its arguments", expected="an operation that returns new tensors"
            )
        node_args, node_kwargs = tree_map(self.node, (args, kwargs or {}))
        self.give(self.graph.call_function(func, node_args, node_kwargs), result)
        return result


def k_major_arguments(op: Any) -> tuple[int, ...]:
    """The positions of arguments [..., K, N] that an operation takes with K contiguous, in whatever
    namespace it was registered.
    """
    spec = SPECS.get(op._schema.name.partition("::")[2])
    return tuple(i for i, a in enumerate(op._schema.arguments) if spec and a.name in spec.k_major)
