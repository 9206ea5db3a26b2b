"""Checks of scales' values: numbers that no quantizer writes, and divisors in place of multipliers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..encodings import check_part_scales
from ..errors import CheckpointError, NonFiniteError
from ..progress import progress
from .directory import Directory
from .fp8 import check_fp8_scales
from .schemes import StoredPart
from .stored import StoredWeight

_LARGEST = 1.0  # the largest plausible multiplier: the largest weight is then 2688. Divisors are 2688 / amax.


def check_scales(directory: Directory, weights: Mapping[str, StoredWeight]) -> None:
    """Reads all scales. CheckpointError, with file, tensor, found and expected, for scales that are NaN, infinite or, but for those of
    integers, negative, and for a divisor.

    It is also raised if compressed-tensors records another shape than the codes have: they were padded, which is not undone.
    If a matrix's scale would make its largest weight exceed 2688, the scale is the wrong way round; no trained weight comes near that.
    """
    for weight in progress(weights.values(), "checking scales", len(weights)):
        for part in weight.scheme.parts[1:]:
            _check(weight, part, part.to_part(directory.read(weight.entries[part.part].name)))
        said = directory.tensors.get(f"{weight.name}.weight_shape")
        if said is not None and (shape := directory.read(said.name).tolist()) != [*weight.shape]:
            raise CheckpointError(f"{said.name}: {shape}", expected=f"{[*weight.shape]}, which the codes have", where=str(said.file))


def _check(weight: StoredWeight, part: StoredPart, scale: Tensor) -> None:
    entry = weight.entries[part.part]
    try:
        if weight.scheme.encoding is None:
            check_fp8_scales(scale, entry.name)
        else:
            (of_encoding,) = (p for p in weight.scheme.encoding.parts if p.name == part.part)
            check_part_scales(of_encoding, scale, entry.name)
    except NonFiniteError as error:
        raise CheckpointError(error.found, expected=error.expected, where=str(entry.file)) from None
    if part.direction is not None and scale.item() > _LARGEST:
        stored = part.direction.value
        found = f"{entry} as a {stored} makes the largest weight {2688 * scale.item():.4g}"
        todo = f"is it stored as a {'divisor' if stored == 'multiplier' else 'multiplier'}? {weight.scheme.name} has a {stored}"
        raise CheckpointError(found, expected="at most 2688", todo=todo, where=str(entry.file))
