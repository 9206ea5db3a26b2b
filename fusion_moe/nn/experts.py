"""The experts of a mixture-of-experts layer, gate, up and down projections in NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from ..encodings import NVFP4, Quantized
from ..errors import ShapeError
from .frozen import frozen, quantized
from .packed import PackedModule


class NVFP4Experts(PackedModule):
    """E experts of SwiGLU: down(silu(gate(x)) * up(x)), summed over a token's experts with the router's weights.

    H hidden, I intermediate features. Frozen parameters, gate above up in the rows of gate_up_proj:

        gate_up_proj        uint8          [E, 2I, H/2]    two codes a byte, low nibble first
        gate_up_proj_scale  float8_e4m3fn  [E, 2I, H/16]   linear order
        gate_decode_scale, up_decode_scale  float32 [E]    multipliers: gate and up keep their own
        down_proj, down_proj_scale, down_decode_scale      the same for [E, H, I]

    activation_format: "bf16", activations as they come in, or "nvfp4", quantized too (compute capability 10.0 only).
    scale_on: what the router's weights multiply, the "output" of experts or, as in Llama-4, their "input".
    """

    packed = (("gate_up_proj", "gate_up_proj_scale"), ("down_proj", "down_proj_scale"))

    def __init__(self, gate_up: Quantized, down: Quantized, activation_format: str = "bf16", scale_on: str = "output"):
        """gate_up nvfp4[E, 2I, H] with decode scales [E, 2], down nvfp4[E, H, I] with decode scales [E]."""
        super().__init__()
        experts, rows, hidden = gate_up.shape
        if rows % 2 or down.shape != (experts, hidden, rows // 2):
            raise ShapeError(f"gate_up {list(gate_up.shape)} and down {list(down.shape)}", expected="[E, 2I, H] and [E, H, I]")
        self.activation_format, self.scale_on = activation_format, scale_on
        self.gate_up_proj, self.gate_up_proj_scale = frozen(gate_up.codes), frozen(gate_up.block_scale)
        self.gate_decode_scale, self.up_decode_scale = (frozen(s) for s in gate_up.decode_scale.unbind(1))
        self.down_proj, self.down_proj_scale, self.down_decode_scale = map(frozen, down)

    @classmethod
    def from_float(cls, gate_up: Tensor, down: Tensor, activation_format: str = "bf16", scale_on: str = "output") -> NVFP4Experts:
        """gate_up float[E, 2I, H], down float[E, H, I] -> the module with both quantized, bit for bit as nvidia-modelopt does."""
        return cls(quantize_gate_up(gate_up), quantized(down), activation_format, scale_on)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens in all."""
        return torch.ops.fusion_moe.expert_mlp(
            hidden_states, top_k_index, top_k_weights,
            self.gate_up_proj, self.gate_up_proj_scale, torch.stack([self.gate_decode_scale, self.up_decode_scale], 1),
            self.down_proj, self.down_proj_scale, self.down_decode_scale,
            scale_on=self.scale_on, activation_format=self.activation_format, weight_layout=self.weight_layout,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """For print(model)."""
        experts, rows, packed = self.gate_up_proj.shape
        sizes = f"experts={experts}, hidden={NVFP4.elements(packed)}, intermediate={rows // 2}"
        scale_on = "" if self.scale_on == "output" else f", scale_on={self.scale_on!r}"
        return f"{sizes}, activation_format={self.activation_format!r}, weight_layout={self.weight_layout!r}{scale_on}"


def quantize_gate_up(gate_up: Tensor) -> Quantized:
    """gate_up float[E, 2I, H], gate above up -> nvfp4[E, 2I, H] with decode scales [E, 2]: gate and up keep their own."""
    experts, rows, hidden = gate_up.shape
    codes, block_scale, decode_scale = quantized(gate_up.reshape(experts, 2, rows // 2, hidden))
    return Quantized(codes.flatten(1, 2), block_scale.flatten(1, 2), decode_scale)
