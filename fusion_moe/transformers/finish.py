"""The last steps of loading a model, after its parameters were read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..checkpoints.fp8 import check_fp8_scales
from ..encodings import check_part_scales
from ..errors import NonFiniteError
from ..nn import NVFP4Linear
from ..nn.frozen import place_
from ..nn.packed import PackedModule
from ..nn.projections import Projections
from .eight_bit import EightBitLinear
from .replacements import LINEAR


def cast_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters to the dtypes that the model had before. Before 5.21, transformers does not do so if anything is quantized."""
    for name, module in model.named_modules():
        for key, p in [] if isinstance(module, PackedModule) else module.named_parameters(name, recurse=False):
            p.data = p.data.to(dtypes.get(key, p.dtype))


def check_scales(model: nn.Module) -> None:
    """NonFiniteError, with the module's name, for scales of encoded weights that no quantizer writes."""
    for name, module in model.named_modules():
        try:
            if isinstance(module, EightBitLinear):
                check_fp8_scales(module.weight_scale.detach(), "weight_scale")
            elif isinstance(module, (Projections, NVFP4Linear)):
                for keys in (LINEAR,) if isinstance(module, NVFP4Linear) else module.part_names.values():
                    for part, key in zip(module.encoding.parts, keys, strict=True):
                        check_part_scales(part, getattr(module, key).detach(), key)
        except NonFiniteError as error:
            raise error.at(name) from None


def freeze_(model: nn.Module) -> None:
    """Freezes encoded weights and puts them on large pages: transformers makes every float require a gradient, even block scales."""
    for module in model.modules():
        if isinstance(module, PackedModule):
            for p in module.parameters(recurse=False):
                p.requires_grad_(False)
            place_(module)
