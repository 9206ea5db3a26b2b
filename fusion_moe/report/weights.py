"""What `prepare_` would do with the weights that a program reads."""

from __future__ import annotations

from ..ir.core import Fusion
from ..ir.sizes import value
from ..ir.types import TensorType, plain
from ..layouts import LAYOUTS, LINEAR
from ..layouts.groups import ceil_to
from ..schedule.product import products
from ..target import TARGETS, Target


def weight_layouts(fusion: Fusion, to: Target) -> tuple[tuple[str, str], ...]:
    """(layout, what `prepare_` does about it) for encoded weights that are not in a target's layout
    but in one that `prepare_` knows.
    """
    weights = (product.weight.type for product in products(fusion) if product.weight is not None)
    known = (w for w in weights if w.quantized and _is_prepared(w.layout) and not set(w.symbols()))
    return tuple(
        dict.fromkeys(
            (w.layout, _what_is_done(w, to)) for w in known if w.layout != to.weight_layout
        )
    )


def _is_prepared(layout: str) -> bool:
    """Whether `prepare_` knows a layout, that is, puts weights in it for some target."""
    return any(layout == target.weight_layout for target in TARGETS.values())


def _what_is_done(w: TensorType, to: Target) -> str:
    done = (
        f"fusion_moe.prepare_(model, {to.name!r}) reorders them to {to.weight_layout}, the "
        f"layout of {to.name}"
    )
    if to.weight_layout == LINEAR.name:
        return done
    n, k = (value(plain(d), {}) for d in w.shape[1:])
    layout = LAYOUTS[to.weight_layout]
    rows, columns = layout.tile
    why = layout.why_not(ceil_to(n, rows), ceil_to(k, columns), w.encoding)
    return f"prepare_ leaves them as they are: {why}" if why else done
