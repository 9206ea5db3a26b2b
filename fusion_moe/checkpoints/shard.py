"""Writes one safetensors file, tensor by tensor: first the header, since dtypes and shapes are
known, then the result of each step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..messages.progress import progress
from .headers import DTYPE_NAMES


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's data."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Step:
    """Some tensors that are made together: their plan, and the function that makes them, by
    name.
    """

    planned: tuple[Planned, ...]
    make: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that the step writes."""
        return sum(planned.nbytes for planned in self.planned)


def write_shard(path: Path, steps: Sequence[Step]) -> None:
    """Writes a file and syncs it to disk. Holds one step's tensors in memory at a time. OSError if
    the disk is full.
    """
    with path.open("wb") as file:
        file.write(_header(steps))
        for step in progress(steps, "writing tensors", len(steps), [step.nbytes for step in steps]):
            tensors = step.make()
            for planned in step.planned:
                file.write(_bytes(tensors[planned.name], planned))
        file.flush()
        os.fsync(file.fileno())


def shard_bytes_of(steps: Sequence[Step]) -> int:
    """Bytes of the file that `write_shard` writes."""
    return len(_header(steps)) + sum(step.nbytes for step in steps)


def _header(steps: Sequence[Step]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for planned in (p for step in steps for p in step.planned):
        start, end = end, end + planned.nbytes
        header[planned.name] = {
            "dtype": DTYPE_NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _bytes(t: Tensor, planned: Planned) -> memoryview:
    assert (t.dtype, tuple(t.shape)) == (planned.dtype, planned.shape), (
        f"{planned} is {t.dtype} {list(t.shape)}"
    )
    array: Any = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
