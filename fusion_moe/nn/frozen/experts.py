"""The experts of a mixture-of-experts layer as one operation, with any pointwise activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...encodings import NVFP4, Quantized, as_plain_tensors
from ...errors import Error, ShapeError, need_one_of
from ...ir.activation import read, swiglu
from ...layouts import Layout, Padding, ceil_to
from .. import checks
from .projections import Projections
from .weight import rounded


class Experts(Projections):
    """E experts of MLPs: down(activation(gate_up(x))), summed over a token's experts with the
    router's weights.

    Computed by one operation, `fused_experts`. activation: the text of a program (`activation`,
    `swiglu`); None: silu(gate) * up, gate above up in the rows of gate_up_proj. One of a single
    part takes up_proj [E, I, H] in place of gate_up_proj [E, 2I, H]. activation_parameters: float
    [E, P, I] or [E, P, 1], if the activation has P parameters of each expert; frozen, unless
    `requires_grad_` says otherwise. scale_on: what the router's weights multiply, the "output" of
    experts or, as in Llama-4, their "input".
    """

    gate_up_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    activation_parameters: nn.Parameter | None

    def __init__(
        self,
        gate_up: Quantized,
        down: Quantized,
        activation_format: str = "bf16",
        scale_on: str = "output",
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str | None = None,
        activation_parameters: Tensor | None = None,
    ):
        """gate_up [E, 2I, H] and down [E, H, I] in one encoding, optionally with per-matrix scales
        of shapes [E, 2] and [E].
        """
        program = read(activation)
        gated = program.parts == 2
        super().__init__(gated, gate_up, down, activation_format, gate_up_bias, down_bias)
        need_one_of("scale_on", scale_on, ("output", "input"), where=type(self).__name__)
        self.scale_on = scale_on
        self.activation = None if activation == swiglu() else activation
        self.activation_parameters = _parameters(activation_parameters, program.parameters, down)

    @property
    def interleave(self) -> int:
        """In the rows of gate_up_proj, 0: gate above up; n: blocks of n rows alternate."""
        return read(self.activation).interleave

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        adapters: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens
        in all. adapters: arguments of `fused_experts`, in place of the module's own adapters.
        """
        with as_plain_tensors():
            self.order()
            up, down = self.projections
            of_gate_up, of_down = self.forms[up].padding, self.forms[down].padding
            if of_gate_up and of_gate_up.padded[1] != of_gate_up.shape[1]:
                checks.need_rows(
                    "hidden_states", hidden_states, of_gate_up.shape[1], type(self).__name__
                )
                hidden_states = of_gate_up.pad_columns(hidden_states)
            arguments, of_fp8 = self._arguments(hidden_states), False
            if self.reading is not None or self.activation_format == "fp8":
                rows = top_k_index.numel()
                if adapters and "capacity" in adapters:  # ranks send each other what products read
                    rows = int(adapters["capacity"]) * top_k_index.shape[-1] or rows
                of_fp8 = self._requantized(rows)
                arguments |= self._format(of_fp8)
            if adapters:
                arguments |= adapters
            try:
                y = torch.ops.fusion_moe.fused_experts(
                    hidden_states,
                    top_k_index,
                    top_k_weights,
                    self._operand(up, of_fp8),
                    self._operand(down, of_fp8),
                    **arguments,
                )
            except Error as error:  # whose message has the operation's argument names
                raise error.at(
                    f"{type(self).__name__}, whose hidden_states, top_k_index and "
                    "top_k_weights are x, ids and w"
                ) from None
            return of_down.cut_rows(y) if of_down else y

    def _arguments(self, like: Tensor) -> dict[str, Any]:
        """The arguments after the weights that differ from the operation's defaults: each argument
        passed takes torch 0.3 us.
        """
        usual = (  # a local, since a tracer guards each value of a global tuple
            ("activation", None),
            ("scale_on", "output"),
            ("activation_format", "bf16"),
            ("first_expert", None),
        )
        found = {
            name: value for name, default in usual if (value := getattr(self, name)) != default
        }
        form = self.forms[self.projections[0]]
        found["weight_format"] = form.encoding.name
        if form.layout != "linear":
            found["weight_layout"] = form.layout
        for name, projection in zip(("gate_up", "down"), self.projections, strict=True):
            if (bias := self._bias(projection, like)) is not None:
                found[f"{name}_bias"] = bias
        if (more := self.activation_parameters) is not None:
            padding = self.forms["down"].padding if more.shape[-1] > 1 else None
            found["activation_parameters"] = padding.pad_columns(more) if padding else more
        if (self._modules or self.wrappers) and self.adapted:
            found |= self._lora()
        return found

    def _lora(self) -> dict[str, Any]:
        """The arguments that adapters are."""
        found: dict[str, Any] = {"lora_scale": (scale := self._lora_scale)}
        for name, projection in zip(("gate_up", "down"), self.projections, strict=True):
            found[f"{name}_lora_a"], found[f"{name}_lora_b"] = self._factors(projection, scale)
        return found

    def padding(self, weight: str, layout: Layout) -> Padding:
        """The padding that makes a weight [N, K] whole tiles of a layout. The intermediate features
        are padded alike in both projections, to tiles of the one that contracts them.
        """
        n, k = self.matrix_shape(weight)
        _, columns = layout.tile
        if weight == "down":
            return Padding((n, k), (ceil_to(n, columns), ceil_to(k, columns)))
        parts = read(self.activation).parts
        rows = parts * ceil_to(n // parts, columns)
        return Padding((n, k), (rows, ceil_to(k, columns)), 1 if self.interleave else parts)

    def why_not(self, layout: Layout) -> str:
        """As in `PackedModule`; alternating blocks of gate and up rows are padded by whole
        blocks.
        """
        padding = self.padding(self.projections[0], layout)
        if self.interleave and padding.padded[0] // 2 % self.interleave:
            return (
                f"{padding.padded[0] // 2} features, which tiles need, are no whole blocks of "
                f"{self.interleave}"
            )
        return super().why_not(layout)

    def _bias(self, projection: str, like: Tensor) -> Tensor | None:
        """The bias of a projection in the dtype of activations, padded like its weight."""
        bias, padding = super()._bias(projection, like), self.forms[projection].padding
        return bias if bias is None or padding is None else padding.pad_rows(bias)

    def extra_repr(self) -> str:
        """For print(model)."""
        scale_on = "" if self.scale_on == "output" else f", scale_on={self.scale_on!r}"
        formula = f", activation={read(self.activation).formula!r}" if self.activation else ""
        return super().extra_repr() + scale_on + formula


def _parameters(given: Tensor | None, count: int, down: Quantized) -> nn.Parameter | None:
    """The parameters of an activation that has `count` of each expert."""
    shapes = [[down.shape[0], count, n] for n in (down.shape[2], 1)] if count else [None]
    found = None if given is None else [*given.shape]
    if found not in shapes:
        raise ShapeError(
            f"activation_parameters {found}",
            expected=" or ".join(map(str, shapes)),
            todo="" if count else "the activation reads no parameters",
            where="Experts",
        )
    return None if given is None else nn.Parameter(given.detach().clone(), requires_grad=False)


class NVFP4Experts(Experts):
    """`Experts` in NVFP4, which `from_float` and `quantize_` make. Codes are uint8 gate_up_proj [E,
    2I, H/2] and down_proj [E, H, I/2], scales of blocks e4m3 [E, 2I, H/16] and [E, H, I/16].
    """

    @classmethod
    def from_float(
        cls,
        gate_up: Tensor,
        down: Tensor,
        activation_format: str = "bf16",
        scale_on: str = "output",
        scales: str = "max",
    ) -> NVFP4Experts:
        """gate_up float[E, 2I, H], down float[E, H, I] -> the module with both quantized, by "max"
        bit for bit as nvidia-modelopt does. scales: as in `NVFP4Config`. ShapeError unless H and I
        are multiples of 16.
        """
        weights = quantize_gate_up(gate_up, scales), rounded(down, NVFP4, scales=scales)
        made = cls(*weights, activation_format, scale_on)
        made.scales = scales
        return made


def quantize_gate_up(gate_up: Tensor, scales: str = "max") -> Quantized:
    """gate_up float[E, 2I, H], gate above up -> nvfp4[E, 2I, H] with decode scales [E, 2]: one for
    gate and one for up.
    """
    if gate_up.ndim != 3 or gate_up.shape[1] % 2:
        raise ShapeError(
            f"gate_up {list(gate_up.shape)}",
            expected="[E, 2I, H], gate above up",
            where="NVFP4Experts",
        )
    return rounded(gate_up, NVFP4, 2, scales=scales)
