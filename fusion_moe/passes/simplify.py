"""Drops unread operations, merges equal ones, and puts the rest in the order in which the outputs
need them.

The order depends only on the program: it is the same whether it was written in small operations, as
expert_mlp, or by hand.
"""

from __future__ import annotations

from typing import Any

from ..ir import Fusion, Op, Value
from ..target import Target


def simplify(fusion: Fusion, target: Target | None = None) -> Fusion:
    """The Fusion without dead and repeated operations, in canonical order, for any target."""
    same: dict[Any, Any] = {}  # a value -> the first value equal to it
    seen: dict[Any, tuple[Value, ...]] = {}
    ops: list[Op] = []
    for op in _ordered(fusion):
        inputs = tuple(same.get(v, v) for v in op.inputs)
        # 0.0 == -0.0, True == 1
        key = (
            op.kind.name,
            tuple(v if isinstance(v, Value) else repr(v) for v in inputs),
            repr(op.attrs),
        )
        if key in seen and not any(v.type.ends for v in op.outputs):
            same.update(zip(op.outputs, seen[key], strict=True))
            continue
        seen[key] = op.outputs
        ops.append(op.with_inputs(inputs))
    return Fusion(
        fusion.inputs, tuple(ops), tuple(same.get(v, v) for v in fusion.outputs), fusion.roles
    ).verify()


def _ordered(fusion: Fusion) -> list[Op]:
    """The operations that the outputs need: first those for the first operand, then those for the
    second, then the operation itself.
    """
    done: set[int] = set()
    order: list[Op] = []
    for output in fusion.outputs:
        stack = [(fusion.producer(output), False)]
        while stack:
            op, operands_done = stack.pop()
            if op is None or id(op) in done:
                continue
            if operands_done:
                done.add(id(op))
                order.append(op)
            else:
                stack.append((op, True))
                stack += [(fusion.producer(v), False) for v in reversed(op.values)]
    return order
