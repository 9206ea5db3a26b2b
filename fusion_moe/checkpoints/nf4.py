"""Matrices that bitsandbytes quantized to NF4: as they lie in files, flat, their tensors do not say
N and K. These are in JSON beside them, which is read with the headers.

    .weight                                   uint8 [N K/2, 1], the first of two codes in the high
                                              nibble
    .weight.absmax                            float32 [N K/64], or uint8: codes of nested_quant_map
    .weight.nested_absmax, .nested_quant_map  float32 [ceil(N K/64/256)], [256]
    .weight.quant_map                         float32 [16]
    .weight.quant_state.bitsandbytes__nf4     uint8, JSON: shape, blocksize, nested_offset, ...

absmax = nested_quant_map[code] * nested_absmax + nested_offset, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..encodings import FLOATS, NF4
from ..errors import CheckpointError, UnsupportedError
from .headers import Entry, Read, Reads, json_of, shown
from .schemes import NF4_STATE, nf4_state

_WEIGHT, _ABSMAX = ".weight", ".weight.absmax"
_NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")


def unflattened(tensors: Mapping[str, Entry], read: Read) -> tuple[dict[str, Entry], Reads]:
    """The tensors with codes [N, K/2] and scales float32 [N, K/64] in the place of those of NF4,
    and what reads these.

    CheckpointError for tensors that do not fit each other, UnsupportedError for other blocks.
    """
    entries, reads = dict(tensors), Reads()
    for name in [name for name in tensors if name.endswith(NF4_STATE)]:
        state = entries[name]
        weight = name.removesuffix(NF4_STATE)
        matrix = _Matrix.of(_json(state, read(name)), weight, state)
        codes, scales, *nested = matrix.parts(tensors)
        for entry in nested:
            del entries[entry.name]
        n, k = matrix.shape
        size = sum(entry.nbytes for entry in (scales, *nested))
        entries[codes.name] = replace(codes, shape=(n, k // 2), dtype=torch.uint8)
        entries[scales.name] = replace(
            scales, shape=(n, k // NF4.block), dtype=torch.float32, size=size
        )
        fields = nf4_state(n, k, NF4)  # without nested scales
        entries[name] = replace(state, shape=(len(fields),), size=state.nbytes)
        reads[name] = partial(nf4_state, n, k, NF4)
        reads[codes.name] = partial(_shaped, read, codes.name, entries[codes.name].shape)
        reads[scales.name] = partial(matrix.scales, read, len(nested) > 0)
    return entries, reads


@dataclass(frozen=True)
class _Matrix:
    """What the JSON says. shape: [N, K]; block, offset: of the scales of scales."""

    name: str
    shape: tuple[int, int]
    block: int
    offset: float
    file: str

    @classmethod
    def of(cls, fields: dict[str, Any], name: str, state: Entry) -> _Matrix:
        """CheckpointError for anything else than numbers, UnsupportedError for other blocks."""
        shape, block = fields.get("shape"), fields.get("blocksize")
        nested, offset = fields.get("nested_blocksize", 256), fields.get("nested_offset", 0.0)
        sizes: list[Any] = [None]
        if isinstance(shape, list) and len(shape) == 2:
            sizes = [*shape, block, nested]
        if any(type(size) is not int or size < 1 for size in sizes) or type(offset) is not float:
            raise CheckpointError(
                f"{state.name}: {shown(fields)}",
                expected="the shape of a matrix, blocksize, nested_blocksize, nested_offset",
                where=str(state.file),
            )
        n, k, *_ = sizes
        if block != NF4.block or k % NF4.block:
            raise UnsupportedError(
                f"{name} [{n}, {k}] in blocks of {block}",
                expected=f"blocks of {NF4.block}, and whole ones in a row",
                where=str(state.file),
            )
        # as many as there are blocks are all of them
        return cls(name, (n, k), min(nested, n * k), offset, str(state.file))

    def parts(self, tensors: Mapping[str, Entry]) -> list[Entry]:
        """Codes, scales, and if these are quantized too, their scales and table."""
        blocks = prod(self.shape) // NF4.block
        scales = tensors.get(self.name + _ABSMAX)
        wanted = {
            _WEIGHT: (torch.uint8, blocks * NF4.block // 2),
            _ABSMAX: (torch.float32, blocks),
        }
        if scales is not None and scales.dtype == torch.uint8:
            factors, table = _NESTED
            wanted |= {
                _ABSMAX: (torch.uint8, blocks),
                factors: (torch.float32, -(-blocks // self.block)),
                table: (torch.float32, 256),
            }
        results = []
        for suffix, (dtype, count) in wanted.items():
            entry = tensors.get(self.name + suffix)
            # codes may be stored as any dtype: bnb_4bit_quant_storage
            dtypes = {dtype, *(FLOATS if suffix == _WEIGHT else ())}
            nbytes = count * dtype.itemsize
            if entry is None or entry.dtype not in dtypes or entry.nbytes != nbytes:
                raise CheckpointError(
                    f"{entry}" if entry else f"no {self.name}{suffix}",
                    expected=f"{str(dtype).removeprefix('torch.')} [{count}] for a matrix "
                    f"{list(self.shape)}",
                    where=self.file,
                )
            results.append(entry)
        return results

    def scales(self, read: Read, nested: bool) -> Tensor:
        """f32 [N, K/64]"""
        scales = read(self.name + _ABSMAX).flatten()
        if nested:
            factors, table = (read(self.name + suffix) for suffix in _NESTED)
            factors = factors.flatten().repeat_interleave(self.block)[: len(scales)]
            scales = table.flatten()[scales.int()] * factors + self.offset
        return scales.view(self.shape[0], -1)


def _shaped(read: Read, name: str, shape: tuple[int, ...]) -> Tensor:
    return read(name).flatten().view(torch.uint8).view(shape)


def _json(state: Entry, data: Tensor) -> dict[str, Any]:
    try:
        fields = json_of(bytes(data.tolist()))
    except (ValueError, RecursionError, TypeError):
        fields = None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{state}", expected="an object of JSON", where=str(state.file))
    return fields
