"""Sums over dimensions of a value, as rows m and columns j of the result, where each element is a
sum over r.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir import AnySize, Op, elements
from .indices import Index, Variable, unflat

_J, _M, _R = map(Variable, "jmr")


@dataclass(frozen=True)
class Reduction:
    """at: the indices of the operand's element at (m, j, r), which run to `rows`, `columns` and
    `over`.

    along_memory: whether the last dimensions are summed; then there is one column.
    """

    at: tuple[Index, ...]
    rows: AnySize
    columns: AnySize
    over: AnySize
    along_memory: bool


def reduction(op: Op) -> Reduction:
    """The Reduction of a `sum`, or of a `logsumexp`, which is over the last dimension: the last
    dimension that is kept becomes columns, unless it comes before those that are summed.
    """
    shape = op.values[0].type.shape
    over = sorted(op.attrs.get("dims", [len(shape) - 1]))
    kept = [i for i in range(len(shape)) if i not in over]
    columns = kept[-1:] if len(shape) - 1 not in over else []
    rows = kept[: len(kept) - len(columns)]
    place: dict[int, Index] = {}
    for index, dims in ((_M, rows), (_J, columns), (_R, over)):
        place |= dict(zip(dims, unflat(index, [shape[i] for i in dims]), strict=True))
    counts = [elements([shape[i] for i in dims]) for dims in (rows, columns, over)]
    return Reduction(
        tuple(place[i] for i in range(len(shape))), counts[0], counts[1], counts[2], not columns
    )
