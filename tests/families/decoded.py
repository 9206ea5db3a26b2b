"""What NVFP4 weights mean, by numpy and ml_dtypes, in a copy of the module or the model that they
were made from.
"""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from fusion_moe.nn import Llama4MoE


def decoded(state: dict[str, Tensor], name: str) -> Tensor:
    """The projection `name` of a state dict -> f32[E, N, K]."""
    codes = state[f"{name}_proj"].numpy()
    experts, rows, _ = codes.shape
    numbers = (
        np.stack([codes & 15, codes >> 4], -1)
        .reshape(experts, rows, -1, 16)
        .view(ml_dtypes.float4_e2m1fn)
        .astype(np.float32)
    )
    block = (
        state[f"{name}_proj_scale"]
        .view(torch.uint8)
        .numpy()
        .view(ml_dtypes.float8_e4m3fn)
        .astype(np.float32)
    )
    matrix = state[f"{name}_decode_scale"].numpy().reshape(experts, -1)
    step = block * np.repeat(matrix, rows // matrix.shape[1], 1)[..., None]
    return torch.from_numpy((numbers * step[..., None]).reshape(experts, rows, -1))


def meant(made: nn.Module, original: nn.Module) -> nn.Module:
    """A copy of a module of experts with the weights that its replacement has."""
    other, state = copy.deepcopy(original), made.state_dict()
    is_llama4 = not hasattr(original, "is_transposed")
    transposed, concatenated = (
        (True, True) if is_llama4 else (original.is_transposed, original.is_concatenated)
    )
    name = "gate_up" if hasattr(original, "gate_up_proj") else "up"
    up = decoded(state, name)
    if not concatenated:
        up = torch.stack(up.chunk(2, 1), 2).flatten(1, 2)  # rows of gate and up interleaved
    for key, weight in ((f"{name}_proj", up), ("down_proj", decoded(state, "down"))):
        parameter = getattr(other, key)
        assert parameter.shape == (weight.mT if transposed else weight).shape
        parameter.data = (weight.mT if transposed else weight).to(parameter.dtype)
    return other


def plain_model(made: nn.Module, original: nn.Module) -> nn.Module:
    """A copy of a model with the weights that its quantized copy has."""
    other = copy.deepcopy(original)
    for name, module in made.named_modules():
        if isinstance(module, Llama4MoE):
            name, module = f"{name}.experts", module.experts
        if hasattr(module, "down_decode_scale"):
            other.set_submodule(name, meant(module, original.get_submodule(name)))
    return other


def relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return ((got - want).norm() / want.norm()).item()
