"""NVFP4 weights of a module in the order of a layout: in memory a target's, in every state dict the linear one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..layouts import W16X64
from .frozen import FrozenModule

_Order = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PackedModule(FrozenModule):
    """A module with NVFP4 weights. packed: the names of codes and block scales of each; weight_layout: the layout that they are in."""

    packed: tuple[tuple[str, str], ...] = ()
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
        self._reorder(destination, prefix, W16X64.unpack)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        given = dict(state_dict)
        self._reorder(given, prefix, W16X64.pack)
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
    there, back = (W16X64.pack, W16X64.unpack) if layout != "linear" else (W16X64.unpack, W16X64.pack)
    weights = [[getattr(module, name).detach() for name in names] for names in module.packed]
    matrices = [(codes[e], scales[e]) for codes, scales in weights for e in range(len(codes))]
    done = 0
    try:
        for codes, scales in matrices:
            _move(codes, scales, there)
            done += 1
    except BaseException:
        for codes, scales in matrices[:done]:
            _move(codes, scales, back)
        raise
    module.weight_layout = layout


def _move(codes: Tensor, scales: Tensor, order: _Order) -> None:
    moved_codes, moved_scales = order(codes, scales)
    codes.copy_(moved_codes)
    scales.view(torch.uint8).copy_(moved_scales.view(torch.uint8))
