"""PEFT: its LoRA on encoded weights. What it needs there is put into PEFT when that is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from ... import plugins
from ...messages import log


@plugins.adapt
def adapt(*args: Any) -> Any:
    """Adapters of a model that PEFT has adapted are PEFT's."""
    if "peft" not in sys.modules:
        return None
    from ..peft.install import add

    return add(*args)


class _WhenImported(MetaPathFinder):
    """Finds PEFT as everybody else does, and changes it once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        """None for all other modules."""
        if name != "peft":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                sys.meta_path.remove(self)
                _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    try:
        from ..peft import install

        install()
    except Exception as error:  # which must not keep anybody from importing PEFT
        log.warning("PEFT does not adapt encoded weights: %s", plugins.message(error))


if "peft" in sys.modules:
    _install()
else:
    sys.meta_path.insert(0, _WhenImported())
