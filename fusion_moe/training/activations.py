"""Activations of rows, gated or not, perhaps with a scale for each row, and the order of the gate
and linear columns that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..definitions.operations import restored
from ..errors import OptionError, ShapeError
from ..ir import FusionDefinition, Value
from ..ir.activation import read, swiglu, written
from ..nn import checks
from .checks import are_alike, need_scales
from .stages import ROWS, Operand, Stage, call

_KEY = "glu_interleave_size"


class Activation(nn.Module):
    """A pointwise activation of rows by the text of a program (`activation`, `swiglu`): a stage of
    the program of a Sequential.

    x [..., N] -> [..., N], or [..., 2N] -> [..., N] with gate and up; computed in float32, rounded
    once. scaled: it takes a factor for each row, scales [...], too. OptionError for a text that is
    no activation, or one with parameters.
    """

    def __init__(self, text: str, scaled: bool = False):
        super().__init__()
        if (program := read(text)).parameters:
            raise OptionError(
                f"an activation with {program.parameters} parameters",
                expected="one without: a Sequential knows no experts",
                where=type(self).__name__,
            )
        self.text, self.parts, self.interleave = text, program.parts, program.interleave
        self.scaled = scaled

    def forward(self, x: Tensor, scales: Tensor | None = None) -> Tensor:
        """x float[..., parts * N], scales float[...] if it is scaled -> [..., N] of the dtype of
        x.
        """
        checks.need_float("x", x, type(self).__name__)
        stage = self.stage(x, x.shape[-1] if x.dim() else 0, scales)
        rows = x.reshape(-1, stage.width)
        return restored(call(rows, [stage]).run(), x.shape[:-1])

    def stage(self, x: Tensor, width: int, scales: Tensor | None = None) -> Stage:
        """The stage that the activation adds to a program, for rows like those of x that are
        `width` wide.
        """
        self._check_width(width)
        if not self.scaled and scales is not None:
            raise ShapeError("scales", expected="none", where=type(self).__name__)
        column = need_scales(scales, x, type(self).__name__) if self.scaled else None
        operand = None if column is None else Operand(column, (ROWS,))
        return Stage("activation", width, (operand,), (self.text,))

    def _check_width(self, width: int) -> None:
        k = self.parts * (self.interleave or 1)
        if width % k or not width:
            raise ShapeError(
                f"x of {width} columns", expected=f"a multiple of {k}", where=repr(self)
            )

    def extra_repr(self) -> str:
        """For print(model)."""
        if type(self) is Activation:
            return read(self.text).formula
        return f"{_KEY}={self.interleave}" if self.interleave else ""


class _ScaledGLU(Activation):
    """x [..., 2H], scales [...] -> [..., H]. glu_interleave_size k: blocks of k gate and k linear
    columns; None: the first half is gate.

    State dicts store the interleave. One with another interleave does not load; one without an
    interleave does.
    """

    def __init__(self, glu_interleave_size: int | None, text: Callable[[int], str]):
        k = glu_interleave_size
        if k is not None and (not isinstance(k, int) or k <= 0):
            raise OptionError(
                f"{_KEY} = {k!r}", expected="a positive integer, or None", where=type(self).__name__
            )
        super().__init__(text(k or 0), scaled=True)
        self.glu_interleave_size = k

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _KEY] = torch.tensor(self.glu_interleave_size or 0)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        entries, own = dict(state_dict), self.glu_interleave_size or 0
        entries.pop(prefix + "_extra_state", None)  # Transformer Engine's
        saved = entries.pop(prefix + _KEY, own)
        if are_alike([saved], dims=0) and not saved.is_meta:
            saved = saved.item()
        if type(saved) is not int or saved != own:
            raise OptionError(
                f"a state dict with {_KEY} = "
                f"{(saved or None) if type(saved) is int else f'a {type(saved).__name__}'}",
                expected=str(self.glu_interleave_size),
                todo="make the module with that one, or reorder rows of the layer before it: "
                "fusion_moe.nn.interleave, deinterleave",
                where=prefix.rstrip(".") or type(self).__name__,
            )
        super()._load_from_state_dict(entries, prefix, *args)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{_KEY}={self.glu_interleave_size}"


class ScaledSwiGLU(_ScaledGLU):
    """silu(gate) * linear * scale. x [..., 2H]: gate and linear columns; one scale for each row.

    glu_interleave_size k: blocks of k gate and k linear columns alternate; None: gate is the first
    half (in torch's GLU it is the second). State dicts store the interleave. One with another
    interleave does not load; one without an interleave does.
    """

    def __init__(self, glu_interleave_size: int | None = None):
        super().__init__(glu_interleave_size, swiglu)


class ScaledClampedQGeGLU(_ScaledGLU):
    """gate * sigmoid(alpha * gate) * (linear + offset) * scale, after gate is clamped to at most
    `limit` and linear to -limit .. limit.

    Clamped elements have zero gradient. Everything else is as in ScaledSwiGLU.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        offset: float = 1.0,
    ):
        super().__init__(glu_interleave_size, lambda k: swiglu(k, limit, alpha, offset))
        self._numbers = limit, alpha, offset

    def extra_repr(self) -> str:
        """For print(model)."""
        return super().extra_repr() + "".join(
            f", {n}={v}" for n, v in zip(("limit", "alpha", "offset"), self._numbers, strict=True)
        )


