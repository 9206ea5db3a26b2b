"""Parameters of which each rank has a share: DTensors if they train, otherwise described by their
module (`Sharding`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..encodings import is_dtensor


class Sharding(Protocol):
    """Converts between a module's own tensors and those in its state dict, both ways. Names are the
    module's own, without a prefix.

    experts: how many experts all ranks have. adaptable: whether adapters beside a share are shares
    of adapters beside the whole.
    """

    experts: int
    adaptable: bool

    def has(self, name: str) -> bool:
        """Whether a tensor is on this rank: one that is added to sums over ranks is on the first,
        and the others have zeros.
        """

    def whole(self, name: str, t: Tensor) -> Tensor:
        """A rank's share, in linear order -> the tensor in the state dict, of the shape of the
        whole.
        """

    def share(self, name: str, t: Tensor) -> Tensor:
        """A tensor that `whole` made, or a plain tensor of either shape -> a rank's share."""


def local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def gathered(t: Tensor) -> Tensor:
    """A whole DTensor, for which every rank must call this; any other tensor unchanged."""
    return t.full_tensor() if is_dtensor(t) else t  # type: ignore[attr-defined]
