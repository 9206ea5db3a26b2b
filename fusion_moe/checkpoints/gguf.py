"""GGUF files, which llama.cpp writes, as directories: their tensors under the names of safetensors,
and what config.json would say (gguf_models.py). A file in parts is opened by any of them.

    MXFP4    as compressed-tensors stores it: the same bytes in another order
    NVFP4    as ModelOpt does; the scale of a matrix is a tensor of its own, `.scale`, or 1
    others   float32, by the package gguf, when they are read; those in floats as they are

All experts of a layer are one tensor there, and single matrices here. Unless all projections of a
layer are in MXFP4, or in NVFP4, they are read as floats, and so are embeddings.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..encodings import FLOATS, MXFP4, NIBBLES, NVFP4, Encoding
from ..errors import CheckpointError, UnsupportedError
from ..messages import install
from .configurations import compressed_config, modelopt_config
from .gguf_models import NO_CHANGE, Change, Model, model_of
from .headers import MAX_BYTES, Entry, Reads, need_plain, shown
from .schemes import MODELOPT, PACKED_MXFP4

_NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TEXT, _ARRAY = 8, 9
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENCODED = {"MXFP4": (MXFP4, PACKED_MXFP4), "NVFP4": (NVFP4, MODELOPT)}
_DIMENSIONS = 4  # that ggml has
_OF_BLOCKS = {"MXFP4": (1, 16), "NVFP4": (4, 8)}  # bytes of scales, and of codes for each of them


@dataclass(frozen=True)
class Blocks:
    """A tensor of a file. kind: ggml's name of its type; data: floats [..., N, K], or u8 [..., N,
    bytes], the blocks of rows; size: numbers and bytes of a block; scale: of matrices, f32 [E] or
    [1], if there is one; change: what makes it the model's.
    """

    name: str
    kind: str
    data: Tensor
    size: tuple[int, int]
    file: Path
    scale: Tensor | None = None
    change: Change = NO_CHANGE

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., N, K] of the numbers that the blocks encode."""
        numbers, size = self.size
        *lead, last = self.data.shape
        return (*lead, last if self.kind in _FLOATS else last // size * numbers)

    def of_expert(self, expert: int, rows: slice) -> Blocks:
        """Rows of the matrix, or of the bias, of one expert."""
        scale = self.scale[expert % len(self.scale)][None] if self.scale is not None else None
        return replace(self, data=self.data[expert, rows], scale=scale)

    def floats(self) -> Tensor:
        """The numbers that the blocks encode, [..., N, K]."""
        numbers, change = self._rows, self.change
        if self.kind not in _FLOATS:
            gguf = _package(self.file)
            kind = gguf.GGMLQuantizationType[self.kind]
            numbers = torch.from_numpy(gguf.quants.dequantize(numbers.numpy(), kind))
        if self.scale is not None:
            numbers = numbers * self.scale
        if change.order and change.order.dim:
            numbers = change.order(numbers)
        return change.number(numbers) if change.number else numbers

    def part(self, name: str) -> Tensor:
        """A part of a matrix in MXFP4 or NVFP4, as its scheme stores it."""
        if name == "decode_scale":
            return torch.ones(()) if self.scale is None else self.scale.reshape(())
        count, each = _OF_BLOCKS[self.kind]
        blocks = self._rows.unflatten(-1, (-1, self.size[1]))
        if name == "block_scale":
            scales = blocks[..., :count].flatten(1)
            return scales if self.kind == "MXFP4" else scales.view(torch.float8_e4m3fn)
        halves = blocks[..., count:].unflatten(-1, (count, each))  # in low and in high nibbles
        return NIBBLES.packed(torch.stack([halves & 15, halves >> 4], -2).flatten(1))

    @property
    def _rows(self) -> Tensor:
        order = self.change.order
        return self.data if order is None or order.dim else order(self.data)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Entry], Reads]:
    """config.json, the tensors by name, and what reads each of them, memory mapped.

    CheckpointError for a file that is truncated or broken, and for a part that is missing;
    UnsupportedError for types that the package gguf does not decode, for tensors that a known
    architecture does not have, and where gguf is not installed.
    """
    metadata, tensors = _all_of(path)
    model = model_of(metadata, {name: t.shape for name, t in tensors.items()}, str(path))
    entries: dict[str, Entry] = {}
    reads: Reads = {}
    encodings: dict[str, Encoding] = {}
    encoded = _encoded(tensors, model)
    for name, blocks in _named(tensors, model):
        weight, keeps = name.removesuffix(".weight"), blocks.name in encoded
        if keeps:
            encodings[weight] = _ENCODED[blocks.kind][0]
        for entry, read in _parts(weight, blocks) if keeps else [_floats(name, blocks)]:
            if entry.name in entries:
                raise _misshapen(blocks, f"one tensor with {entry.name}")
            entries[entry.name], reads[entry.name] = entry, read
    config = model.config
    if encodings:
        matrices = (n for n, e in entries.items() if e.dtype in FLOATS and len(e.shape) == 2)
        plain = [name.removesuffix(".weight") for name in matrices]
        config = config | {
            "quantization_config": modelopt_config(dict.fromkeys(encodings, "W4A16_NVFP4"), plain)
            if NVFP4 in encodings.values()
            else compressed_config(encodings, plain)
        }
    return config, entries, reads


