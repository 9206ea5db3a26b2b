"""Recipes: what products of layers that train are computed in. `fusion_moe.autocast` puts one in force.

    with fusion_moe.autocast(recipe=fusion_moe.recipe.MXFP8BlockScaling()):
        y = layer(x, splits)

A recipe counts where the forward is called; the backward follows it, wherever it runs. torch.compile guards on it. What is computed again
in a backward (torch.utils.checkpoint) calls the forward once more, so there the `with` belongs inside of the function.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from .errors import OptionError, need_one_of

__all__ = ["MXFP8BlockScaling"]
FORMATS = {"mxfp8": "mxfp8", "bf16": "mxfp8_wgrad_bf16"}  # activation_format of operations, by `wgrad`


@dataclass(frozen=True)
class MXFP8BlockScaling:
    """Transformer Engine's recipe: E4M3 elements, one power of two for 32 of them, in the forward, dgrad and wgrad.

    Emulated: fidelity, not speed. Operands are quantized as Transformer Engine does, bit for bit, and multiplied as the bf16 numbers that
    they then are, with float32 sums. In- and out-features of a layer are multiples of 32; groups have any number of rows: those of wgrad
    have blocks from their own first row, and a short one at their end.

    wgrad: "mxfp8"; or "bf16", where gradients of weights are products of the activations and gradients as they are.
    """

    wgrad: str = "mxfp8"

    def __post_init__(self) -> None:
        need_one_of("wgrad", self.wgrad, FORMATS)


class autocast:
    """Inside, `GroupedLinear`, `Sequential` and experts of transformers with float weights compute by a recipe; None: as they are.

    recipe: a recipe of `fusion_moe.recipe`; OptionError for anything else. Of this thread alone. It says nothing of dtypes: results have
    that of `torch.autocast` where it is on, else the weights'.
    """

    def __init__(self, recipe: MXFP8BlockScaling | None):
        if recipe is not None and not isinstance(recipe, MXFP8BlockScaling):
            raise OptionError(f"recipe = {recipe!r}", expected="a recipe of fusion_moe.recipe, or None", where="fusion_moe.autocast")
        self._recipe = recipe

    def __enter__(self) -> None:
        _state.before = (*getattr(_state, "before", ()), current())
        _state.recipe = self._recipe

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        *before, _state.recipe = _state.before
        _state.before = tuple(before)


_state = threading.local()  # torch's tracer guards on what is read of it; of a ContextVar it cannot


def current() -> MXFP8BlockScaling | None:
    """The recipe in force."""
    return getattr(_state, "recipe", None)


def activation_format() -> str:
    """The recipe in force as operations are told of it."""
    by = current()
    return "bf16" if by is None else FORMATS[by.wgrad]
