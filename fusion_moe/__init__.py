"""fusion_moe: NVFP4 mixture-of-experts as custom operations that are traced, lowered to a fusion
IR, compiled, and explained.

Importing this package registers the operations in torch.ops.fusion_moe and changes nothing else.
Only the command `fusion-moe` does so later: it checks its arguments before it imports torch.
"""

# ruff: noqa: F405

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
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
    "record_routing",
    "register_converter",
    "replay_routing",
    "run",
    "synchronize",
    "testing",
    "translator",
    "update_weights_",
    "verify",
]

# These import Dynamo and Inductor, which takes a while.
_LAZY = {
    "enable": "frontends.inductor",
    "disable": "frontends.inductor",
    "explain": "report",
    "diff": "report",
    "last_compiled": "report",
    "record": "recorder",
    "record_routing": "routing",
    "replay_routing": "routing",
    "offload_": "offload",
    "verify": "offload.verification",
}

_MODULES = "compat", "errors", "nn", "ops", "options", "recipe", "testing"

# the lazy names as type checkers see them; where __getattr__ is not seen, misspelled names are
# errors
if TYPE_CHECKING:
    from . import testing
    from .frontends.inductor import disable, enable
    from .integrations import compat
    from .offload import offload_
    from .offload.verification import verify
    from .recorder import record
    from .report import diff, explain, last_compiled
    from .routing import record_routing, replay_routing
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


# by short names, without this package's: long ones
_LONG = {p.stem: f"integrations.{p.stem}" for p in Path(__file__).parent.glob("integrations/*")}
_LONG |= {"nn.lora": "lora", "nn.trained": "training"}


class _ShortNames:
    """Finds `fusion_moe.NAME` in integrations/, and its modules, and those of lora/ by names that
    they had before: the same modules as by their long names, imported when somebody asks.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """None for all other modules."""
        package, _, rest = name.partition(".")
        if package != __name__:  # of nearly all imports
            return None
        short = next((s for s in _LONG if f"{rest}.".startswith(f"{s}.")), None)
        if short is None:
            return None
        long = find_spec(f"{__name__}.{_LONG[short]}{rest.removeprefix(short)}")
        return long and ModuleSpec(name, self, loader_state=long.name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, imported by its long name."""
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already; importlib has given it the short name's spec."""
        module.__spec__ = module.__spec__.loader_state  # type: ignore[union-attr]


sys.meta_path.insert(0, _ShortNames())


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