def _named(tensors: Mapping[str, Blocks], model: Model) -> Iterator[tuple[str, Blocks]]:
    """The tensors under their names in safetensors, those of experts one by one. Scales of
    activations, and layers for multi-token prediction, are left out.
    """
    for name, blocks in tensors.items():
        if model.left_out(name):
            continue
        if (experts := model.experts_at(name)) is None:
            new = model.name_of(name, str(blocks.file))
            change = model.change_of(name)
            if change.order and not change.order.fits(blocks.shape[change.order.dim]):
                raise _misshapen(blocks, "as many rows and columns as its heads have")
            yield new, replace(blocks, data=_shaped(blocks.data, new), change=change)
            continue
        matrices, suffix = experts
        whole = len(blocks.shape) == (3 if suffix == ".weight" else 2)
        if not whole or blocks.shape[1] % len(matrices):
            raise _misshapen(blocks, "[experts, rows, columns], or a bias [experts, rows]")
        rows = blocks.data.shape[1] // len(matrices)
        for e in range(len(blocks.data)):
            for at, matrix in enumerate(matrices):
                of_matrix = slice(at * rows, (at + 1) * rows)
                yield matrix.replace("*", str(e)) + suffix, blocks.of_expert(e, of_matrix)


def _shaped(data: Tensor, name: str) -> Tensor:
    """With the dimension of 1 that files leave out."""
    if name.endswith("shared_expert_gate.weight") and data.dim() == 1:
        return data[None]
    return data[:, None] if name.endswith("conv1d.weight") and data.dim() == 2 else data


def _misshapen(blocks: Blocks, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{shown(blocks.name)} {list(blocks.shape)}", expected=expected, where=str(blocks.file)
    )


def _encoded(tensors: Mapping[str, Blocks], model: Model) -> set[str]:
    """The names of matrices that keep their encoding: experts, if all projections of their layer
    have it; others, unless their columns are in another order.
    """
    kinds = defaultdict[str, set[str]](set)
    for name, blocks in tensors.items():
        scaled = blocks.scale is not None and blocks.kind != "NVFP4"
        kinds[_together(name)].add("" if scaled else blocks.kind)
    return {
        name
        for name, blocks in tensors.items()
        if len(blocks.shape) == (3 if name.endswith("_exps.weight") else 2)
        if kinds[_together(name)] in ({kind} for kind in _ENCODED)
        if name.endswith(".weight") and name != "token_embd.weight"
        if not ((order := model.change_of(name).order) and order.dim)
    }


def _together(name: str) -> str:
    """A name for the matrices that keep their encoding only together: the experts of a layer."""
    return name.partition(".ffn_")[0] if name.endswith("_exps.weight") else name


def _floats(name: str, blocks: Blocks) -> tuple[Entry, Callable[[], Tensor]]:
    kind = "" if blocks.kind in _FLOATS else f"GGUF {blocks.kind}"
    dtype, size = _FLOATS.get(blocks.kind, torch.float32), blocks.data.nbytes
    return Entry(name, dtype, blocks.shape, blocks.file, kind, size), blocks.floats


def _parts(name: str, blocks: Blocks) -> Iterator[tuple[Entry, Callable[[], Tensor]]]:
    """A matrix as its scheme stores it."""
    encoding, scheme = _ENCODED[blocks.kind]
    n, k = blocks.shape
    for part, stored in zip(encoding.parts, scheme.parts, strict=True):
        shape = encoding.part_shape(part, (), n, k)
        kind = f"GGUF {blocks.kind}"
        entry = Entry(name + stored.suffix, stored.dtypes[0], shape, blocks.file, kind)
        yield entry, partial(blocks.part, part.name)


# The file -----------------------------------------------------------------------------------------


