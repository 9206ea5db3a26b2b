"""Experts with any activation: a model's own function between two grouped products, and its norm
after them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...definitions.operations import restored
from ...encodings import Quantized, as_plain_tensors
from .. import checks
from ..gate_up import interleave
from .projections import Projections

ops = torch.ops.fusion_moe
# rows [M, K] sorted by expert, and the ends of the experts' runs -> [M, N]
Product = Callable[[Tensor, Tensor], Tensor]


def in_steps(
    function: Any,
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    groups: int,
    up: Product,
    down: Product,
    first_expert: int | None = None,
) -> Tensor:
    """x [T, H], ids int[T, k], w [T, k] -> [T, H], by the separate operations that make up
    `fused_experts`, around a module's own function.

    function: a module that follows transformers' `use_experts_implementation`: it has
    `_apply_gate`, or `act_fn` without a gate, and perhaps `post_expert_norm`. first_expert: as in
    `fused_experts`. torch.compile(backend="fusion_moe") fuses the function into the products.
    """
    checks.need_slots(x, ids, w, type(function).__name__)
    ends, row_of, slot_of = ops.route(ids, groups, first_expert=first_expert)
    y = up(x[row_of], ends)
    y = down(function._apply_gate(y) if function.has_gate else function.act_fn(y), ends)
    if getattr(function, "has_post_expert_norm", False):
        y = function.post_expert_norm(y)
        # the norm of rows past the last end need not be zero
        w = w.masked_fill(slot_of >= ends[-1], 0)
    return ops.combine(y, slot_of, w)


class CustomExperts(Projections):
    """E experts of MLPs with any activation: norm(down(function(up(x)))), summed over a token's
    experts with the router's weights.

    function: the model's module that computed this, without its parameters. Its submodules (an
    activation, a norm) become this module's, under the same names.
    """

    function: Any

    def __init__(
        self,
        up: Quantized,
        down: Quantized,
        function: nn.Module,
        activation_format: str = "bf16",
        *,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ):
        """up [E, 2I, H], gate above up, or [E, I, H] if the function has no gate; down [E, H, I],
        of one encoding.
        """
        super().__init__(bool(function.has_gate), up, down, activation_format, up_bias, down_bias)
        for name, module in function.named_children():
            self.add_module(name, module)
        kept = copy.copy(function)
        kept._parameters, kept._modules = {}, self._modules
        self.__dict__["function"] = kept  # not a submodule: its submodules are this module's

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]; T tokens
        in all.

        ShapeError, DtypeError or DeviceError for arguments that do not fit, before anything is
        computed.
        """
        with as_plain_tensors():
            self.order()
            where = type(self).__name__
            checks.need_narrow_rows("hidden_states", hidden_states, self.shape_of("down")[1], where)
            checks.need_device("the weights", self.down_proj, hidden_states.device, where)
            x = hidden_states.reshape(-1, hidden_states.shape[-1])
            y = in_steps(
                self.function,
                x,
                top_k_index,
                top_k_weights,
                len(self.down_proj),
                self._up,
                partial(self._biased_product, "down"),
                self.first_expert,
            )
            return restored(y.to(x.dtype), hidden_states.shape[:-1])

    def _up(self, rows: Tensor, ends: Tensor) -> Tensor:
        y = self._biased_product(self.projections[0], rows, ends)
        interleaved = self.function.has_gate and not self.function.is_concatenated
        return interleave(y, 1, -1) if interleaved else y

    def _biased_product(self, projection: str, rows: Tensor, ends: Tensor) -> Tensor:
        y = self._product(projection, rows, ends)
        bias = self._bias(projection, y)
        return y if bias is None else ops.group_add(y, bias, ends)

    def extra_repr(self) -> str:
        """What print(model) shows of the module."""
        return f"{super().extra_repr()}, function={type(self.function).__name__}"
