"""Recipes: the precision in which products of trained layers are computed. `fusion_moe.autocast`
puts one in force.

    with fusion_moe.autocast(recipe=fusion_moe.recipe.MXFP8BlockScaling()):
        y = layer(x, splits)

The recipe in force when the forward is called counts; the backward follows it, wherever it runs.
torch.compile guards on it. Recomputation in a backward (torch.utils.checkpoint) calls the forward
again, so there the `with` belongs inside the checkpointed function.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

from .errors import OptionError, need_one_of

__all__ = ["MXFP8BlockScaling"]
# activation_format of operations, by `wgrad`
FORMATS = {"mxfp8": "mxfp8", "bf16": "mxfp8_wgrad_bf16"}


@dataclass(frozen=True)
class MXFP8BlockScaling:
    """Transformer Engine's recipe: E4M3 elements and a power-of-two scale for each 32 of them, in
    forward, dgrad and wgrad.

    Emulated: it gives the recipe's numbers, not its speed. Operands are quantized as Transformer
    Engine does, bit for bit, and the resulting values are multiplied as bf16 with float32 sums. In-
    and out-features of a layer must be multiples of 32. Groups may have any number of rows: in
    wgrad, blocks start at the first row of each group, and the last block of a group may be short.

    wgrad: "mxfp8"; or "bf16": weight gradients are products of the unquantized activations and
    gradients.
    """

    wgrad: str = "mxfp8"

    def __post_init__(self) -> None:
        need_one_of("wgrad", self.wgrad, FORMATS)


class autocast:
    """Inside a `with` block, `GroupedLinear`, `Sequential` and transformers' experts with float
    weights compute by a recipe; None: by none.

    It affects this thread only. It does not set dtypes: results have the dtype of `torch.autocast`
    if that is on, otherwise the weights'.

    Args:
        recipe: a recipe of `fusion_moe.recipe`, or None.

    Raises:
        OptionError: for anything else.
    """

    def __init__(self, recipe: MXFP8BlockScaling | None):
        if recipe is not None and not isinstance(recipe, MXFP8BlockScaling):
            raise OptionError(
                f"recipe = {recipe!r}",
                expected="a recipe of fusion_moe.recipe, or None",
                where="fusion_moe.autocast",
            )
        self._recipe = recipe

    def __enter__(self) -> None:
        _state.before = (*getattr(_state, "before", ()), current())
        _state.recipe = self._recipe

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        *before, _state.recipe = _state.before
        _state.before = tuple(before)


# torch's tracer guards on values read from it; it cannot guard on a ContextVar
_state = threading.local()


def current() -> MXFP8BlockScaling | None:
    """The recipe in force."""
    return getattr(_state, "recipe", None)


def activation_format() -> str:
    """The `activation_format` that operations get under the recipe in force."""
    by = current()
    return "bf16" if by is None else FORMATS[by.wgrad]
