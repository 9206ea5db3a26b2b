"""The gradient of a combine over rows that a product made, computed from that product's own
gradient.

    out = combine(y, slot_of, w), y = h W^T + b        rows of out's gradient: d [M, N], row i that
                                                       of the token of row i

    u = d W                       what h and w both need
    dw of row i = <d, y> = <u, h> + <d, b>             so that y is neither saved nor computed again
    dh = w u,  dW = d^T (w h),  db = sum of w d        so that the products read rows of out's
                                                       gradient as they are

If y is a sum of products, each of them with its own h has a part of u, and dw is the sum over all
h. An adapter's product B l, l = s A h, is one with h too: its part of u is (s d B) A, so that u is
the sum of two products of the same rows and columns, which one kernel can compute. The results are
the same up to the order of sums and roundings; the option `router_gradient` turns this off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import reduce

from .builder import FusionDefinition
from .core import Op, Value
from .kinds.grouped import bias_rows, product_grad
from .kinds.rows import ones, slot_values, token_rows, weighted, wide_like
from .types import FLOATS, plain

Given = Iterator[tuple[Value, Value]]  # values, and the gradient of each


@dataclass(frozen=True)
class _Linear:
    """How rows were made: a sum of products, plus biases of groups."""

    products: tuple[Op, ...]
    biases: tuple[Op, ...] = ()

    def __add__(self, other: _Linear) -> _Linear:
        return _Linear(self.products + other.products, self.biases + other.biases)


def of_combine(
    fd: FusionDefinition, combine: Op, dout: Value, leads: Collection[Value]
) -> Given | None:
    """The gradients that the operands of the products, the biases and w get from a combine.

    None if its rows do not come from products and a routing, or if all weights are 1. If no wanted
    gradient depends on some product's rows, w gets the gradient along y. leads: the values on which
    wanted gradients depend.
    """
    y, slot_of, w = combine.values
    linear = None if ones(fd, w) else _linear(fd, y)
    rows = None if linear is None else token_rows(fd, dout, slot_of, y)
    if (
        linear is None
        or rows is None
        or any(rows.type.shape[0] != op.outputs[0].type.shape[0] for op in linear.products)
    ):
        return None
    return _given(fd, combine, linear, rows, leads)


def _given(
    fd: FusionDefinition, combine: Op, linear: _Linear, d: Value, leads: Collection[Value]
) -> Given:
    ops, (y, slot_of, w) = fd.ops, combine.values
    us, wide = dict[Value, Value](), dict[Value, Value]()
    for op in linear.products:
        h, weight, _ = op.values
        wide[h] = wide[h] if h in wide else wide_like(fd, h, d)
        u, dweight = product_grad(
            fd, op, d, ops.cast(weighted(fd, wide[h], w, slot_of), dtype=h.type.dtype)
        )
        if dweight is not None:
            yield weight, dweight
        if (adapter := _adapter(fd, op, linear)) is not None:
            first, scale = adapter
            scaled, dtype = ops.mul(u, scale), h.type.dtype
            d_first, weighted_d = (
                ops.cast(v, dtype=dtype) for v in (scaled, weighted(fd, scaled, w, slot_of))
            )
            h, weight, _ = first.values
            u, dweight = product_grad(fd, first, d_first, h, weighted_d)
            assert dweight is not None  # w is float
            yield weight, dweight
        us[h] = ops.add(us[h], u) if h in us else u
    for h, u in us.items():
        yield h, ops.cast(weighted(fd, u, w, slot_of), dtype=h.type.dtype)
    along = [(u, wide[h]) for h, u in us.items()]
    for op in linear.biases:
        yield (
            op.values[1],
            ops.cast(
                ops.group_sum(weighted(fd, d, w, slot_of), op.values[2]),
                dtype=op.values[1].type.dtype,
            ),
        )
        along.append((d, bias_rows(fd, op.values[1], op.values[2], d.type)))
    if not all(h in leads for h in us):
        along = [(d, wide_like(fd, y, d))]
    dw = reduce(ops.add, (ops.sum(ops.mul(a, b), dims=(1,), keepdim=False) for a, b in along))
    yield w, ops.cast(slot_values(fd, dw, slot_of), dtype=w.type.dtype)


def _adapter(fd: FusionDefinition, op: Op, linear: _Linear) -> tuple[Op, float] | None:
    """The product with an adapter's A, and the scale, if `op` is that with its B and A's rows are
    those of another product in the sum.
    """
    scale, producer = 1.0, fd.producer(op.values[0])
    while producer is not None and producer.kind.name in ("cast", "mul"):
        factor = producer.inputs[1] if producer.kind.name == "mul" else 1.0
        if not isinstance(factor, float):
            return None
        scale, producer = scale * factor, fd.producer(producer.values[0])
    if (
        producer is None
        or producer.kind.name not in ("grouped_mm", "grouped_mm_t")
        or producer.values[2] is not op.values[2]
    ):
        return None
    beside = (other.values[0] for other in linear.products if other is not op)
    return (
        (producer, scale)
        if producer.values[0] in beside and not producer.values[1].type.quantized
        else None
    )


def _linear(fd: FusionDefinition, y: Value) -> _Linear | None:
    """The products and biases that make up rows, which may be rounded or repartitioned on the way;
    None if anything else is involved.
    """
    op = fd.producer(y)
    if op is None:
        return None
    name, source = op.kind.name, op.values[0]
    if name in ("grouped_mm", "grouped_mm_t"):
        return None if source.type.quantized else _Linear((op,))
    if name == "add" and len(op.values) == 2:
        first, second = (_linear(fd, v) for v in op.values)
        return first + second if first and second else None
    if name == "group_add":
        inner = _linear(fd, source)
        return inner and _Linear(inner.products, (*inner.biases, op))
    if (name == "cast" and source.type.dtype in FLOATS) or (
        name in ("reshape", "partition")
        and list(map(plain, source.type.shape)) == list(map(plain, y.type.shape))
    ):
        return _linear(fd, source)
    return None
