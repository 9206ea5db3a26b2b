"""Weights that a graph holds as constants, as Inductor's freezing makes them of parameters: stored
once, when the graph is compiled, in the layout that the target's kernels read fastest.

What is written into the parameters afterwards is not seen, as torch says of freezing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import backends
from ..bodies.stored import Stored, in_layout, reading, to_reorder
from ..ir import Op, Value
from ..options import Options
from .regions import Region


def store_constants(graph: Graph, regions: Sequence[Region], with_: Options) -> list[Region]:
    """The regions, of which those with constant weights in another layout read new constants."""
    return [_stored(graph, region, with_) for region in regions]


def _stored(graph: Graph, region: Region, with_: Options) -> Region:
    fusion, target = region.fusion, backends.find(with_.target, region.device)
    nodes = dict(zip(fusion.inputs, region.inputs, strict=True))
    reordered = dict[Op, tuple[str, list[Tensor]]]()
    for pack, wanted in to_reorder(fusion, target):
        if all(nodes[v].op == "get_attr" for v in pack.values):
            tensors = [_constant(graph, nodes[v], region) for v in pack.values]
            if parts := in_layout(pack, wanted, tensors):
                reordered[pack] = wanted, parts
    return _with_parts(graph, region, nodes, reordered) if reordered else region


def _constant(graph: Graph, node: Node, region: Region) -> Tensor:
    """The tensor of a node, as the region's Fusion takes it."""
    assert graph.owning_module is not None
    t = operator.attrgetter(str(node.target))(graph.owning_module).detach()
    t = t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t
    return t.mT if node in region.transposed else t


def _with_parts(
    graph: Graph, region: Region, nodes: Mapping[Value, Node], reordered: Stored
) -> Region:
    """The region with some weights as other constants, in other layouts."""
    new = {
        v: _node_of(graph, region, nodes[v], t)
        for pack, (_, parts) in reordered.items()
        for v, t in zip(pack.values, parts, strict=True)
    }
    inputs = tuple(new.get(v, nodes[v]) for v in region.fusion.inputs)
    return replace(region, fusion=reading(region.fusion, reordered), inputs=inputs)


def _node_of(graph: Graph, region: Region, of: Node, t: Tensor) -> Node:
    """A constant in place of another one."""
    module, n = graph.owning_module, 0
    while hasattr(module, name := f"_reordered_{n}"):
        n += 1
    assert module is not None
    module.register_buffer(name, t)
    with graph.inserting_before(region.nodes[0]):
        node = graph.get_attr(name)
    node.meta.update(of.meta, val=of.meta["val"].fake_mode.from_tensor(t))
    return node
