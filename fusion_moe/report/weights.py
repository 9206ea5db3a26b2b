"""What prepare_ would do with the weights that a program reads."""

from __future__ import annotations

from ..ir.core import Fusion
from ..ir.sizes import value
from ..ir.types import TensorType, plain
from ..layouts import LINEAR, W16X64
from ..schedule.product import products
from ..target import Target


def weight_layouts(fusion: Fusion, to: Target) -> tuple[tuple[str, str], ...]:
    """(layout, what prepare_ does about it) of the NVFP4 weights that are not in the layout of a target, if prepare_ knows theirs."""
    weights = (product.weight.type for product in products(fusion) if product.weight is not None)
    known = (w for w in weights if w.dtype == "nvfp4" and w.layout in (LINEAR.name, W16X64.name) and not set(w.symbols()))
    return tuple(dict.fromkeys((w.layout, _what_is_done(w, to)) for w in known if w.layout != to.weight_layout))


def _what_is_done(w: TensorType, to: Target) -> str:
    done = f"fusion_moe.prepare_(model, {to.name!r}) puts them in {to.weight_layout}, the layout of {to.name}"
    if to.weight_layout != W16X64.name:
        return done
    n, k = (value(plain(d), {}) for d in w.shape[1:])
    why = W16X64.why_not(n, k)
    return f"prepare_ leaves them: {why}" if why else f"{done}, if those of their module are all in whole tiles"
