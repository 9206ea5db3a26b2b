"""The headers of safetensors files, which the safetensors package checks against the files' sizes;
and files of JSON.
"""

from __future__ import annotations

import json
import reprlib
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, printable

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
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. kind: the name of the file's own type, and size: the bytes there, if the
    tensor is made of it when it is read.
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


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file, in the order of their bytes. CheckpointError with file, found and
    expected if anything is wrong.
    """
    need_plain(file, "a file of safetensors")
    try:
        with safe_open(file, "pt"):
            pass
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    except (OSError, SafetensorError, ValueError) as error:
        expected, todo = "a whole file of safetensors", "download it again"
        raise CheckpointError(f"{error}", expected=expected, todo=todo, where=str(file)) from None
    header.pop("__metadata__", None)
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    return [_entry(name, header[name]["dtype"], header[name]["shape"], file) for name in names]


def _entry(name: str, dtype: str, shape: list[int], file: Path) -> Entry:
    if dtype not in DTYPES or prod(max(size, 1) for size in shape) >= MAX_BYTES // 8:
        raise CheckpointError(
            f"{name} of dtype {dtype} and shape {shown(shape)}",
            expected=f"one of {', '.join(DTYPES)}, within 2^63 bytes",
            where=str(file),
        )
    return Entry(name, DTYPES[dtype], tuple(shape), file)


def read_json(file: Path, expected: str = "a file of JSON") -> dict[str, Any]:
    """The JSON object in a plain file. CheckpointError for anything else."""
    if need_plain(file, expected) > _MAX_JSON:
        expected = f"{expected}, of at most {_MAX_JSON} bytes"
        raise CheckpointError("a larger file", expected=expected, where=str(file))
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not JSON: {error}", expected="an object of JSON", where=str(file)
        ) from None
    if not isinstance(value, dict):
        found = f"a {type(value).__name__}"
        raise CheckpointError(found, expected="an object of JSON", where=str(file))
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
        found = f"no plain file ({stat.filemode(status.st_mode)})"
        raise CheckpointError(found, expected=expected, where=str(file))
    return status.st_size


def shown(value: Any) -> str:
    """A value of JSON for a message, shortened."""
    return _SHORT.repr(value)
