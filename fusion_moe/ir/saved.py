"""What a forward pass saves for its backward: a minimum cut between what is stored or must be
computed and what the backward reads.

An edge of the graph is an operation that may be recomputed; a node is a value with the bytes that
saving it costs. Inputs and outputs are stored anyway and cost nothing. Values on the cut are saved;
values behind it are recomputed.
"""

from __future__ import annotations

from collections.abc import Collection

from .core import Fusion, Op, Value
from .sizes import value
from .types import DTYPES, elements

# an element of the result needs one of each input
_ELEMENTWISE = ("pointwise", "view", "shape", "gather", "per_group")
_INDICES = ("invert", "problem_ends")  # arithmetic on 4 bytes a row; `route` sorts
_TYPICAL = 4096  # assumed for sizes that are known only at launch, to compare bytes
_EACH = 64  # bytes that each tensor adds to the cost: one value is better than its two halves
_SOURCE, _SINK = "source", "sink"
_NEVER = 1 << 60  # bytes: more than any cut


def saved(forward: Fusion, needed: Collection[Value]) -> tuple[Value, ...]:
    """The inputs and values of the forward, in order, from which elementwise operations make
    everything that is needed. So products, sums and sorts are never recomputed.

    They take the fewest bytes; among equal choices, they are nearest to what is needed.
    """
    import networkx  # torch's own, and slow to import

    flow = networkx.DiGraph()
    flow.add_nodes_from((_SOURCE, _SINK))

    def edge(a: object, b: object, capacity: int = _NEVER) -> None:
        flow.add_edge(a, b, capacity=capacity)

    for v in forward.inputs:
        edge(_SOURCE, (v, "in"))
        edge((v, "in"), (v, "out"), 0)
    for op in forward.ops:
        again = op.kind.role in _ELEMENTWISE or op.kind.name in _INDICES
        # whose parts are stored
        once = not again and (all(map(_storable, op.outputs)) or op.kind.role == "quantize")
        for v in op.outputs:
            edge((v, "in"), (v, "out"), _cost(forward, op, v))
            for source in [_SOURCE] if once else [(operand, "out") for operand in op.values]:
                edge(source, (v, "in"))
    for v in needed:
        edge((v, "out"), _SINK)
    # the nodes that still reach the sink: of all minimum cuts, the nearest one
    _, (_, behind) = networkx.minimum_cut(flow, _SOURCE, _SINK)
    return tuple(v for v in forward.values if (v, "out") in behind and (v, "in") not in behind)


def _cost(forward: Fusion, op: Op, v: Value) -> int:
    """The bytes that saving a value takes. A value that shares another value's memory is never
    saved: the other one is.
    """
    if op.kind.view or op.kind.name == "reshape" or not _storable(v):
        return _NEVER
    if v in forward.outputs:
        return 0
    count = value(elements(v.type.shape), dict.fromkeys(v.type.symbols(), _TYPICAL))
    return count * DTYPES[v.type.dtype].itemsize + _EACH


def _storable(v: Value) -> bool:
    """Whether a value is held by a single plain tensor."""
    return not v.type.quantized and v.type.layout == "linear"
