"""Parameters of which each rank has a share: DTensors where they train, else what a module says of them (`Sharding`)."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from torch import Tensor


class Sharding(Protocol):
    """How the tensors in a state dict are made of what a module has, and the inverse. Names are the module's own, without a prefix.

    experts: how many all ranks have. adaptable: whether adapters beside a share are shares of adapters beside the whole.
    """

    experts: int
    adaptable: bool

    def whole(self, name: str, t: Tensor) -> Tensor:
        """A rank's share, in linear order -> what stands in the state dict, of the shape of the whole."""

    def share(self, name: str, t: Tensor) -> Tensor:
        """What `whole` made, or a plain tensor of either shape -> a rank's share."""


def is_dtensor(t: Any) -> bool:
    """Whether it is a DTensor. Where there is one, its module was imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor as it is."""
    return t.to_local() if is_dtensor(t) else t  # type: ignore[attr-defined]


def gathered(t: Tensor) -> Tensor:
    """All of a DTensor, which every rank has to ask for; any other tensor as it is."""
    return t.full_tensor() if is_dtensor(t) else t  # type: ignore[attr-defined]
