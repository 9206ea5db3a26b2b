"""The gradients that reach each value, collected until they are added up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce

from .builder import FusionDefinition
from .core import Op, Value
from .sizes import AnySize
from .types import plain


class Gradients:
    """The gradients that each value gets from its readers. Gradients of slices that together make
    up the value become one `cat`.

    leads: the values on which some wanted gradient depends; gradients of other values are dropped.
    """

    def __init__(self, fd: FusionDefinition, leads: Collection[Value]):
        self._fd, self.leads = fd, leads
        self._given: dict[Value, list[Value]] = {}

    def __contains__(self, v: Value) -> bool:
        return v in self._given

    def add(self, v: Value, grad: Value) -> None:
        """One reader's gradient of v."""
        if v in self.leads:
            self._given.setdefault(v, []).append(grad)

    def of(self, v: Value) -> Value:
        """The gradient of v, with rows partitioned like v's."""
        grad = reduce(self._fd.ops.add, self._joined(self._given[v]))
        return (
            grad
            if grad.type.shape == v.type.shape
            else self._fd.ops.reshape(grad, new_shape=v.type.shape)
        )

    def _joined(self, grads: Sequence[Value]) -> list[Value]:
        pads = {grad: op for grad in grads if (op := self._fd.producer(grad, "pad"))}
        whole = _tiled(self._fd, list(pads.values())) if pads else None
        return list(grads) if whole is None else [*(g for g in grads if g not in pads), whole]


def _tiled(fd: FusionDefinition, pads: Sequence[Op]) -> Value | None:
    """The sum of padded values, as one `cat`; None unless they cover the whole along one dimension
    and overlap only if they are equal.
    """
    pieces: dict[_Piece, Value] = {}
    for op in pads:
        (v,), piece = op.values, (op.attrs["before"], tuple(map(plain, op.values[0].type.shape)))
        pieces[piece] = fd.ops.add(pieces[piece], v) if piece in pieces else v
    whole = tuple(map(plain, pads[0].attrs["shape"]))
    for dim in range(len(whole)):
        if run := _in_a_row(pieces, dim, whole):
            return run[0] if len(run) == 1 else fd.ops.cat(*run, dim=dim)
    return None


_Piece = tuple[tuple[AnySize, ...], tuple[AnySize, ...]]  # where a slice starts, its shape


def _in_a_row(
    pieces: Mapping[_Piece, Value], dim: int, whole: tuple[AnySize, ...]
) -> list[Value] | None:
    """The slices in order, if they are all of `whole`, divided along only one dimension."""
    left, ordered = dict(pieces), []
    at: AnySize = 0
    while left:
        start = tuple(at if i == dim else 0 for i in range(len(whole)))
        piece = next((p for p in left if p[0] == start), None)
        if piece is None or any(piece[1][i] != size for i, size in enumerate(whole) if i != dim):
            return None
        ordered.append(left.pop(piece))
        at = at + piece[1][dim]
    return ordered if at == whole[dim] else None
