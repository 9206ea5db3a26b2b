"""What a rank reads of a directory when experts are divided between ranks: the experts that it
keeps, and everything else.

transformers loads what it finds in a state dict. Here this is a dictionary of tensors in files,
which are read when it asks for them. Which tensors it contains is decided when the model is on the
meta device and its experts have been made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...checkpoints import Directory, Unread
from ...errors import UnsupportedError
from .names import live_names
from .sources import Source

if TYPE_CHECKING:  # not at run time: torch may have been built without torch.distributed
    from ..distributed.parallelize import Division

_INDEX = re.compile(r"(\d+)\.")


class Share(dict[str, Any]):
    """The state dict of a rank. experts: for each module of experts, E over all ranks."""

    def __init__(self, directory: Directory, division: Division):
        super().__init__()
        self.directory, self.division, self.experts = directory, division, dict[str, int]()

    def take(self, model: Any, sources: Mapping[str, Source]) -> None:
        """Makes the experts of a model without weights smaller, and finds the tensors for
        everything that is not encoded.

        sources: where modules of encoded experts are stored. UnsupportedError for dividing the
        features of experts that are not encoded.
        """
        names = live_names(model, self.directory.tensors)
        modules: dict[str, Any] = self.division.modules(model)
        for name in modules:
            if self.division.plan != "ep" and (name not in sources or sources[name].rounds):
                raise UnsupportedError(
                    "features of floats",
                    expected="encoded experts in the files, or plan = 'ep'",
                    todo="load the whole model, then parallelize_(model, mesh, plan=...)",
                    where=name,
                )
        for name, module in modules.items():
            self.experts[name] = self.division.keep(module)
        for name, entry in self.directory.tensors.items():
            owner, below = _module_of(names[name], modules)
            if owner is None:
                self[name] = self.directory.slice(name)
            elif owner not in sources:
                module = modules[owner]
                first = module.first_expert or 0
                kept, expert = range(first, first + len(module.down_proj)), _INDEX.match(below)
                rows = slice(first, kept.stop)
                if expert is None and entry.shape[:1] == (self.experts[owner],):
                    part = replace(entry, shape=(len(kept), *entry.shape[1:]))
                    self[name] = Unread(part, partial(self.directory.slice(name).__getitem__, rows))
                elif expert is None or int(expert[1]) in kept:
                    self[name] = self.directory.slice(name)

    def join(self, model: Any) -> None:
        """Makes the loaded modules compute the sums over all ranks."""
        for name, experts in self.experts.items():
            self.division.join(model.get_submodule(name), experts)


def _module_of(name: str, modules: Mapping[str, Any]) -> tuple[str | None, str]:
    """The module of experts that a tensor belongs to, and the tensor's name there; None if there is
    no such module.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return module, ".".join(parts[end:])
    return None, name
