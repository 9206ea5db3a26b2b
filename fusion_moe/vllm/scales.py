"""Checks of the values of scales that vLLM loaded, which vLLM does not check."""

from __future__ import annotations

from ..checkpoints.values import LARGEST
from ..encodings import Quantized, check_part_scales
from ..errors import CheckpointError, NonFiniteError


def check_scales(where: str, **weights: Quantized) -> None:
    """NonFiniteError for scales of weights that no quantizer writes, with their names;
    CheckpointError for decode scales that are the wrong way round. where: the layer.
    """
    for name, weight in weights.items():
        for part, tensor in weight.named():
            try:
                check_part_scales(part, tensor, f"{name}'s {part.name}")
            except NonFiniteError as error:
                raise error.at(where) from None
            if part.of_matrix and (largest := tensor.max().item()) > LARGEST:
                found = f"{name}'s {part.name} makes the largest weight {2688 * largest:.4g}"
                raise CheckpointError(
                    found,
                    expected="at most 2688",
                    todo="divisors and multipliers are swapped in the files",
                    where=where,
                )
