"""Encoded weights of a module in a layout: in memory a target's, in every state dict the linear one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..encodings import NVFP4, Encoding
from ..layouts import LAYOUTS, Layout
from .frozen import FrozenModule

_Order = Callable[..., tuple[Tensor, ...]]


class PackedModule(FrozenModule):
    """A module with encoded weights. packed: the names of elements and block scales of each; weight_layout: the layout that they are in."""

    packed: tuple[tuple[str, ...], ...] = ()
    encoding: Encoding = NVFP4
    weight_layout: str = "linear"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        if self.weight_layout != "linear":
            here = getattr(self, self.packed[0][0]).device
            if fn(torch.empty(0, dtype=torch.uint8, device=here)).device.type != here.type:
                relayout_(self, "linear")
        super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._reorder(destination, prefix, partial(LAYOUTS[self.weight_layout].unpack, encoding=self.encoding))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        given = dict(state_dict)
        self._reorder(given, prefix, partial(LAYOUTS[self.weight_layout].pack, encoding=self.encoding))
        super()._load_from_state_dict(given, prefix, *args)

    def _reorder(self, tensors: dict[str, Any], prefix: str, order: _Order) -> None:
        """Puts the weights of a state dict that are there in another order, in tensors of their own."""
        for names in self.packed if self.weight_layout != "linear" else ():
            keys = [prefix + name for name in names]
            if all(key in tensors for key in keys):
                tensors.update(zip(keys, order(*(tensors[key].detach() for key in keys)), strict=True))


def relayout_(module: PackedModule, layout: str) -> None:
    """Puts the weights of a module in a layout, in place, a matrix at a time. What an exception interrupts is undone."""
    if layout == module.weight_layout:
        return
    here, there = LAYOUTS[module.weight_layout], LAYOUTS[layout]
    weights = [[getattr(module, name).detach() for name in names] for names in module.packed]
    matrices = [matrix for parts in weights for matrix in _matrices(parts)]
    done = 0
    try:
        for parts in matrices:
            _move(parts, module.encoding, here, there)
            done += 1
    except BaseException:
        for parts in matrices[:done]:
            _move(parts, module.encoding, there, here)
        raise
    module.weight_layout = layout


def _matrices(parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The parts [E, N, ...] of a weight by matrix; [N, ...] is one."""
    return [parts] if parts[0].dim() == 2 else [[part[e] for part in parts] for e in range(len(parts[0]))]


def _move(parts: Sequence[Tensor], encoding: Encoding, here: Layout, there: Layout) -> None:
    made = there.pack(*here.unpack(*parts, encoding=encoding), encoding=encoding)
    for part, moved in zip(parts, made, strict=True):
        part.view(torch.uint8).copy_(moved.view(torch.uint8))
