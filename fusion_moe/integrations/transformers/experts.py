"""The experts of transformers' models, computed by our operations. The `use_experts_implementation`
decorator says how weights are stored.

Letters: T tokens, k experts a token, E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import recipe
from ...ir import dtype_name
from ...nn.conversion.traced_activation import activation_of
from ...nn.frozen import in_steps
from ...nn.local import local

ops = torch.ops.fusion_moe


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """hidden_states [T, H], top_k_index int[T, k], top_k_weights [T, k] -> [T, H], in the dtype of
    hidden_states.

    Computed in the weights' dtype, bf16, f16 or f32, or in autocast's, and by the recipe of
    `fusion_moe.autocast` if one is in force. With a pointwise activation they are the single
    operation `fused_experts`; any other function of the module runs between two grouped products.
    """
    up = _projection(module, "gate_up_proj" if module.has_gate else "up_proj")
    down = _projection(module, "down_proj")
    x, ids, w = hidden_states.to(up[0].dtype), top_k_index, top_k_weights
    # distributed.parallelize_ sets the first id; with transformers' plan ids begin at 0, and
    # experts of other ranks have the index E
    first_expert = getattr(
        module, "first_expert", 0 if getattr(module, "_is_expert_parallel", False) else None
    )
    normed = getattr(module, "has_post_expert_norm", False)
    activation = None if normed else activation_of(module, as_stored=True)
    if activation is None:
        products = partial(_grouped_linear, module, *up), partial(_grouped_linear, module, *down)
        return in_steps(module, x, ids, w, len(up[0]), *products, first_expert).to(
            hidden_states.dtype
        )
    (up_weight, up_bias), (down_weight, down_bias) = up, down
    y = ops.fused_experts(
        x,
        ids,
        w,
        [up_weight],
        [down_weight],
        up_bias,
        down_bias,
        activation=activation,
        weight_format=dtype_name(up_weight.dtype),
        transposed=module.is_transposed,
        activation_format=recipe.activation_format(),
        first_expert=first_expert,
        **(module.exchanged.arguments() if hasattr(module, "exchanged") else {}),
    )
    return y.to(hidden_states.dtype)


def _projection(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias [E, N] of a projection."""
    bias = local(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local(getattr(module, name)), bias


def _grouped_linear(
    module: Any, weight: Tensor, bias: Tensor | None, a: Tensor, ends: Tensor
) -> Tensor:
    """a [T*k, K], sorted by expert -> [T*k, N]"""
    y = ops.grouped_mm(
        a,
        [weight],
        ends,
        weight_format=dtype_name(weight.dtype),
        transposed=module.is_transposed,
        activation_format=recipe.activation_format(),
    )
    return y if bias is None else ops.group_add(y, bias, ends)
