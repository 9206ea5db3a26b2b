"""The experts of a mixture-of-experts layer, gate, up and down projections in NVFP4."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from ..formats import NVFP4, Quantized, decode_scale_of, quantize


class NVFP4Experts(nn.Module):
    """E experts of SwiGLU: down(silu(gate(x)) * up(x)), summed over a token's experts with the router's weights.

    H hidden, I intermediate features. Frozen parameters, gate above up in the rows of gate_up_proj:

        gate_up_proj        uint8          [E, 2I, H/2]    two codes a byte, low nibble first
        gate_up_proj_scale  float8_e4m3fn  [E, 2I, H/16]   linear order
        gate_decode_scale, up_decode_scale  float32 [E]    multipliers: gate and up keep their own
        down_proj, down_proj_scale, down_decode_scale      the same for [E, H, I]

    activation_format: "bf16", activations as they come in, or "nvfp4", quantized too (compute capability 10.0 only).
    """

    def __init__(self, gate_up: Quantized, down: Quantized, activation_format: str = "bf16"):
        """gate_up nvfp4[E, 2I, H] with decode scales [E, 2], down nvfp4[E, H, I] with decode scales [E]."""
        super().__init__()
        experts, rows, hidden = gate_up.shape
        if rows % 2 or down.shape != (experts, hidden, rows // 2):
            raise ShapeError(f"gate_up {list(gate_up.shape)} and down {list(down.shape)}", expected="[E, 2I, H] and [E, H, I]")
        self.activation_format = activation_format
        self.weight_layout = "linear"
        self.gate_up_proj, self.gate_up_proj_scale = _frozen(gate_up.codes), _frozen(gate_up.block_scale)
        self.gate_decode_scale, self.up_decode_scale = (_frozen(s) for s in gate_up.decode_scale.unbind(1))
        self.down_proj, self.down_proj_scale, self.down_decode_scale = map(_frozen, down)

    @classmethod
    def from_float(cls, gate_up: Tensor, down: Tensor, activation_format: str = "bf16") -> NVFP4Experts:
        """gate_up float[E, 2I, H], down float[E, H, I] -> the module with both quantized, bit for bit as nvidia-modelopt does."""
        experts, rows, hidden = gate_up.shape
        halves = decode_scale_of(gate_up.reshape(experts, 2, rows // 2, hidden))
        return cls(quantize(gate_up, halves), quantize(down), activation_format)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens in all."""
        return torch.ops.fusion_moe.expert_mlp(
            hidden_states, top_k_index, top_k_weights,
            self.gate_up_proj, self.gate_up_proj_scale, torch.stack([self.gate_decode_scale, self.up_decode_scale], 1),
            self.down_proj, self.down_proj_scale, self.down_decode_scale,
            activation_format=self.activation_format, weight_layout=self.weight_layout,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: codes and scales."""
        return sum(p.numel() * p.element_size() for p in self.parameters(recurse=False))

    def extra_repr(self) -> str:
        """For print(model)."""
        experts, rows, packed = self.gate_up_proj.shape
        sizes = f"experts={experts}, hidden={NVFP4.elements(packed)}, intermediate={rows // 2}"
        return f"{sizes}, activation_format={self.activation_format!r}, weight_layout={self.weight_layout!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4Experts:
        """model.to(torch.bfloat16) and its like move the weights and leave their bytes: a cast would change what they mean."""

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def _frozen(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t.contiguous(), requires_grad=False)
