"""fusion_moe: NVFP4 mixture-of-experts as custom operations that are traced, lowered to a fusion
IR, compiled, and explained.

Importing this package registers the operations in torch.ops.fusion_moe and changes nothing else.
Only the command `fusion-moe` does so later: it checks its arguments before it imports torch.
"""

# ruff: noqa: F405

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

_MODULES = "compat", "errors", "nn", "ops", "options", "recipe", "testing"

# the lazy names as type checkers see them; where __getattr__ is not seen, misspelled names are
# errors
if TYPE_CHECKING:
    from . import testing
    from .frontends.inductor import disable, enable
    from .offload import offload_
    from .report import diff, explain, last_compiled, record
else:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name in __all__:
            return getattr(importlib.import_module(f"{__name__}.{_LAZY.get(name, 'api')}"), name)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    return sorted(__all__)


def _is_command() -> bool:
    """Whether this process is the command, or a module of this package by `python -m`. (One that it
    starts may have its sys.argv, but has another command line.)
    """
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":
        return any(argument.startswith(f"{__name__}.") for argument in sys.orig_argv)
    return Path(started).stem == "fusion-moe" and started in sys.orig_argv


if not _is_command():
    from .api import *  # noqa: F403
