"""Checks of scales' values: numbers that no quantizer writes, and divisors in place of
multipliers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..encodings import check_matrix_scales, check_part_scales
from ..errors import CheckpointError, NonFiniteError
from ..messages.progress import progress
from .directory import Directory
from .headers import Read
from .schemes import Direction, Scheme, StoredPart
from .stored import StoredWeight

# the largest plausible multiplier: divisors are 2688 / amax of NVFP4, and 448 / amax of FP8
LARGEST = 1.0


def check_scales(directory: Directory, weights: Mapping[str, StoredWeight]) -> None:
    """Reads all scales. CheckpointError, with file, tensor, found and expected, for scales that are
    NaN, infinite or, but for those of integers, negative, and for a divisor.

    It is also raised if compressed-tensors records another shape than the codes have (they were
    padded, which is not undone), and as from `StoredWeight.check_fixed`. If a scale would make the
    largest weight exceed 2688 (FP8: 448), it is the wrong way round; no trained weight comes near
    that.
    """
    for weight in progress(weights.values(), "checking scales", len(weights)):
        check_weight(directory.read, weight)


def check_weight(read: Read, weight: StoredWeight, columns: bool = True) -> None:
    """`check_scales` of one weight. columns: as `StoredWeight.check_fixed` has it."""
    entries = [weight.entries[part.part] for part in weight.scheme.parts]
    tensors = (read(entry.name) for entry in entries)
    n = weight.shape[-2]
    parts = (part.to_part(t, n=n) for part, t in zip(weight.scheme.parts, tensors, strict=True))
    file = str(entries[-1].file)
    try:
        check_scales_of(weight.scheme, parts, weight.name)
    except CheckpointError as error:
        raise error.at(file) from None
    except NonFiniteError as error:
        raise CheckpointError(error.found, expected=error.expected, where=file) from None
    weight.check_fixed(read, columns)


def check_scales_of(scheme: Scheme, parts: Iterable[Tensor], name: str) -> None:
    """`check_scale` of all scales among the parts of a weight of this name."""
    _, *scales = parts
    for part, t in zip(scheme.parts[1:], scales, strict=True):
        check_scale(scheme, part, t, name + part.suffix)


def check_scale(scheme: Scheme, part: StoredPart, scale: Tensor, name: str) -> None:
    """NonFiniteError for scales that no quantizer writes, CheckpointError for divisors in place of
    multipliers and the reverse.

    scale: as the encoding has it; name: for the message. Waits for the device.
    """
    if scheme.eight_bits or scheme.encoding is None:
        check_matrix_scales(
            scale.float(),
            name,
            expected="scales of 8-bit floats, amax / 448 each",
            todo="the file is damaged",
        )
    else:
        (of_encoding,) = (p for p in scheme.encoding.parts if p.name == part.part)
        check_part_scales(of_encoding, scale, name)
    if (scheme.eight_bits or part.direction is not None) and (
        largest := scale.float().max().item()
    ) > LARGEST:
        bound, stored = 448 if scheme.eight_bits else 2688, part.direction or Direction.MULTIPLIER
        (other,) = {*Direction} - {stored}
        raise CheckpointError(
            f"{name} as a {stored.value} makes the largest weight {bound * largest:.4g}",
            expected=f"at most {bound}",
            todo=f"is it stored as a {other.value}? {scheme.name} has a {stored.value}",
        )
