"""Checks of the values of scales that vLLM loaded, which vLLM does not check."""

from __future__ import annotations

from ..encodings import Quantized, check_part_scales
from ..errors import NonFiniteError


def check_scales(where: str, **weights: Quantized) -> None:
    """NonFiniteError for scales of weights that no quantizer writes, with their names. where: the layer."""
    for name, weight in weights.items():
        for part, tensor in weight.named():
            try:
                check_part_scales(part, tensor, f"{name}'s {part.name}")
            except NonFiniteError as error:
                raise error.at(where) from None
