"""The header of a safetensors file, checked against the file's size before any data are read.

A file consists of 8 bytes, the length of the header; the header, JSON with dtype, shape, first and
last byte of each tensor; and the bytes of all tensors, without gaps. Source: the format's
description in the safetensors repository.
"""

from __future__ import annotations

import contextlib
import json
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

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
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package
# more is no checkpoint, and would take time, memory or stack
_MAX_NAME, _MAX_DIMENSIONS, _MAX_NESTED = 1000, 64, 32
# of a tensor: torch computes strides in 64 bits, also those of a tensor without elements
_MAX_BYTES = 2**63 - 1
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{printable(self.name)} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"
        )


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file, in the order of their bytes. CheckpointError with file, tensor, found
    and expected if anything is wrong.
    """
    with opened(file, "a file of safetensors") as (data, size):
        length = int.from_bytes(data.read(8), "little")
        right = size >= 8 and 2 <= length <= min(_MAX_HEADER, size - 8)
        _check(
            right,
            file,
            f"{size} bytes with a header of {length}",
            "the length of a header, and the header",
        )
        text = data.read(length)
    entries, end = [], 0
    for start, stop, entry in sorted(_entries(text, file), key=lambda found: found[:2]):
        _check(
            start == end,
            file,
            f"{entry} begins at byte {start} of the data",
            f"{end}, where the one before it ends",
        )
        _check(
            stop - start == entry.nbytes,
            file,
            f"{entry} has {stop - start} bytes",
            f"{entry.nbytes} for its dtype and shape",
        )
        entries.append(entry)
        end = stop
    have = size - 8 - length
    _check(
        have == end,
        file,
        f"{have} bytes of data",
        f"{end} by its header",
        "it is truncated; download it again" if have < end else "",
    )
    return entries


def _entries(text: bytes, file: Path) -> list[tuple[int, int, Entry]]:
    """The first and last byte of each tensor, and its entry."""
    header = parse_json(text, file)
    metadata = header.pop("__metadata__", {})
    right = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    _check(right, file, f"__metadata__ {shown(metadata)}", "an object of strings")
    return [_entry(name, value, file) for name, value in header.items()]


def _entry(name: str, value: Any, file: Path) -> tuple[int, int, Entry]:
    _check(
        len(name) <= _MAX_NAME, file, f"a name of {len(name)} characters", f"at most {_MAX_NAME}"
    )
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (
        fields.get("dtype", ""),
        fields.get("shape", ()),
        fields.get("data_offsets", ()),
    )
    _check(
        isinstance(dtype, str) and dtype in DTYPES,
        file,
        f"{name} of dtype {shown(dtype)}",
        f"one of {', '.join(DTYPES)}",
    )
    right = (
        _counts(shape)
        and prod(max(size, 1) for size in shape) <= _MAX_BYTES // DTYPES[dtype].itemsize
    )
    _check(right, file, f"{name} of shape {shown(shape)}", "a list of sizes, within 2^63 bytes")
    _check(
        _counts(offsets) and len(offsets) == 2,
        file,
        f"{name} with data_offsets {shown(offsets)}",
        "[begin, end]",
    )
    return offsets[0], offsets[1], Entry(name, DTYPES[dtype], tuple(shape), file)


def _counts(value: Any) -> bool:
    right = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    return right and all(type(v) is int and 0 <= v <= _MAX_BYTES for v in value)


def read_json(file: Path, expected: str = "a file of JSON") -> dict[str, Any]:
    """The JSON object in a file. CheckpointError as from `opened` and `parse_json`, and for a file
    larger than headers may be.
    """
    with opened(file, expected) as (data, size):
        _check(
            size <= _MAX_HEADER,
            file,
            f"{size} bytes",
            f"{expected}, of at most {_MAX_HEADER} bytes",
        )
        return parse_json(data.read(size), file)


@contextlib.contextmanager
def opened(file: Path, expected: str) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file, or a link to one, for reading, and its size. CheckpointError for others:
    reading a pipe or a device might never end.
    """
    try:
        found = file.stat()
        _check(
            stat.S_ISREG(found.st_mode),
            file,
            f"no plain file ({stat.filemode(found.st_mode)})",
            expected,
        )
        with file.open("rb") as data:
            yield data, found.st_size
    except OSError as error:
        raise CheckpointError(f"{error.strerror}", expected=expected, where=str(file)) from None


def parse_json(text: bytes, file: Path) -> dict[str, Any]:
    """The JSON object in a text; CheckpointError for anything else, for a duplicate name in it, and
    for values nested too deep.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"not JSON: {error}", expected="an object of JSON", where=str(file)
        ) from None
    _check(isinstance(value, dict), file, f"a {type(value).__name__}", "an object of JSON")
    level = [value]
    for _ in range(_MAX_NESTED):
        inside = (
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        )
        level = [inner for inner in inside if isinstance(inner, (dict, list))]
    _check(not level, file, f"more than {_MAX_NESTED} nested values", "an object of JSON")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name)} twice")
    return entries


def shown(value: Any) -> str:
    """A value of JSON for a message, shortened."""
    return _SHORT.repr(value)


def _check(right: bool, file: Path, found: str, expected: str, todo: str = "") -> None:
    if not right:
        raise CheckpointError(found, expected=expected, todo=todo, where=str(file))
