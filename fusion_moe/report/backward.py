"""For a training step: what the forward keeps for the backward, what the backward recomputes, where
gradients come from.

AOTAutograd splits one graph into two. The backward takes what the forward saves, under the names
that it has there, then the gradients of the results, `tangents`; it returns a gradient, or None,
for each input of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..bodies.autograd import derivative_of
from ..definitions.nodes import call_of, called_op, is_view, users_name
from ..definitions.traced import hint
from ..frontends.regions import Region
from ..ir import DTYPE_NAMES, Fusion, dependent
from .data import TensorReport

# an output of a fusion -> the segment that makes it, and the operation
Origins = Mapping[Node, tuple[str, str]]


@dataclass
class Step:
    """The forward and the backward of one Dynamo graph. names: the user's names of its inputs."""

    names: Sequence[str]
    forward: Graph
    backward: Graph

    def saved(self, origins: Origins) -> Iterator[TensorReport]:
        """The tensors that the backward takes from the forward."""
        inputs = dict(zip(self.forward.find_nodes(op="placeholder"), self.names, strict=False))
        there = {n.name: n for n in self.forward.nodes}
        for n in self.backward.find_nodes(op="placeholder"):
            if n.name in there and isinstance(n.meta["val"], torch.Tensor):
                made_by, operation = _origin(there[n.name], origins)
                yield _tensor(inputs.get(there[n.name], operation), n, made_by)

    def gradients(self, origins: Origins) -> Iterator[TensorReport]:
        """The gradients that the backward returns."""
        results: Any = self.backward.output_node().args[0]
        for name, n in zip(self.names, results, strict=False):
            if isinstance(n, Node):
                yield _tensor(name, n, _origin(n, origins)[0])


def input_names(model: GraphModule) -> list[str]:
    """The inputs of a Dynamo graph as the user names them: "experts.gate_up", "args[0]"."""
    return [users_name(n) for n in model.graph.find_nodes(op="placeholder")]


def is_backward(graph: Graph) -> bool:
    """Whether a graph takes gradients as inputs."""
    return any(map(_is_tangent, graph.find_nodes(op="placeholder")))


def _is_tangent(n: Node) -> bool:
    return n.name.startswith("tangents")


def type_of(t: torch.Tensor) -> str:
    """ "bf16[12, 48]", with ? for sizes that only the device knows."""
    sizes = ("?" if (size := hint(s)) is None else str(size) for s in t.shape)
    dtype = DTYPE_NAMES.get(t.dtype, str(t.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(sizes)}]"


def _tensor(name: str, n: Node, made_by: str) -> TensorReport:
    t, sizes = n.meta["val"], [hint(s) for s in n.meta["val"].shape]
    size = None if None in sizes else prod(sizes) * t.element_size()
    return TensorReport(name, type_of(t), size, made_by)


def _origin(n: Node, origins: Origins) -> tuple[str, str]:
    """The origin of a value: the segment and the operation in it, or else the call and its
    operation; "" for an input of its graph.
    """
    while n not in origins and called_op(n) is not None and is_view(n):
        (n, *_) = n.all_input_nodes
    op = called_op(call_of(n))
    return origins.get(n) or (str(op or ""), op.name().partition("::")[2] if op else "")


def makers(fusion: Fusion) -> Iterator[str]:
    """The operation that makes each output, before any final casts and reshapes; "" for an
    input.
    """
    for v in fusion.outputs:
        while (op := fusion.producers.get(v)) is not None and op.kind.name in ("cast", "reshape"):
            v = op.values[0]
        yield op.kind.name if op else ""


def made_again(region: Region) -> tuple[str, ...]:
    """The operations of a region that read no gradient: in a backward, those computed from saved
    values only.
    """
    reading: set[Any] = set()
    for n in region.nodes[0].graph.nodes:
        if _is_tangent(n) or not reading.isdisjoint(n.all_input_nodes):
            reading.add(n)
    ops, inputs = region.fusion.ops, zip(region.fusion.inputs, region.inputs, strict=True)
    values = dependent(ops, [v for v, n in inputs if n in reading])
    again = (op for op in ops if op.values and not op.kind.view and values.isdisjoint(op.values))
    return tuple(op.kind.name for op in again)


def rewritten(region: Region) -> tuple[str, ...]:
    """The derivatives in a region that are not the operations' own and round differently: the name
    of each, and its operation.
    """
    texts = [n.args[0] for n in region.nodes if n.target is torch.ops.fusion_moe.run.default]
    derivatives = [d for text in texts if (d := derivative_of(str(text)))]
    return tuple(f"router_gradient of {op.kind.name}" for d in derivatives for op in d.rewritten)
