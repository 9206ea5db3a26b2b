"""prepare_: the weights of a model in the order that a target's kernels read, in place."""

from __future__ import annotations

import torch
from torch import nn

from .. import options, target
from ..errors import NonFiniteError
from ..formats import NVFP4
from ..layouts import W16X64
from ..progress import progress
from .packed import PackedModule, relayout_


def prepare_(model: nn.Module, to: str = "auto") -> None:
    """Puts the NVFP4 weights of a model in the layout of a target ("auto": of the option `target`, then of the weights' device), in place.

    Needs memory for one expert more. Modules with sizes off its tiles keep the linear layout; state dicts are linear always. Call it once
    the model is where it runs: a module that moves to another kind of device takes the linear layout again.
    NonFiniteError for a block scale that is negative or NaN. A call that is interrupted leaves each module in one layout or the other.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PackedModule)}
    for name, module in progress(modules.items(), "ordering weights", len(modules)):
        device = next(module.parameters()).device
        wanted = options.current().target if to == "auto" else to
        layout = target.find(wanted, device).weight_layout
        if layout == W16X64.name and _fits(module):
            _check_scales(module, name)
            relayout_(module, layout)
        else:
            relayout_(module, "linear")


def _fits(module: PackedModule) -> bool:
    shapes = (getattr(module, codes).shape for codes, _ in module.packed)
    return not any(W16X64.why_not(n, NVFP4.elements(packed)) for *_, n, packed in shapes)


def _check_scales(module: PackedModule, name: str) -> None:
    """NonFiniteError unless all block scales are numbers that are not negative. Waits for the device."""
    if module.weight_layout != "linear":
        return  # they were looked at
    for _, scales in module.packed:
        bad = getattr(module, scales).view(torch.uint8) >= 0x7F
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            raise NonFiniteError(
                f"{scales}{list(at)} is negative or NaN", expected="block scales from 0 to 448",
                todo="the checkpoint is damaged, or its scales are stored in another format", where=name,
            )  # fmt: skip
