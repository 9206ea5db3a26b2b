"""Weights that a graph holds as constants, as Inductor's freezing makes them of parameters: stored
once, when the graph is compiled, in the layout that the target's kernels read fastest.

What is written into the parameters afterwards is not seen, as torch says of freezing.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import backends
from ..encodings import check_part_scales
from ..errors import NonFiniteError
from ..ir import Fusion, FusionDefinition, Op, Value
from ..ir.kinds.quantized import format_of
from ..layouts import LAYOUTS
from ..options import Options
from ..passes.rewrite import rewrite
from ..schedule.product import GroupedProduct, products
from .regions import Region


def store_constants(graph: Graph, regions: Sequence[Region], with_: Options) -> list[Region]:
    """The regions, of which those with constant weights in another layout read new constants."""
    return [_stored(graph, region, with_) for region in regions]


def _stored(graph: Graph, region: Region, with_: Options) -> Region:
    fusion, target = region.fusion, backends.find(with_.target, region.device)
    nodes = dict(zip(fusion.inputs, region.inputs, strict=True))
    reordered = dict[Op, tuple[str, list[Tensor]]]()
    for product in products(fusion):
        pack = fusion.producer(product.b, "pack")
        if pack is None or not _is_constant(fusion, pack, product, nodes):
            continue
        wanted = target.layout_of(pack.attrs["encoding"], format_of(product.a.type))
        tensors = [_constant(graph, nodes[v], region) for v in pack.values]
        if wanted != pack.attrs["layout"] and (parts := _in_layout(pack, wanted, tensors)):
            reordered[pack] = wanted, parts
    return _with_parts(graph, region, nodes, reordered) if reordered else region


def _is_constant(
    fusion: Fusion, pack: Op, product: GroupedProduct, nodes: Mapping[Value, Node]
) -> bool:
    """Whether the parts of a weight are constants, and only this product reads it."""
    alone = all(len(fusion.readers[v]) == 1 for v in (*pack.values, *pack.outputs))
    constant = all(v in nodes and nodes[v].op == "get_attr" for v in pack.values)
    coded = pack.outputs[0].type.quantized
    return alone and constant and coded and product.kind == "fprop"


def _constant(graph: Graph, node: Node, region: Region) -> Tensor:
    """The tensor of a node, as the region's Fusion takes it."""
    assert graph.owning_module is not None
    t = operator.attrgetter(str(node.target))(graph.owning_module).detach()
    t = t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t
    return t.mT if node in region.transposed else t


def _in_layout(pack: Op, wanted: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a weight in a layout; none if it cannot be stored so."""
    weight = pack.outputs[0].type
    encoding, layout = weight.encoding, LAYOUTS[wanted]
    if layout.why_not(weight.shape[-2], weight.shape[-1], encoding):
        return []
    elements = (tensors[0].mT if pack.attrs["transposed"] else tensors[0]).contiguous()
    stored = LAYOUTS[pack.attrs["layout"]]
    linear = stored.unpack(elements, *tensors[1:], encoding=encoding)
    try:
        for part, t in zip(encoding.parts, linear, strict=True):
            check_part_scales(part, t, part.name)
    except NonFiniteError:  # kernels may read such scales in this layout alone
        return []
    return list(layout.pack(*linear, encoding=encoding))


def _with_parts(
    graph: Graph,
    region: Region,
    nodes: Mapping[Value, Node],
    reordered: Mapping[Op, tuple[str, Sequence[Tensor]]],
) -> Region:
    """The region with some weights as other constants, in other layouts."""
    new = {
        v: (nodes[v], t)
        for pack, (_, parts) in reordered.items()
        for v, t in zip(pack.values, parts, strict=True)
    }
    types = {v: v.type.with_(shape=tuple(t.shape)) for v, (_, t) in new.items()}
    layouts = {pack.outputs[0]: layout for pack, (layout, _) in reordered.items()}

    def rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
        if op in reordered:
            return fd.append(
                op.kind, inputs, {**op.attrs, "layout": reordered[op][0], "transposed": False}
            )
        if wanted := next((layouts[v] for v in op.values if v in layouts), ""):
            return fd.append(op.kind, inputs, {**op.attrs, "w_layout": wanted})
        return None

    inputs = tuple(
        _node_of(graph, region, *new[v]) if v in new else nodes[v] for v in region.fusion.inputs
    )
    return replace(region, fusion=rewrite(region.fusion, rule, types), inputs=inputs)


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
