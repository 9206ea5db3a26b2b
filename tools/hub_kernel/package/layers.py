"""Layers that `kernelize` puts in the place of experts which transformers'
`use_experts_implementation` decorates, of any family.
"""

from torch import Tensor, nn

from .experts import experts_forward


class NVFP4Experts(nn.Module):
    """hidden_states [T, H], top_k_index int[T, k], top_k_weights [T, k] -> [T, H], the weights
    rounded to NVFP4.
    """

    has_backward = False  # for the weights
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward("nvfp4", self, hidden_states, top_k_index, top_k_weights)


class MXFP4Experts(nn.Module):
    """The same in MXFP4."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward("mxfp4", self, hidden_states, top_k_index, top_k_weights)


class INT4Experts(nn.Module):
    """The same in INT4, groups of 32."""

    has_backward = False
    can_torch_compile = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward("int4", self, hidden_states, top_k_index, top_k_weights)