def _all_of(path: Path) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """The metadata and tensors of all parts of a file; each scale with its matrices."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, Blocks] = {}
    for file in _files(path):
        header = _Header(file)
        metadata = header.metadata | metadata
        for blocks in header.tensors():
            if blocks.name in tensors:
                raise CheckpointError(
                    f"{shown(blocks.name)} twice", expected="each tensor once", where=str(file)
                )
            tensors[blocks.name] = blocks
    for name in [name for name in tensors if name.endswith(".scale")]:
        if (weight := tensors.get(f"{name.removesuffix('scale')}weight")) is None:
            continue
        scale = tensors.pop(name)
        if (
            scale.kind != "F32"
            or weight.kind in _FLOATS
            or scale.data.numel() not in (1, prod(weight.shape[:-2]))
        ):
            raise CheckpointError(
                f"{name}: {scale.kind} {list(scale.shape)}",
                expected="a float32 for each matrix",
                where=str(scale.file),
            )
        tensors[weight.name] = replace(weight, scale=scale.data.flatten())
    return metadata, tensors


def _files(path: Path) -> list[Path]:
    """All parts of a file, by the name of one of them."""
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    count = int(match[2])
    return [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


class _Header:
    """What comes before a file's data. metadata: of an array of texts, only how many there are.

    The package's reader takes six seconds for a vocabulary of 150,000, this 0.1.
    """

    def __init__(self, file: Path):
        self.file, self.at = file, 0
        size = need_plain(file, "a file of GGUF")
        with file.open("rb") as opened:
            # a copy on write: torch has no memory that must not be written to
            self.data = memoryview(mmap(opened.fileno(), 0, access=ACCESS_COPY) if size else b"")
        if bytes(self._take(4)) != b"GGUF" or self._number("I") not in (2, 3):
            raise self._broken("no GGUF of version 2 or 3")
        self.count, pairs = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            if (key := self._text()) in self.metadata:
                raise self._broken(f"{shown(key)} twice in its metadata")
            self.metadata[key] = self._value(self._number("I"))

    def tensors(self) -> Iterator[Blocks]:
        """All tensors of the file. To be called once."""
        results = [self._tensor() for _ in range(self.count)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise self._broken(f"general.alignment {shown(alignment)}")
        start = -(-self.at // alignment) * alignment
        end = 0
        for name, shape, kind, size, offset in sorted(results, key=lambda tensor: tensor[-1]):
            *lead, k = shape
            row = k // size[0] * size[1]
            nbytes = prod(lead) * row
            if k % size[0] or start + offset + nbytes > len(self.data) or not nbytes:
                raise self._broken(
                    f"{shown(name)} ({kind} {list(shape)}) has {nbytes} bytes at {start + offset} "
                    f"of {len(self.data)}"
                )
            # a short file could have any number of bytes in tensors that share them
            if offset % alignment or offset < end:
                raise self._broken(
                    f"{shown(name)} at {offset}, no multiple of {alignment} from {end} on"
                )
            end = offset + nbytes
            data = torch.frombuffer(
                self.data, dtype=torch.uint8, count=nbytes, offset=start + offset
            )
            dtype = _FLOATS.get(kind, torch.uint8)
            yield Blocks(name, kind, data.view(dtype).view(*lead, -1), size, self.file)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, tuple[int, int], int]:
        """Name, shape, ggml's name of the type, numbers and bytes of its blocks, offset."""
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise self._broken(f"{shown(name)} of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if prod(max(size, 1) for size in shape) >= MAX_BYTES // 8:
            raise self._broken(f"{shown(name)} {list(shape)}")
        kind, size = _kind(self._number("I"), name, self.file)
        return name, shape, kind, size, self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind == _TEXT:
                for _ in range(count):
                    self._take(self._number("Q"))
                return count
            return struct.unpack(
                f"<{count}{self._code(kind)}",
                self._take(count * struct.calcsize(self._code(kind))),
            )
        return self._number(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._broken(f"metadata of type {kind}")
        return _NUMBERS[kind]

    def _text(self) -> str:
        try:
            return str(self._take(self._number("Q")), "utf-8")
        except UnicodeDecodeError:
            raise self._broken("a name that is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> memoryview:
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise self._broken(f"its header ends after {len(self.data)} bytes")
        return self.data[start : self.at]

    def _broken(self, text: str) -> CheckpointError:
        return CheckpointError(
            text,
            expected="a whole file of GGUF",
            todo="download it again",
            where=str(self.file),
        )


def _kind(number: int, name: str, file: Path) -> tuple[str, tuple[int, int]]:
    """ggml's name of a type, and the numbers and bytes of its blocks. UnsupportedError for one that
    is not decoded.
    """
    gguf = _package(file)
    try:
        kind = gguf.GGMLQuantizationType(number)
        size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name not in _FLOATS:
            gguf.quants.dequantize(torch.zeros(size[1], dtype=torch.uint8).numpy(), kind)
    except (ValueError, KeyError, NotImplementedError):
        raise UnsupportedError(
            f"{shown(name)} of ggml type {number}",
            expected="floats, or a type that the package gguf decodes",
            todo="a newer gguf may: pip install --upgrade gguf",
            where=str(file),
        ) from None
    return kind.name, size


def _package(file: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is not installed", todo=install("gguf"), where=str(file)
        ) from None
    return gguf
