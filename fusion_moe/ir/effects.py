"""Checks of the tensors into which the outputs of a program are written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from ..errors import ShapeError, UnsupportedError


def check_targets(targets: Sequence[torch.Tensor]) -> None:
    """Raises, before anything is computed, if tensors cannot be written. targets: one for each
    output.

    UnsupportedError for a tensor that autograd tracks, ShapeError for elements that share memory.
    """
    for i, t in enumerate(targets):
        if t.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"output {i} over a tensor that requires a gradient",
                expected="one that does not",
                todo="call it under torch.no_grad()",
                where="fusion",
            )
        if any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True)):
            raise ShapeError(
                f"output {i} over a tensor of shape {list(t.shape)} and strides {list(t.stride())}",
                expected="memory of its own for each element",
                todo="write over a .contiguous() copy",
                where="fusion",
            )
    for (i, a), (j, b) in combinations(enumerate(targets), 2):
        if overlap(a, b):
            raise ShapeError(
                f"outputs {i} and {j} over tensors that overlap",
                expected="memory of its own for each",
                where="fusion",
            )


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory ranges of two tensors, from their first to their last elements,
    overlap.
    """
    (first_a, end_a), (first_b, end_b) = _range(a), _range(b)
    return _memory(a) == _memory(b) and first_a < end_b and first_b < end_a


def _range(t: torch.Tensor) -> tuple[int, int]:
    """The range of bytes in its storage: a tensor's first byte and the one after its last. The same
    number twice if it is empty.
    """
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return tuple(
        (t.storage_offset() + at) * t.element_size() for at in (0, last + 1 if t.numel() else 0)
    )  # type: ignore[return-value]
