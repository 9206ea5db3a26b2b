"""What a rank reads of a directory when its experts are divided between ranks: those that it keeps, and all else.

transformers loads what it finds in a state dict. Here that is one of tensors in files, which are read when it asks for them; it learns
which of them when the model is there, on the meta device, and its experts have been made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ..checkpoints import Directory, Entry
from ..distributed.parallelize import Division
from .names import live_names

_INDEX = re.compile(r"(\d+)\.")


class Stored:
    """A tensor in a file, of which some of the first dimension are read; what transformers asks of safetensors' slices."""

    def __init__(self, entry: Entry, source: Any, kept: range | None):
        """source: safetensors' slice. kept: which are read, all by default."""
        self.dtype, self.source, self.kept = entry.dtype, source, kept

    def __getitem__(self, index: Any) -> Tensor:
        return self.source[self.kept.start : self.kept.stop] if self.kept else self.source[index]

    def get_shape(self) -> list[int]:
        """Of what is read."""
        shape = self.source.get_shape()
        return [len(self.kept), *shape[1:]] if self.kept else shape

    def get_dtype(self) -> str:
        """safetensors' name of it."""
        return str(self.source.get_dtype())

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return self.dtype.is_floating_point


class Share(dict[str, Stored]):
    """The state dict of a rank. experts: E of all ranks, of each module of experts."""

    def __init__(self, directory: Directory, division: Division):
        super().__init__()
        self.directory, self.division, self.experts = directory, division, dict[str, int]()

    def take(self, model: Any) -> None:
        """Makes the experts of a model without weights smaller, and finds what is for them and for all else."""
        names = live_names(model, self.directory.tensors)
        modules = self.division.modules(model)
        kept = {name: self._keep(name, module) for name, module in modules.items()}
        for name, entry in self.directory.tensors.items():
            owner, below = _module_of(names[name], modules)
            expert = _INDEX.match(below)
            if owner is None or expert is None:
                some = kept[owner] if owner is not None and entry.shape[:1] == (self.experts[owner],) else None
                self[name] = Stored(entry, self.directory.slice(name), some)
            elif int(expert[1]) in kept[owner]:
                self[name] = Stored(entry, self.directory.slice(name), None)

    def _keep(self, name: str, module: Any) -> range:
        """The experts of a module that stay."""
        self.experts[name] = self.division.keep(module)
        return range(module.first_expert, module.first_expert + len(module.down_proj))

    def join(self, model: Any) -> None:
        """Makes the loaded experts those of all ranks."""
        for name, experts in self.experts.items():
            self.division.join(model.get_submodule(name), experts)


def _module_of(name: str, modules: Mapping[str, Any]) -> tuple[str | None, str]:
    """The module of experts that a tensor is of, and its name there; None if it is of no such module."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return module, ".".join(parts[end:])
    return None, name


_share: ContextVar[Share | None] = ContextVar("fusion_moe_share", default=None)


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """While transformers loads this share."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def shared() -> Share | None:
    """What is being loaded; None if it is a whole model."""
    return _share.get()
