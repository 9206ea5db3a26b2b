"""Layout segments: quantize and swizzle in one pass over the activations, which may be gathered,
scaled and summed in it.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir import Fusion, Op, Value, dependent
from ..target import Target
from . import pointwise, rows

NAME = "layout"
CONTRACTS_ROUNDING = True
ROLES = (*rows.ROLES, "quantize", "layout")
_AFTER = (*pointwise.ROLES, "quantize", "layout")
describe = rows.describe


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if rows are quantized, swizzled, or both, with at most one sum. Rows of a quantized
    value are gathered by its readers.
    """
    summed = {
        op: dependent(fusion.ops, op.outputs)
        for op in fusion.ops
        if op.kind.role in rows.SUMS and not _is_chosen_inside(fusion, op, target)
    }
    whole = {
        op
        for op, after in summed.items()
        if any(o.kind.role == "quantize" and not after.isdisjoint(o.values) for o in fusion.ops)
    }
    other = next((op for op in fusion.ops if op.kind.role not in ROLES or op in whole), None)
    if other is not None:
        return f"{other.kind.name} is not a change of format or layout"
    after = dependent(
        fusion.ops, [v for op in fusion.ops if op.kind.role == "quantize" for v in op.outputs]
    )
    late = next(
        (op for op in fusion.ops if op.kind.role not in _AFTER and not after.isdisjoint(op.values)),
        None,
    )
    return f"{late.kind.name} reads rows of what is quantized" if late else rows.of_one_sum(fusion)


def _is_chosen_inside(fusion: Fusion, op: Op, target: Target) -> bool:
    """Whether an operation is the scale of matrices that only their own `quantize` reads, whose
    kernel chooses it.
    """
    return (
        op.kind.name == "decode_scale"
        and op.attrs["encoding"] in target.matrix_scales
        and all(
            r.kind.name == "quantize" and r.values[0] is op.values[0]
            for r in fusion.readers.get(op.outputs[0], ())
        )
    )
