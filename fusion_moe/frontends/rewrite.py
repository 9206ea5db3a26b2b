"""Rewrites a graph: replaces its regions by calls of `fusion_moe::run`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch.fx import Graph, Node

from ..compile import program_of
from ..definitions.nodes import SizeSource
from ..definitions.walk import mT_dims
from ..ir import one_line
from ..options import Options
from .regions import Region


def replace_regions(graph: Graph, regions: Sequence[Region], with_: Options) -> list[Node]:
    """Replaces each region by one call of fusion_moe::run, in place. -> these calls, in the order
    of the regions.
    """
    now: dict[Node, Node] = {}  # an output of a region -> its replacement
    calls = [_replace(graph, region, with_, now) for region in regions]
    if calls:
        stable_topological_sort(graph)
        graph.lint()
    return calls


def _replace(graph: Graph, region: Region, with_: Options, now: dict[Node, Node]) -> Node:
    """One call of fusion_moe::run, and getitems of its results, in place of a region's nodes."""
    last = region.nodes[-1]
    with graph.inserting_before(last.next):
        sizes = [_size_node(graph, region.sizes[s], now) for s in region.fusion.symbols]
        inputs = [now.get(n, n) for n in region.inputs]
        for i, (n, x) in enumerate(zip(region.inputs, inputs, strict=True)):
            if n in region.transposed:  # then the program reads the contiguous tensor
                inputs[i] = _called(n, torch.ops.aten.permute.default, x, mT_dims(x.meta["val"]))
        program = one_line(region.fusion)
        call = graph.call_function(
            _operation(program, region, with_), (program, inputs, sizes, with_.key())
        )
        # contiguous, as the program writes them
        outputs = [n.meta["val"].new_empty(n.meta["val"].shape) for n in region.outputs]
        call.meta.update(val=outputs, stack_trace=last.meta.get("stack_trace"))
        for i, n in enumerate(region.outputs):
            part = graph.call_function(operator.getitem, (call, i))
            part.meta.update({**n.meta, "val": outputs[i]})
            now[n] = _in_order_of(n, part)
            n.replace_all_uses_with(now[n])
    for n in reversed(region.nodes):
        graph.erase_node(n)
    return call


def _in_order_of(n: Node, node: Node) -> Node:
    """A program's result with its dimensions in memory ordered as in `n`, since views after it rely
    on that order.
    """
    order, _ = compute_elementwise_output_logical_to_physical_perm(n.meta["val"])
    if order == sorted(order):
        return node
    back = [order.index(d) for d in range(len(order))]
    node = _called(n, torch.ops.aten.permute.default, node, order)
    node = _called(n, torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
    return _called(n, torch.ops.aten.permute.default, node, back)


def _called(n: Node, op: OpOverload, x: Node, *args: Any, **kwargs: Any) -> Node:
    """A call on the way to the value of `n`."""
    call = n.graph.call_function(op, (x, *args), kwargs)
    call.meta.update({**n.meta, "val": op(x.meta["val"], *args, **kwargs)})
    return call


def _operation(program: str, region: Region, with_: Options) -> OpOverload:
    """The operation that runs a program; CUDA graphs leave out the one that may wait for the
    device.
    """
    devices = [n.meta["val"].device for n in region.inputs]
    safe = (
        bool(devices)
        and devices[0].type == "cuda"
        and program_of(program, devices[0], with_).graph_safe
    )
    return torch.ops.fusion_moe.run_graph_safe.default if safe else torch.ops.fusion_moe.run.default


def _size_node(graph: Graph, source: SizeSource, now: Mapping[Node, Node]) -> Node:
    """A node whose value is the size found at a source."""
    node = now.get(source.node, source.node)
    if source.dim is None:
        return node
    size = graph.call_function(torch.ops.aten.sym_size.int, (node, source.dim))
    size.meta["val"] = node.meta["val"].shape[source.dim]
    return size
