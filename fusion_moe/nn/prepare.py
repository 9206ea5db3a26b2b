"""prepare_: the weights of a model in the order that a target's kernels read, in place."""

from __future__ import annotations

from torch import nn

from .. import options, target
from ..encodings import check_block_scales
from ..errors import NonFiniteError
from ..layouts import LAYOUTS
from ..progress import progress
from .packed import PackedModule, relayout_


def prepare_(model: nn.Module, to: str = "auto") -> None:
    """Puts the weights of a model in the layout of a target ("auto": of the option `target`, then of the weights' device), in place.

    Needs memory for one expert more. Modules with sizes off its tiles keep the linear layout; state dicts are linear always. Call it once
    the model is where it runs: a module that moves to another kind of device takes the linear layout again.
    NonFiniteError for a block scale that is negative or NaN. A call that is interrupted leaves each module in one layout or the other.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, PackedModule)}
    for name, module in progress(modules.items(), "ordering weights", len(modules)):
        device = next(module.parameters()).device
        wanted = options.current().target if to == "auto" else to
        layout = target.find(wanted, device).weight_layout
        if layout != "linear" and _fits(module, layout):
            _check_scales(module, name)
            relayout_(module, layout)
        else:
            relayout_(module, "linear")


def _fits(module: PackedModule, layout: str) -> bool:
    encoding = module.encoding
    shapes = (getattr(module, names[0]).shape for names in module.packed)
    return not any(LAYOUTS[layout].why_not(n, encoding.elements(packed), encoding) for *_, n, packed in shapes)


def _check_scales(module: PackedModule, name: str) -> None:
    """NonFiniteError unless all block scales are numbers that are not negative. Waits for the device."""
    if module.weight_layout != "linear":
        return  # they were looked at
    for _, *scales in module.packed:
        for scale in scales:
            try:
                check_block_scales(getattr(module, scale).detach(), scale)
            except NonFiniteError as error:
                raise error.at(name) from None
