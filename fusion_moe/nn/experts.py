"""The experts of a mixture-of-experts layer, gate, up and down projections in an encoding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..encodings import NVFP4, Encoding, Quantized
from ..errors import ShapeError
from .frozen import frozen, quantized
from .packed import PackedModule

_PROJECTIONS = ("gate_up", "down")


class Experts(PackedModule):
    """E experts of gated MLPs: down(act(gate(x)) * (up(x) + up_offset)), summed over a token's experts with the router's weights.

    H hidden, I intermediate features. Frozen parameters, by the parts of the encoding:

        gate_up_proj, down_proj              elements: [E, 2I, H] and [E, H, I], packed along the last dimension
        gate_up_proj_scale, down_proj_scale  block scales, in linear order
        gate_up_decode_scale                 float32 [E, 2], a scale for gate and one for up; down_decode_scale float32 [E]
        gate_up_proj_bias, down_proj_bias    float [E, 2I] and [E, H], or None; the only ones that a cast of the model casts

    interleave: 0, gate above up in the rows of gate_up_proj; n, blocks of n gate rows and n up rows in turns. act(gate) is
    gate * sigmoid(alpha * gate), of gate and up clamped by `limit` (gate from above alone). activation_format: "bf16", activations as
    they come in, or "nvfp4", quantized too (compute capability 10.0 only). scale_on: what the router's weights multiply, the "output"
    of experts or, as in Llama-4, their "input".
    """

    castable = ("gate_up_proj_bias", "down_proj_bias")
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(
        self, gate_up: Quantized, down: Quantized, activation_format: str = "bf16", scale_on: str = "output", *,
        gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, interleave: int = 0, limit: float | None = None,
        alpha: float = 1.0, up_offset: float = 0.0,
    ):  # fmt: skip
        """gate_up [E, 2I, H] and down [E, H, I] of one encoding, which may have [E, 2] and [E] scales of whole matrices."""
        super().__init__()
        experts, rows, hidden = gate_up.shape
        if rows % 2 or down.shape != (experts, hidden, rows // 2) or gate_up.encoding != down.encoding:
            found = f"gate_up {gate_up.encoding.name} {list(gate_up.shape)} and down {down.encoding.name} {list(down.shape)}"
            raise ShapeError(found, expected="[E, 2I, H] and [E, H, I] of one encoding")
        self.encoding = gate_up.encoding
        self.activation_format, self.scale_on = activation_format, scale_on
        self.interleave, self.limit, self.alpha, self.up_offset = interleave, limit, alpha, up_offset
        for name, weight in zip(_PROJECTIONS, (gate_up, down), strict=True):
            for key, (_, part) in zip(self._keys(name), weight.named(), strict=True):
                setattr(self, key, frozen(part))
        self.gate_up_proj_bias = _bias("gate_up_bias", gate_up_bias, (experts, rows))
        self.down_proj_bias = _bias("down_bias", down_bias, (experts, hidden))

    def _keys(self, projection: str) -> tuple[str, ...]:
        """The names of the parameters that are the parts of a weight."""
        return _keys(self.encoding, projection)

    @property
    def packed(self) -> tuple[tuple[str, ...], ...]:  # type: ignore[override]
        """The names of elements and block scales of each weight."""
        return tuple(self._keys(name)[: 1 + len(self.encoding.block_scales)] for name in _PROJECTIONS)

    def weight(self, projection: str) -> Quantized:
        """The weight of "gate_up" or "down", as it is stored."""
        return Quantized(*(getattr(self, key) for key in self._keys(projection)), encoding=self.encoding)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens in all."""
        gate_up, down = ([getattr(self, key) for key in self._keys(name)] for name in _PROJECTIONS)
        return torch.ops.fusion_moe.fused_experts(
            hidden_states, top_k_index, top_k_weights, gate_up, down, self._cast(self.gate_up_proj_bias, hidden_states),
            self._cast(self.down_proj_bias, hidden_states), interleave=self.interleave, limit=self.limit, alpha=self.alpha,
            up_offset=self.up_offset, scale_on=self.scale_on, activation_format=self.activation_format,
            weight_layout=self.weight_layout, weight_format=self.encoding.name,
        )  # fmt: skip

    def _cast(self, bias: Tensor | None, like: Tensor) -> Tensor | None:
        return None if bias is None else bias.to(like.dtype)

    def extra_repr(self) -> str:
        """For print(model)."""
        experts, rows, hidden = self.weight("gate_up").shape
        usual = {"interleave": 0, "limit": None, "alpha": 1.0, "up_offset": 0.0, "scale_on": "output"}
        changed = "".join(f", {name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value)
        sizes = f"experts={experts}, hidden={hidden}, intermediate={rows // 2}"
        return f"{sizes}, activation_format={self.activation_format!r}, weight_layout={self.weight_layout!r}{changed}"


class NVFP4Experts(Experts):
    """Experts in NVFP4: uint8 gate_up_proj [E, 2I, H/2] and down_proj [E, H, I/2], e4m3 scales [E, 2I, H/16] and [E, H, I/16]."""

    @classmethod
    def from_float(cls, gate_up: Tensor, down: Tensor, activation_format: str = "bf16", scale_on: str = "output") -> NVFP4Experts:
        """gate_up float[E, 2I, H], down float[E, H, I] -> the module with both quantized, bit for bit as nvidia-modelopt does."""
        return cls(quantize_gate_up(gate_up), quantized(down), activation_format, scale_on)

    @property
    def gate_decode_scale(self) -> Tensor:
        """float32 [E]: the multipliers of gate."""
        return self.gate_up_decode_scale[:, 0]  # type: ignore[index]

    @property
    def up_decode_scale(self) -> Tensor:
        """float32 [E]: the multipliers of up."""
        return self.gate_up_decode_scale[:, 1]  # type: ignore[index]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Takes the two scales of gate and up as one parameter each too, as they were saved before."""
        given, halves = dict(state_dict), [f"{prefix}{name}_decode_scale" for name in ("gate", "up")]
        if all(key in given for key in halves):
            scales = torch.stack([given.pop(key) for key in halves], 1)
            for key in halves:
                state_dict.pop(key)  # type: ignore[attr-defined]  # else it counts as unexpected
            given[f"{prefix}gate_up_decode_scale"] = scales
        super()._load_from_state_dict(given, prefix, *args)


@cache
def _keys(encoding: Encoding, projection: str) -> tuple[str, ...]:
    scales = (f"{projection}_proj_scale" if s.block else f"{projection}_decode_scale" for s in encoding.scales)
    return (f"{projection}_proj", *scales)


def _bias(name: str, bias: Tensor | None, shape: tuple[int, int]) -> nn.Parameter | None:
    if bias is not None and tuple(bias.shape) != shape:
        raise ShapeError(f"{name} {list(bias.shape)}", expected=f"{list(shape)}")
    return None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)


def quantize_gate_up(gate_up: Tensor) -> Quantized:
    """gate_up float[E, 2I, H], gate above up -> nvfp4[E, 2I, H] with decode scales [E, 2]: gate and up keep their own."""
    experts, rows, hidden = gate_up.shape
    codes, block_scale, decode_scale = quantized(gate_up.reshape(experts, 2, rows // 2, hidden))
    return Quantized(codes.flatten(1, 2), block_scale.flatten(1, 2), decode_scale, encoding=NVFP4)
