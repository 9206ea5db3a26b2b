"""PEFT: adapters of experts that it takes for its own."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from torch import nn

from .. import plugins


@plugins.adapted
def adapted(model: nn.Module) -> bool:
    """Whether PEFT has adapted a model, which leaves `peft_config`."""
    return any(hasattr(module, "peft_config") for module in model.modules())


@plugins.adapter_class
def adapter_class() -> type | None:
    """The class that PEFT knows, where a program may use PEFT."""
    if not sys.modules.keys() & {"peft", "transformers"} or find_spec("peft") is None:
        return None
    from ..peft import PeftAdapter

    return PeftAdapter
