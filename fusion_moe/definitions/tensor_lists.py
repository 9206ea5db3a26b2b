"""Inputs in parts: the matrices of G groups as G tensors, which a program takes as one tensor [G,
...].

parts says for each input of a program how many tensors it is made of; 0 means one tensor,
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, ShapeError

PartCounts = Sequence[int]
Input = Tensor | tuple[Tensor, ...]


def grouped(tensors: Sequence[Tensor], parts: PartCounts | None) -> list[Input]:
    """The tensors of each input; parts None: each is one. ShapeError if they are fewer or more."""
    if parts is None:
        return list(tensors)
    count = sum([n or 1 for n in parts])
    if count != len(tensors):
        raise ShapeError(
            f"{len(tensors)} tensors", expected=f"{count}, for inputs of {list(parts)} parts"
        )
    inputs: list[Input] = []
    at = 0
    for n in parts:
        inputs.append(tuple(tensors[at : at + n]) if n else tensors[at])
        at += n or 1
    return inputs


def flat(inputs: Sequence[Input]) -> tuple[list[Tensor], list[int] | None]:
    """The tensors of all inputs as one list, and their parts; None if no input has parts."""
    parts = [len(t) if isinstance(t, tuple) else 0 for t in inputs]
    return list(
        chain.from_iterable(t if isinstance(t, tuple) else (t,) for t in inputs)
    ), parts if any(parts) else None


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """G tensors of one shape -> [G, ...]: a view where they are contiguous neighbours in one
    storage, else a copy.

    ShapeError, DtypeError or DeviceError if they differ.
    """
    first = tensors[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    for i, t in enumerate(tensors):
        if t.shape != shape:
            raise ShapeError(f"part {i} is {list(t.shape)}", expected=f"{list(shape)}, as part 0")
        if t.dtype != dtype:
            raise DtypeError(f"part {i} is {t.dtype}", expected=f"{dtype}, as part 0")
        if t.device != device:
            raise DeviceError(
                f"part {i} on {t.device}",
                expected=f"{device}, as part 0",
                todo="move it with .to(device)",
            )
    if are_neighbours(tensors):
        return first.as_strided(
            (len(tensors), *shape), (first.numel(), *first.stride()), first.storage_offset()
        )
    need_memory(tensors)  # torch.stack would read it
    return torch.stack(list(tensors))


def need_memory(tensors: Sequence[Tensor]) -> None:
    """ShapeError unless each tensor has strides, and a storage that holds all of its elements:
    kernels read addresses, and wrappers free parameters.
    """
    for i, t in enumerate(tensors):
        if t.layout != torch.strided:
            raise ShapeError(
                f"input {i} is {t.layout}", expected="torch.strided", todo="to_dense() makes it so"
            )
        held = t.untyped_storage().nbytes() - t.storage_offset() * t.itemsize
        if (t.is_contiguous() and t.nbytes <= held) or not t.numel():
            continue
        needed = t.itemsize * (
            1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        )
        if needed > held:
            raise ShapeError(
                f"input {i}, {t.dtype} {list(t.shape)}, needs {needed} bytes of a storage that "
                f"has {max(held, 0)} for it",
                expected="memory for all elements",
                todo="FSDP frees parameters after use: call the module that it wraps, and write "
                "over no view of its result",
            )


def are_neighbours(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape and dtype are contiguous, and each begins where the one before
    it ends, in the storage of the first.
    """
    first, step = tensors[0], tensors[0].nbytes
    storage, base = first.untyped_storage(), first.data_ptr()
    if not step or base + len(tensors) * step > storage.data_ptr() + storage.nbytes():
        return False
    return all(t.data_ptr() == base + i * step and t.is_contiguous() for i, t in enumerate(tensors))
