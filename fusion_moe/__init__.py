"""fusion_moe: NVFP4 mixture-of-experts as custom operations that are traced, lowered to a fusion
IR, compiled, and explained.

Importing this package registers the operations in torch.ops.fusion_moe and changes nothing else.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import compat, errors, nn, ops, options, recipe
from .bodies import autocast as _torch_autocast  # the operations' casts under torch.autocast
from .bodies import autograd as _autograd  # the operations' derivatives
from .bodies import eager as _eager  # the bodies of the operations
from .compile import run
from .definitions.translate import translator
from .errors import Untranslatable
from .ir.builder import FusionDefinition
from .nn import (
    FP8Config,
    INT4Config,
    MXFP4Config,
    NVFP4Config,
    NVFP4Experts,
    prepare_,
    qat_,
    quantize_,
    register_converter,
    update_weights_,
)
from .recipe import autocast
from .runtime.faults import synchronize
from .runtime.precompile import preparing

__version__ = "0.1.0"

__all__ = [
    "FP8Config",
    "FusionDefinition",
    "INT4Config",
    "MXFP4Config",
    "NVFP4Config",
    "NVFP4Experts",
    "Untranslatable",
    "__version__",
    "autocast",
    "compat",
    "diff",
    "disable",
    "enable",
    "errors",
    "explain",
    "last_compiled",
    "nn",
    "offload_",
    "ops",
    "options",
    "prepare_",
    "preparing",
    "qat_",
    "quantize_",
    "recipe",
    "record",
    "register_converter",
    "run",
    "synchronize",
    "testing",
    "translator",
    "update_weights_",
]

# These import Dynamo and Inductor, which takes a while.
_LAZY = {
    "enable": "frontends.inductor",
    "disable": "frontends.inductor",
    "explain": "report",
    "diff": "report",
    "last_compiled": "report",
    "record": "report",
    "offload_": "offload",
}

# the lazy names as type checkers see them; where __getattr__ is not seen, misspelled names are
# errors
if TYPE_CHECKING:
    from . import testing
    from .frontends.inductor import disable, enable
    from .offload import offload_
    from .report import diff, explain, last_compiled, record
else:

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        if name == "testing":
            return importlib.import_module(f"{__name__}.testing")
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    return sorted(__all__)


del _autograd, _eager, _torch_autocast
