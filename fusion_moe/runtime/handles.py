"""Inputs of a program that stand for memory whose addresses nobody else gets: a handle, in whose
place kernels get a table. Whose operations take one says what its handles are (OpKind.handle);
native.cpp has a register of them (native.share).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..ir import Fusion


class Handle(Protocol):
    """An operation's use of an input."""

    @property
    def input(self) -> int:
        """Which one it is."""

    @property
    def owner(self) -> int:
        """Whose handles it takes, as a number for C++."""

    def table(self, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """What kernels get in place of the input. Raises for what is no handle of this owner."""

    def check(self, table: Tensor) -> None:
        """Raises the error of a call that kernels ended early, if this operation has one."""


def handles_of(fusion: Fusion) -> tuple[Handle, ...]:
    """Those that a program takes."""
    return tuple(op.kind.handle(op, fusion) for op in fusion.ops if op.kind.handle)


def tables(
    tensors: Sequence[Tensor], handles: Sequence[Handle], sizes: Mapping[str, int]
) -> list[Tensor]:
    """The inputs of a call, with tables in place of handles."""
    taken = list(tensors)
    for handle in handles:
        taken[handle.input] = handle.table(tensors[handle.input], sizes)
    return taken


def numbers(handles: Sequence[Handle]) -> list[int]:
    """The inputs that are handles, for C++: input, owner, input, owner, ..."""
    return [n for handle in handles for n in (handle.input, handle.owner)]
