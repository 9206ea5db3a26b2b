"""Adapters of experts that PEFT takes for its own: beside them it freezes, saves and switches off
what it would otherwise not know.
"""

from __future__ import annotations

import logging
from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer

from ..nn import Adapter

if tuple(map(int, peft.__version__.split(".")[:2])) < (0, 21):
    found = (
        f"PEFT {peft.__version__} freezes and does not save the adapters of experts in a "
        "model that it adapts too: use 0.21 or newer"
    )
    logging.getLogger("fusion_moe").warning(found)


class PeftAdapter(Adapter, BaseTunerLayer):
    """An adapter in a model that PEFT may adapt too. It has no named adapters, so PEFT's functions
    that select one leave it as it is.
    """

    weight = bias = None  # type: ignore[assignment]  # of the layer that PEFT's own adapters wrap

    @property
    def disabled(self) -> bool:
        """Whether PEFT's `disable_adapter` is in force."""
        return bool(self._disable_adapters)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `merge_lora_` merges it. Until then it is added in each call."""

    def unmerge(self) -> None:
        """Does nothing, as `merge`."""
