"""What a layer of experts computes, in float64, from the numbers that its weights mean; and weights
for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_moe.encodings import Quantized, dequantize


def expected(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    w13: Quantized,
    w2: Quantized,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    interleave: int = 0,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x [T, H], ids int[T, k], w [T, k], w13 [E, 2I, H], w2 [E, H, I] -> float64[T, H].

    interleave: of the rows of w13: 0, gate above up; 1, they take turns. function: of experts
    without a gate, whose w13 is [E, I, H].
    """

    def swiglu(both: Tensor) -> Tensor:
        gate, value = (both[0::2], both[1::2]) if interleave else both.chunk(2)
        if limit is not None:
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (value + up_offset)

    up, down = dequantize(w13).double(), dequantize(w2).double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, row in enumerate(x.double()):
        for e, weight in zip(ids[t].tolist(), w[t].tolist(), strict=True):
            both = up[e] @ row
            if w13_bias is not None:
                both = both + w13_bias[e]
            y = down[e] @ (function or swiglu)(both)
            out[t] += weight * (y if w2_bias is None else y + w2_bias[e])
    return out


def assert_near(got: Tensor, want: Tensor) -> None:
    assert (got - want).norm() <= 1e-6 * want.norm()


def load_nvfp4(owner: Any, expert: int, name: str, weight: Quantized) -> None:
    """Has vLLM load a matrix of an expert as ModelOpt stores it."""
    parts = zip(("weight", "weight_scale", "weight_scale_2"), weight, strict=True)
    found = {**dict(parts), "input_scale": torch.ones(())}
    list(owner.load_weights((f"{expert}.{name}.{part}", t) for part, t in found.items()))
