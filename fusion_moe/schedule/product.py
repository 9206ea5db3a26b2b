"""The three products of training in one form. M rows in G groups; matrices [G, N, K], with K
features in and N features out.

    kind     operation        a          b          result     contracted
    fprop    grouped_mm       [M/g, K]   [G, N, K]  [M/g, N]   K
    dgrad    grouped_mm_t     [M/g, N]   [G, N, K]  [M/g, K]   N
    wgrad    grouped_outer    [M/g, N]   [M/g, K]   [G, N, K]  M

M is the ragged axis: `ends` say how many rows each group has. In fprop and dgrad it is an axis of
the result, where each tile is within one group; in wgrad it is contracted, and each group's matrix
is a sum over its rows, zero if it has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from ..ir import Dim, Fusion, Op, Value, dependent, plain

Axis = Literal["M", "N", "K"]
_KINDS: dict[str, tuple[str, str, str, str]] = {  # operation -> kind; axes of a, b and the result
    "grouped_mm": ("fprop", "MK", "GNK", "MN"),
    "grouped_mm_t": ("dgrad", "MN", "GNK", "MK"),
    "grouped_outer": ("wgrad", "MN", "MK", "GNK"),
}


@dataclass(frozen=True)
class GroupedProduct:
    """One product over groups. axes: those of a, b and the result, in order; ragged: the operands
    with rows partitioned by `ends`.
    """

    kind: str
    op: Op
    a: Value
    b: Value
    ends: Value
    result: Value
    axes: tuple[str, str, str]

    @classmethod
    def of(cls, op: Op) -> GroupedProduct:
        """The product of an operation whose role is "grouped"."""
        kind, *axes = _KINDS[op.kind.name]
        a, b, ends = op.values
        return cls(kind, op, a, b, ends, op.outputs[0], (axes[0], axes[1], axes[2]))

    @property
    def contracted(self) -> Axis:
        """The axis that is summed over: one of both operands but not of the result."""
        (axis,) = set(self.axes[0]) & set(self.axes[1]) - set(self.axes[2])
        return axis  # type: ignore[return-value]

    @property
    def ragged(self) -> tuple[Value, ...]:
        """The operands with partitioned rows: `a`, and in wgrad `b` too."""
        return tuple(v for v, axes in zip((self.a, self.b), self.axes, strict=False) if "M" in axes)

    @property
    def weight(self) -> Value | None:
        """The operand with a matrix for each group; None for wgrad, which computes it."""
        return None if self.b in self.ragged else self.b

    def size(self, axis: str) -> Dim:
        """The length of an axis over all groups: M, N, K or G."""
        shapes = zip(
            self.axes, (self.a.type.shape, self.b.type.shape, self.result.type.shape), strict=True
        )
        return next(plain(shape[axes.index(axis)]) for axes, shape in shapes if axis in axes)


def products(fusion: Fusion) -> tuple[GroupedProduct, ...]:
    """The products of a Fusion, in order."""
    return tuple(GroupedProduct.of(op) for op in fusion.ops if op.kind.role == "grouped")


def main_and_added(fusion: Fusion) -> tuple[GroupedProduct, tuple[GroupedProduct, ...]]:
    """The product that a kernel is built around (with a quantized weight if any, then the most
    contracted features), and the others.
    """
    result = products(fusion)
    main = max(
        result,
        key=lambda p: (
            p.b.type.quantized,
            size if isinstance(size := p.size(p.contracted), int) else inf,
        ),
    )
    return main, tuple(p for p in result if p is not main)


def some_may_be_added(fusion: Fusion, features: Mapping[str, int]) -> bool:
    """Whether one of the products could be made beside another: for the same rows and columns, with
    a float weight, and contracting at most as many features as `features` says for the other's
    kind.
    """
    result = products(fusion)
    few = [
        (p, size)
        for p in result
        if not p.b.type.quantized and isinstance(size := p.size(p.contracted), int)
    ]
    return any(
        p is not q and p.result.type == q.result.type and size <= features.get(q.kind, 0)
        for p, size in few
        for q in result
    )


def cat_before(fusion: Fusion, v: Value) -> Op | None:
    """The `cat` that makes the columns of a value, with only casts and views of rows in between."""
    op = fusion.producer(v, "cat", "cast", "reshape", "partition")
    if op is None or op.kind.name != "cat":
        return None if op is None else cat_before(fusion, op.values[0])
    return op if op.attrs["dim"] > 0 else None


def quantized_result(fusion: Fusion) -> Op | None:
    """The `unpack` of rows that are quantized after a product, if nothing else reads these."""
    result = dependent(fusion.ops, [p.result for p in products(fusion)])
    for op in fusion.ops:
        if op.kind.name == "quantize" and op.values[0] in result:
            return fusion.only_reader(op.outputs[0], "unpack")
    return None
