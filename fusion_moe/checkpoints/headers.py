"""The header of a safetensors file, checked against the file's size before any data are read.

A file consists of 8 bytes, the length of the header; the header, JSON with dtype, shape, first and last byte of each tensor; and the bytes
of all tensors, without gaps. Source: the format's description in the safetensors repository.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package


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
        return f"{self.name} ({str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


def read_header(file: Path) -> list[Entry]:
    """The tensors of a file, in the order of their bytes. CheckpointError with file, tensor, found and expected if anything is wrong."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(8), "little")
            right = size >= 8 and 2 <= length <= min(_MAX_HEADER, size - 8)
            _check(right, file, f"{size} bytes with a header of {length}", "the length of a header, and the header")
            text = opened.read(length)
    except OSError as error:
        raise CheckpointError(f"{error.strerror}", expected="a file of safetensors", where=str(file)) from None
    entries, end = [], 0
    for start, stop, entry in sorted(_entries(text, file), key=lambda found: found[:2]):
        _check(start == end, file, f"{entry} begins at byte {start} of the data", f"{end}, where the one before it ends")
        _check(stop - start == entry.nbytes, file, f"{entry} has {stop - start} bytes", f"{entry.nbytes} for its dtype and shape")
        entries.append(entry)
        end = stop
    have = size - 8 - length
    _check(have == end, file, f"{have} bytes of data", f"{end} by its header", "it is truncated; download it again" if have < end else "")
    return entries


def _entries(text: bytes, file: Path) -> list[tuple[int, int, Entry]]:
    """The first and last byte of each tensor, and its entry."""
    header = parse_json(text, file)
    metadata = header.pop("__metadata__", {})
    right = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    _check(right, file, f"__metadata__ {metadata!r}", "an object of strings")
    return [_entry(name, value, file) for name, value in header.items()]


def _entry(name: str, value: Any, file: Path) -> tuple[int, int, Entry]:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype", ""), fields.get("shape", ()), fields.get("data_offsets", ())
    _check(isinstance(dtype, str) and dtype in DTYPES, file, f"{name} of dtype {dtype!r}", f"one of {', '.join(DTYPES)}")
    _check(_counts(shape), file, f"{name} of shape {shape!r}", "a list of sizes")
    _check(_counts(offsets) and len(offsets) == 2, file, f"{name} with data_offsets {offsets!r}", "[begin, end]")
    return offsets[0], offsets[1], Entry(name, DTYPES[dtype], tuple(shape), file)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def parse_json(text: bytes, file: Path) -> dict[str, Any]:
    """The JSON object in a text; CheckpointError for anything else, and for a duplicate name in it."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not JSON: {error}", expected="an object of JSON", where=str(file)) from None
    _check(isinstance(value, dict), file, f"a {type(value).__name__}", "an object of JSON")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _check(right: bool, file: Path, found: str, expected: str, todo: str = "") -> None:
    if not right:
        raise CheckpointError(found, expected=expected, todo=todo, where=str(file))
