"""Linear layers with NVFP4 weights over groups of rows that are already sorted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...definitions.operations import restored
from ...encodings import NVFP4, Quantized, as_plain_tensors
from ...errors import Error, ShapeError
from .. import checks
from .adaptable import AdaptableModule
from .experts import quantize_gate_up
from .weight import rounded


class NVFP4GroupedLinear(AdaptableModule):
    """G linear layers, each on its own run of rows: for row r of group g, weight[g] @ row +
    bias[g].

    N out-features, K in-features. Parameters, all frozen except the bias:

        weight               uint8          [G, N, K/2]    two codes a byte, low nibble first
        weight_scale         float8_e4m3fn  [G, N, K/16]   linear order
        weight_decode_scale  float32        [G] or [G, S]  multipliers, one for each matrix or each
                                                           of S equal runs of its rows
        bias                 float          [G, N]         or None

    An optional submodule weight_lora is an adapter that trains (lora/).

    Args:
        weight: nvfp4 [G, N, K].
        bias: float [G, N], or None.
        activation_format: "bf16", activations as they come in; or quantized too: "nvfp4" (compute
            capability 10.0 only) or "int8" (CPUs only).

    Raises:
        ShapeError: for a weight or bias of another shape.
        OptionError: for another activation_format.
    """

    castable = ("bias",)
    projections = ("weight",)
    targets = ("linear",)
    # whether offs are the first rows of groups, as the module it replaces had them: i32[G], or
    # i32[G + 1] with the end of the last group behind them
    starts = False
    bias: nn.Parameter | None

    def __init__(
        self, weight: Quantized, bias: Tensor | None = None, activation_format: str = "bf16"
    ):
        super().__init__(activation_format)
        if len(weight.shape) != 3 or (bias is not None and bias.shape != weight.shape[:2]):
            of_bias = "" if bias is None else f" and bias {list(bias.shape)}"
            raise ShapeError(
                f"weight {list(weight.shape)}{of_bias}",
                expected="[G, N, K] and [G, N]",
                where=type(self).__name__,
            )
        self.hold("weight", ("weight", "weight_scale", "weight_decode_scale"), weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        bias: Tensor | None = None,
        activation_format: str = "bf16",
        scales: str = "max",
    ) -> NVFP4GroupedLinear:
        """weight float[G, N, K], bias float[G, N] -> the module, its weight quantized, by "max" bit
        for bit as nvidia-modelopt does. scales: as in `NVFP4Config`.
        """
        result = cls(rounded(weight, NVFP4, scales=scales), bias, activation_format)
        result.scales = scales
        return result

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """x [..., K] whose rows are sorted by group, offs i32[G] where the runs end -> [..., N];
        zeros for rows at or past offs[-1].
        """
        with as_plain_tensors():
            self.order()
            if self.starts:
                offs = torch.cat([offs[1:], offs.new_full((1,), x.shape[:-1].numel())])
                offs = offs[: self.shape_of("weight")[0]]
            if padding := self.forms["weight"].padding:
                checks.need_rows("x", x, padding.shape[1], type(self).__name__)
            try:
                y = self._product("weight", x, offs)
            except Error as error:  # whose message has the operation's argument names
                raise error.at(f"{type(self).__name__}, whose x is a") from None
            if self.bias is None:
                return y
            rows = y.reshape(-1, y.shape[-1])
            return restored(
                torch.ops.fusion_moe.group_add(rows, self.bias.to(y.dtype), offs), y.shape[:-1]
            )

    def extra_repr(self) -> str:
        """For print(model)."""
        groups, n, k = self.shape_of("weight")
        return (
            f"groups={groups}, in_features={k}, out_features={n}, bias={self.bias is not None}, "
            f"activation_format={self.activation_format!r}, weight_layout={self.weight_layout!r}"
        )


class GroupedSwiGLU(nn.Module):
    """G SwiGLU layers on runs of rows: down(silu(gate(x)) * up(x)).

    gate_up_proj: an NVFP4GroupedLinear with gate above up in its rows, one product for both;
    down_proj: an NVFP4GroupedLinear. Adapters belong to these two submodules, under the targets
    "gate_up" and "down".
    """

    def __init__(self, gate_up: NVFP4GroupedLinear, down: NVFP4GroupedLinear):
        super().__init__()
        groups, rows, _ = gate_up.shape_of("weight")
        down_groups, _, inner = down.shape_of("weight")
        if groups != down_groups or rows != 2 * inner:
            raise ShapeError(
                f"gate_up ({gate_up.extra_repr()}) and down ({down.extra_repr()})",
                expected="[G, 2I, H] and [G, H, I]",
            )
        self.gate_up_proj, self.down_proj = gate_up, down
        gate_up.targets, down.targets = ("gate_up",), ("down",)

    @classmethod
    def from_float(
        cls,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        activation_format: str = "bf16",
        scales: str = "max",
    ) -> GroupedSwiGLU:
        """gate, up float[G, I, H], down float[G, H, I] -> the module with all three quantized, each
        with its own scales. scales: as in `NVFP4Config`.
        """
        gate_up = NVFP4GroupedLinear(
            quantize_gate_up(torch.cat([gate, up], 1), scales), None, activation_format
        )
        gate_up.scales = scales
        return cls(gate_up, NVFP4GroupedLinear.from_float(down, None, activation_format, scales))

    def forward(self, hidden_states: Tensor, offs: Tensor) -> Tensor:
        """hidden_states [..., H] whose rows are sorted by group, offs i32[G] where the runs end ->
        [..., H]
        """
        return self.down_proj(
            torch.ops.fusion_moe.scaled_swiglu(self.gate_up_proj(hidden_states, offs)), offs
        )
