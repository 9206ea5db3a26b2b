"""The headers of safetensors files, which the safetensors package checks against the files' sizes;
and files of JSON.
"""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError, in_one_line, printable

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_BYTES = 2**63  # torch computes strides in 64 bits, also those of a tensor without elements
_MAX_JSON = 100_000_000  # bytes, as of a header of safetensors
Read = Callable[[str], Tensor]  # a tensor by its name
Reads = dict[str, Callable[[], Tensor]]  # by the name of a tensor
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. kind, size: what the file calls its type, and its bytes there, if it is
    decoded when it is read.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    kind: str = ""
    size: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its data in the file."""
        return prod(self.shape) * self.dtype.itemsize if self.size is None else self.size

    def __str__(self) -> str:
        return (
            f"{printable(self.name)} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"
        )


class Unread:
    """A tensor that is read when it is indexed; it has what is used of safetensors' slices, and of
    tensors in state dicts.
    """

    def __init__(self, entry: Entry, read: Callable[[], Tensor]):
        self.dtype, self.shape, self._read = entry.dtype, entry.shape, read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]

    def get_shape(self) -> list[int]:
        """The shape, as safetensors' slices have it."""
        return [*self.shape]

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return DTYPE_NAMES[self.dtype]

    def is_floating_point(self) -> bool:
        """Whether the dtype is a float, as the method of a tensor."""
        return self.dtype.is_floating_point


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file, in the order of their bytes. CheckpointError with file, found and
    expected if anything is wrong.
    """
    need_plain(file, "a file of safetensors")
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        with file.open("rb") as bytes_of:
            json_of(bytes_of.read(int.from_bytes(bytes_of.read(8), "little")))
    # MemoryError: of safetensors, of a file that is larger than what may be mapped
    except (OSError, MemoryError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            in_one_line(error),
            expected="a whole file of safetensors",
            todo="download it again",
            where=str(file),
        ) from None
    return [_entry(name, t.get_dtype(), t.get_shape(), file) for name, t in slices.items()]


def _entry(name: str, dtype: str, shape: list[int], file: Path) -> Entry:
    if prod(max(size, 1) for size in shape) >= MAX_BYTES // 8:
        raise CheckpointError(
            f"{name} of shape {shown(shape)}", expected="less than 2^63 bytes", where=str(file)
        )
    if dtype not in DTYPES:  # but safetensors knows it
        raise UnsupportedError(
            f"{name} of dtype {dtype}",
            expected=f"one of {', '.join(DTYPES)}",
            todo="take the checkpoint in one of these, or in bfloat16, and quantize that",
            where=str(file),
        )
    return Entry(name, DTYPES[dtype], tuple(shape), file)


def read_json(file: Path, expected: str = "a file of JSON") -> dict[str, Any]:
    """The JSON object in a plain file. CheckpointError for anything else."""
    if need_plain(file, expected) > _MAX_JSON:
        raise CheckpointError(
            "a larger file", expected=f"{expected}, of at most {_MAX_JSON} bytes", where=str(file)
        )
    try:
        value = json_of(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not JSON: {in_one_line(error)}", expected="an object of JSON", where=str(file)
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"a {type(value).__name__}", expected="an object of JSON", where=str(file)
        )
    return value


def json_of(text: bytes) -> Any:
    """The value of a JSON text. ValueError also for an object with a key twice, of which readers
    take one or the other.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"{shown(key)} twice in an object")
        value[key] = item
    return value


def need_plain(file: Path, expected: str) -> int:
    """The size of a plain file, or of one that a link leads to. CheckpointError for others: reading
    a pipe or a device might never end.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{error.strerror}", expected=expected, where=str(file)) from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            f"no plain file ({stat.filemode(status.st_mode)})", expected=expected, where=str(file)
        )
    return status.st_size


def shown(value: Any) -> str:
    """A value of JSON for a message, shortened."""
    return _SHORT.repr(value)
