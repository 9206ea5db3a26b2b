"""Recipes: the precision in which products of trained layers are computed. `fusion_moe.autocast`
puts one in force.

    with fusion_moe.autocast(recipe=fusion_moe.recipe.Float8BlockScaling()):
        y = layer(x, splits)

The recipe in force when the forward is called counts; the backward follows it, wherever it runs.
torch.compile guards on it. Recomputation in a backward (torch.utils.checkpoint) calls the forward
again, so there the `with` belongs inside the checkpointed function.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .errors import OptionError, need_one_of

__all__ = ["Float8BlockScaling", "MXFP8BlockScaling"]
_FLOATS = "bf16"  # as `wgrad`: weight gradients are products of unquantized operands
ORIGINAL = "_original"  # the end of a `wgrad` whose copies the backward makes, of saved floats
# activation_format of operations -> the family of encodings that its operands have, and `wgrad`
FORMATS = {
    f"{family}{end}": (family, wgrad)
    for family, own in (("mxfp8", "mxfp8"), ("fp8_block", "fp8"), ("fp8_block_f32", "fp8"))
    for end, wgrad in (("", own), (ORIGINAL, own + ORIGINAL), (f"_wgrad_{_FLOATS}", _FLOATS))
}


def _format(family: str, wgrad: str) -> str:
    return next(name for name, of in FORMATS.items() if of == (family, wgrad))


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
        need_one_of("wgrad", self.wgrad, ("mxfp8", _FLOATS))

    @property
    def activation_format(self) -> str:
        """The `activation_format` that operations get."""
        return _format("mxfp8", self.wgrad)


def _powers_of_two() -> bool:
    return os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1"


@dataclass(frozen=True)
class Float8BlockScaling:
    """Transformer Engine's recipe: E4M3 elements in forward, dgrad and wgrad, with a scale for each
    128 of activations and gradients along the contracted dimension, and for each 128 x 128 of
    weights.

    Operands are quantized as Transformer Engine does, bit for bit where they are finite. What is
    not finite becomes NaN, together with its block. Features and groups may have any sizes: the
    last block of each may be short.

    power_2_scale: whether scales are powers of two; the default, unless the environment variable
    NVTE_FP8_BLOCK_SCALING_FP32_SCALES is 1 then. wgrad: "fp8"; or "bf16": weight gradients are
    products of the unquantized activations and gradients.
    """

    power_2_scale: bool = field(default_factory=_powers_of_two)
    wgrad: str = "fp8"

    def __post_init__(self) -> None:
        need_one_of("wgrad", self.wgrad, ("fp8", _FLOATS))

    @property
    def activation_format(self) -> str:
        """The `activation_format` that operations get."""
        return _format("fp8_block" if self.power_2_scale else "fp8_block_f32", self.wgrad)


Recipe = MXFP8BlockScaling | Float8BlockScaling


def _adopted(recipe: Any) -> Recipe | None:
    """A recipe of ours, or ours for Transformer Engine's Float8BlockScaling, by its fields.
    OptionError if its fields ask for what is not computed here.
    """
    # a tuple, since older tracers know no isinstance of a union
    if recipe is None or isinstance(recipe, (MXFP8BlockScaling, Float8BlockScaling)):
        return recipe
    where = "fusion_moe.autocast"
    if type(recipe).__name__ != "Float8BlockScaling":
        raise OptionError(
            f"recipe = {recipe!r}",
            expected="a recipe of fusion_moe.recipe, Transformer Engine's Float8BlockScaling, or "
            "None",
            where=where,
        )
    operands = [f"fp8_quant_{name}" for name in ("fwd_inp", "fwd_weight", "bwd_grad")]
    for name, value, computed in (
        *((f"{name}.amax_epsilon", getattr(recipe, name).amax_epsilon, 0.0) for name in operands),
        ("x_block_scaling_dim", recipe.x_block_scaling_dim, 1),
        ("w_block_scaling_dim", recipe.w_block_scaling_dim, 2),
        ("grad_block_scaling_dim", recipe.grad_block_scaling_dim, 1),
        ("fp8_format", recipe.fp8_format.name, "E4M3"),
        ("backward_override", getattr(recipe, "backward_override", None), None),
    ):
        if value != computed:
            raise OptionError(
                f"Float8BlockScaling with {name} = {value!r}", expected=repr(computed), where=where
            )
    powers = {name: bool(getattr(recipe, name).power_2_scale) for name in operands}
    if len(set(powers.values())) > 1:
        raise OptionError(
            "Float8BlockScaling with power_2_scale of "
            + ", ".join(f"{name} {value}" for name, value in powers.items()),
            expected="one for all operands",
            where=where,
        )
    return Float8BlockScaling(power_2_scale=powers[operands[0]])


class autocast:
    """Inside a `with` block, `GroupedLinear`, `Sequential` and transformers' experts with float
    weights compute by a recipe; None: by none.

    It affects this thread only. It does not set dtypes: results have the dtype of `torch.autocast`
    if that is on, otherwise the weights'.

    Args:
        recipe: a recipe of `fusion_moe.recipe`, Transformer Engine's Float8BlockScaling, or None.

    Raises:
        OptionError: for anything else, or if a field of Transformer Engine's asks for what is not
            computed here.
    """

    def __init__(self, recipe: Any):
        self._recipe = _adopted(recipe)

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


def current() -> Recipe | None:
    """The recipe in force: that of the innermost block with one; None outside."""
    return getattr(_state, "recipe", None)


def activation_format(original: bool = False) -> str:
    """The `activation_format` that operations get under the recipe in force. original: the forward
    saves activations as they are, not their copies.
    """
    by = current()
    if by is None:
        return "bf16"
    form = by.activation_format
    return form + ORIGINAL if original and by.wgrad != _FLOATS else form
