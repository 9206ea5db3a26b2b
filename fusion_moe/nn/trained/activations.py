"""Gated activations with a scale for each row, and the order of the gate and linear columns that
they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError, ShapeError
from .. import checks
from .stages import ROWS, Operand, Stage

_KEY = "glu_interleave_size"


class _ScaledGLU(nn.Module):
    """x [..., 2H], scales [...] -> [..., H]. glu_interleave_size k: blocks of k gate and k linear
    columns; None: the first half is gate.

    State dicts store the interleave. One with another interleave does not load; one without an
    interleave does.
    """

    def __init__(
        self, glu_interleave_size: int | None, limit: float | None, alpha: float, offset: float
    ):
        super().__init__()
        k = glu_interleave_size
        if k is not None and (not isinstance(k, int) or k <= 0):
            raise OptionError(
                f"{_KEY} = {k!r}", expected="a positive integer, or None", where=type(self).__name__
            )
        self.glu_interleave_size = k
        self._numbers = limit, alpha, offset
        self._text = repr((k or 0, limit, alpha, offset))

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        """x float[..., 2H], scales float[...] -> [..., H] of the dtype of x: computed in float32,
        rounded once.
        """
        where = type(self).__name__
        self._check_width(x.shape[-1] if x.dim() else 0)
        checks.need_float("x", x, where)
        column = checks.need_scales(scales, x, where).view(x.shape[:-1])
        limit, alpha, offset = self._numbers
        return torch.ops.fusion_moe.scaled_swiglu(
            x, column, self.glu_interleave_size or 0, limit=limit, alpha=alpha, up_offset=offset
        )

    def stage(self, x: Tensor, width: int, scales: Tensor | None) -> Stage:
        """The stage that the activation adds to a program, for rows like those of x that are
        `width` wide.
        """
        self._check_width(width)
        column = checks.need_scales(scales, x, type(self).__name__)
        return Stage("glu", width, (Operand(column, (ROWS,)),), (self._text,))

    def _check_width(self, width: int) -> None:
        k = self.glu_interleave_size or 1
        if width % (2 * k) or not width:
            raise ShapeError(
                f"x of {width} columns", expected=f"a multiple of {2 * k}", where=repr(self)
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _KEY] = torch.tensor(self.glu_interleave_size or 0)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        entries, own = dict(state_dict), self.glu_interleave_size or 0
        entries.pop(prefix + "_extra_state", None)  # Transformer Engine's
        saved = entries.pop(prefix + _KEY, own)
        if checks.are_alike([saved], dims=0) and not saved.is_meta:
            saved = saved.item()
        if type(saved) is not int or saved != own:
            found = (saved or None) if type(saved) is int else f"a {type(saved).__name__}"
            raise OptionError(
                f"a state dict with {_KEY} = {found}",
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
        super().__init__(glu_interleave_size, None, 1.0, 0.0)


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
        super().__init__(glu_interleave_size, limit, alpha, offset)

    def extra_repr(self) -> str:
        """For print(model)."""
        return super().extra_repr() + "".join(
            f", {n}={v}" for n, v in zip(("limit", "alpha", "offset"), self._numbers, strict=True)
        )


def interleave(rows: Tensor, size: int, dim: int = 0) -> Tensor:
    """Blocks of gate rows and of linear rows in turns.

    Args:
        rows: a weight or bias, its gate rows before its linear rows along `dim`.
        size: the number of rows of a block.
        dim: the dimension of 2H rows.

    Returns:
        The same rows; along `dim`, blocks of `size` gate and `size` linear rows alternate.
    """
    return _reordered(rows, size, dim, (2, -1, size))


def deinterleave(rows: Tensor, size: int, dim: int = 0) -> Tensor:
    """The inverse of `interleave`."""
    return _reordered(rows, size, dim, (-1, 2, size))


def _reordered(rows: Tensor, size: int, dim: int, blocks: tuple[int, int, int]) -> Tensor:
    if size <= 0 or rows.shape[dim] % (2 * size):
        raise ShapeError(
            f"{rows.shape[dim]} rows in blocks of {size}",
            expected=f"a multiple of 2 * {size}",
            where="interleave",
        )
    dim %= rows.dim()
    return rows.unflatten(dim, blocks).transpose(dim, dim + 1).flatten(dim, dim + 2)
