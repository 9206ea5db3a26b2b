"""The order of all experts of a layer in one float tensor: names do not give it away, but shapes
and the model family do.

[E, 2I, H] and [E, H, I]    gate above up, or [E, I, H] without a gate
[E, H, 2I] and [E, I, H]    transposed; gate before up in Aria and Llama-4, alternating in gpt-oss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .experts import LayerExperts, parts_of
from .headers import Read


@dataclass(frozen=True)
class FusedOrder:
    """transposed: the weights are [E, K, N]. interleaved: rows of gate and up alternate."""

    transposed: bool = False
    interleaved: bool = False

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The dimensions N and K of a fused weight, whichever way it is stored."""
        return (shape[2], shape[1]) if self.transposed else (shape[1], shape[2])

    def matrix(self, read: Read, name: str, expert: int, at: int, count: int) -> Tensor:
        """Matrix number `at` of the `count` matrices that an expert has in a weight -> [N / count,
        K]
        """
        whole = read(name)[expert]
        return self.rows(whole.mT if self.transposed else whole, at, count).contiguous()

    def rows(self, rows: Tensor, at: int, count: int) -> Tensor:
        """The rows [N, ...] of matrix number `at` of `count` -> [N / count, ...]"""
        return rows[at::count] if self.interleaved else rows.chunk(count)[at]


AS_STORED = FusedOrder()
_GATE_THEN_UP, _INTERLEAVED = (
    FusedOrder(transposed=True),
    FusedOrder(transposed=True, interleaved=True),
)
_TRANSPOSED = {  # by the model_type of config.json
    "aria": _GATE_THEN_UP,
    "aria_text": _GATE_THEN_UP,
    "gpt_oss": _INTERLEAVED,
    "llama4": _GATE_THEN_UP,
    "llama4_text": _GATE_THEN_UP,
    "openai_privacy_filter": _GATE_THEN_UP,
}


def family_order(config: Mapping[str, Any], layer: str) -> FusedOrder:
    """The order of a family's weights, by config.json, or by its part for the text model or for the
    tower that a layer is in.
    """
    kinds = (str(part.get("model_type")) for part in parts_of(config, layer))
    return next((_TRANSPOSED[kind] for kind in kinds if kind in _TRANSPOSED), AS_STORED)


def matrices_of(projection: str) -> tuple[str, ...]:
    """The matrices that an expert has in a projection's weight."""
    return ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)


def order_of(
    layer: LayerExperts, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> FusedOrder:
    """The order of a layer, by the names and shapes of its projections. UnsupportedError if the
    shapes or the family are ambiguous.
    """
    up, down = shapes.get("gate_up_proj") or shapes.get("up_proj"), shapes.get("down_proj")
    gated = "gate_up_proj" in shapes
    family = family_order(config, layer.name)
    if up is not None and down is not None and len(up) == len(down) == 3:
        if (up[0], up[2], up[1]) == (down[0], down[1], down[2] * (1 + gated)):
            return AS_STORED
        if family.transposed and gated and up == (down[0], down[2], down[1] * 2):
            return family
    actual = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    raise UnsupportedError(
        actual,
        expected=f"[E, 2I, H] or [E, I, H], and [E, H, I]; of {', '.join(_TRANSPOSED)} [E, H, 2I] "
        "and [E, I, H]",
        todo="load the model, quantize_ it and save_pretrained: it knows how its family stores "
        "them",
        where=layer.name,
    )