class ScaledSiTUGLU(_ScaledGLU):
    """beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(linear / beta2) * scale: SwiGLU whose
    factors are bounded. Everything else is as in ScaledSwiGLU. OptionError for a beta that is not
    positive and finite.
    """

    def __init__(
        self, glu_interleave_size: int | None = None, beta1: float = 4.0, beta2: float = 25.0
    ):
        super().__init__(glu_interleave_size, _situ(type(self).__name__, beta1, beta2))


def _situ(where: str, beta1: float, beta2: float) -> Callable[[int], str]:
    """The text for each interleave. OptionError for a beta that is not positive and finite."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < inf:
            raise OptionError(f"{name} = {beta}", expected="a positive number", where=where)

    def bounded(fd: FusionDefinition, x: Value, beta: float) -> Value:
        return fd.ops.tanh(x / beta) * beta

    def situ(fd: FusionDefinition, gate: Value, up: Value) -> Value:
        active = bounded(fd, gate, float(beta1)) * fd.ops.sigmoid(gate)
        return active * bounded(fd, up, float(beta2))

    return lambda k: written(situ, 2, k)


def _gelu(fd: FusionDefinition, x: Value) -> Value:
    """By tanh, as torch's approximate="tanh"."""
    inner = (x + x * x * x * 0.044715) * sqrt(2 / pi)
    return x * 0.5 * (fd.ops.tanh(inner) + 1.0)


def _squared_relu(fd: FusionDefinition, x: Value) -> Value:
    return fd.ops.relu(x) * fd.ops.relu(x)


# what a gate, or a row alone, becomes
_FUNCTIONS: dict[str, Callable[[FusionDefinition, Value], Value]] = {
    "sigmoid": lambda fd, x: fd.ops.sigmoid(x),
    "silu": lambda fd, x: fd.ops.silu(x),
    "relu": lambda fd, x: fd.ops.relu(x),
    "gelu": _gelu,
    "quick_gelu": lambda fd, x: x * fd.ops.sigmoid(x * 1.702),
    "squared_relu": _squared_relu,
}


class SReLU(Activation):
    """relu(x)^2, x [..., H] -> [..., H]: for experts without a gate."""

    def __init__(self) -> None:
        super().__init__(written(_squared_relu, 1))


class ScaledSReLU(Activation):
    """relu(x)^2 * scale, x [..., H], scales [...] -> [..., H]: the router's weight of each row."""

    def __init__(self) -> None:
        super().__init__(written(_squared_relu, 1), scaled=True)


class QGELU(Activation):
    """x * sigmoid(1.702 * x), an approximation of GELU, x [..., H] -> [..., H]."""

    def __init__(self) -> None:
        super().__init__(written(_FUNCTIONS["quick_gelu"], 1))


class ClampedSwiGLU(Activation):
    """ScaledClampedQGeGLU without scales. x [..., 2H] -> [..., H]."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        limit: float = 7.0,
        alpha: float = 1.702,
        offset: float = 1.0,
    ):
        super().__init__(swiglu(glu_interleave_size or 0, limit, alpha, offset))


class SiTUGLU(Activation):
    """ScaledSiTUGLU without scales. x [..., 2H] -> [..., H]."""

    def __init__(
        self, glu_interleave_size: int | None = None, beta1: float = 4.0, beta2: float = 25.0
    ):
        super().__init__(_situ(type(self).__name__, beta1, beta2)(glu_interleave_size or 0))


class _GLU(Activation):
    """function(gate) * linear, x [..., 2H] -> [..., H]; glu_interleave_size as in ScaledSwiGLU."""

    function: str

    def __init__(self, glu_interleave_size: int | None = None):
        f = _FUNCTIONS[self.function]
        super().__init__(
            written(lambda fd, gate, up: f(fd, gate) * up, 2, glu_interleave_size or 0)
        )


class GLU(_GLU):
    """sigmoid(gate) * linear. Gate is the first half of x; in torch's GLU it is the second."""

    function = "sigmoid"


class SwiGLU(_GLU):
    """silu(gate) * linear, x [..., 2H] -> [..., H]; glu_interleave_size as in ScaledSwiGLU."""

    function = "silu"


class GEGLU(_GLU):
    """gelu(gate) * linear, GELU by tanh, x [..., 2H] -> [..., H]; glu_interleave_size as in
    ScaledSwiGLU.
    """

    function = "gelu"


class QGEGLU(_GLU):
    """gate * sigmoid(1.702 * gate) * linear, x [..., 2H] -> [..., H]; glu_interleave_size as in
    ScaledSwiGLU.
    """

    function = "quick_gelu"


class ReGLU(_GLU):
    """relu(gate) * linear, x [..., 2H] -> [..., H]; glu_interleave_size as in ScaledSwiGLU."""

    function = "relu"


class SReGLU(_GLU):
    """relu(gate)^2 * linear, x [..., 2H] -> [..., H]; glu_interleave_size as in ScaledSwiGLU."""

    function = "squared_relu"
