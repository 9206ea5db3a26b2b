"""The last steps of loading a model, after its parameters were read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..encodings import check_block_scales, check_matrix_scales
from ..errors import NonFiniteError
from ..nn.frozen import place_
from ..nn.packed import PackedModule


def cast_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters to the dtypes that the model had before. Before 5.21, transformers does not do so if anything is quantized."""
    for name, module in model.named_modules():
        for key, p in [] if isinstance(module, PackedModule) else module.named_parameters(name, recurse=False):
            p.data = p.data.to(dtypes.get(key, p.dtype))


def check_scales(model: nn.Module) -> None:
    """NonFiniteError, with the module's name, for scales of encoded weights that are NaN, infinite or negative."""
    for name, module in model.named_modules():
        for key, p in module._parameters.items() if isinstance(module, PackedModule) else ():
            try:
                if p is not None and p.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
                    check_block_scales(p.detach(), key)
                elif p is not None and key.endswith(("decode_scale", "weight_scale_2")):
                    check_matrix_scales(p.detach(), key)
            except NonFiniteError as error:
                raise error.at(name) from None


def freeze_(model: nn.Module) -> None:
    """Freezes encoded weights and puts them on large pages: transformers makes every float require a gradient, even block scales."""
    for module in model.modules():
        if isinstance(module, PackedModule):
            for p in module.parameters(recurse=False):
                p.requires_grad_(False)
            place_(module)
