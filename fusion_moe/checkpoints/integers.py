"""Weights in integers: which encoding and packing they have, by the shapes of their tensors, and by
the configuration where these leave it open; and the tensors beside them that must say the same.

    weight_packed      int32 [N, K/8]    compressed-tensors: words along K; [N, K/4] of 8 bits
    weight_scale       float [N, K/group], weight_zero_point int32 [N/8, K/group]: words along N
    qweight            int32 [K/8, N]    GPTQ: words along K; AWQ: [K, N/8], words along N
    scales             float [K/group, N], qzeros int32 [K/group, N/8]: words along N

AWQ's words have eight codes in an order of their own. GPTQ's first format stores zero points less
1. A symmetric one has the same everywhere, which is no part of an encoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..encodings import INTEGERS, ROW, Encoding
from ..encodings.integers import GROUPS
from ..errors import CheckpointError, Error, UnsupportedError
from .headers import Entry
from .schemes import PACKED_INT4, PACKED_WITH_ZEROS, Fixed, Scheme, StoredPart
from .words import Words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Packing:
    """What a configuration says about integers. groups: their bits and the columns that share a
    scale, ROW for all; symmetric: whether zero points are in the middle; less: how much smaller
    GPTQ stores them; awq: whether words are AWQ's, or GPTQ's; None if it does not say.
    """

    groups: tuple[tuple[int, int], ...] = ((4, 32),)
    symmetric: bool = False
    less: int = 0
    awq: bool | None = None


USUAL = Packing()


def scheme_of(scheme: Scheme, entries: Mapping[str, Entry], packing: Packing) -> Scheme:
    """The scheme with its encoding and packing. CheckpointError for tensors that do not fit each
    other, UnsupportedError for integers of other bits or groups.
    """
    codes, scale = entries["codes"], entries["block_scale"]
    for entry in entries.values():
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise CheckpointError(f"{entry}", expected="two dimensions", where=str(entry.file))
    result = _packed if scheme.parts[0].suffix == PACKED_INT4.parts[0].suffix else _of_qweight
    bits, k, groups, resolved = result(scheme, entries, packing)
    group = _group(k, groups, bits, packing)
    name = f"{'u' if len(resolved.parts) > 2 else ''}int{bits}"
    dtype = torch.float16 if scale.dtype == torch.float16 else torch.bfloat16
    encoding = INTEGERS.get((name, group, dtype))
    if encoding is None:
        raise UnsupportedError(
            f"{codes}: integers of {bits} bits in groups of {group}"
            f"{' with zero points' if name[0] == 'u' else ''}",
            expected="4 bits, or 8 without zero points, in groups of 32, 64, 128 or whole rows",
            todo="take the model in floats, and quantize it",
            where=str(codes.file),
        )
    parts = [
        replace(part, dtypes=(scale.dtype,), cast=None if scale.dtype == dtype else dtype)
        if part.part == "block_scale"
        else part
        for part in resolved.parts
    ]
    usual = encoding.name == "int4" and resolved.name == PACKED_INT4.name
    groups_of = "" if usual else ", whole rows" if group == ROW else f", groups of {group}"
    return replace(
        resolved,
        name=resolved.name.replace("INT4", f"INT{bits}") + groups_of,
        encoding=encoding,
        parts=tuple(parts),
    )


def packed_scheme(encoding: Encoding) -> Scheme:
    """How compressed-tensors stores integers."""
    stored = PACKED_WITH_ZEROS if encoding.zero_points else PACKED_INT4
    dtypes = (encoding.factors[0].dtype,)
    parts = tuple(
        replace(part, dtypes=dtypes, cast=None) if part.part == "block_scale" else part
        for part in stored.parts
    )
    return replace(stored, encoding=encoding, parts=parts, fixed=(_shape(),))


_Found = tuple[int, int, int, Scheme]  # bits, K, groups of a row, and the scheme


def _packed(scheme: Scheme, entries: Mapping[str, Entry], packing: Packing) -> _Found:
    """Of compressed-tensors, where only the configuration tells bits: those with which a group of
    its size fills the words.
    """
    words, groups = entries["codes"].shape[1], entries["block_scale"].shape[1]
    fitting = {
        bits
        for bits, size in packing.groups
        if (groups == 1 if size == ROW else groups * size * bits == words * 32)
    }
    if len(fitting) > 1:
        raise CheckpointError(
            f"{entries['codes']} may have {' or '.join(map(str, sorted(fitting)))} bits",
            expected="groups of sizes that tell bits apart",
            where=str(entries["codes"].file),
        )
    bits = min(fitting or {packing.groups[0][0]})
    parts = [replace(p, words=replace(p.words, bits=bits)) if p.words else p for p in scheme.parts]
    resolved = replace(scheme, parts=tuple(parts), fixed=(_shape(), _order(".weight_g_idx")))
    return bits, words * 32 // bits, groups, resolved


def _of_qweight(scheme: Scheme, entries: Mapping[str, Entry], packing: Packing) -> _Found:
    codes, scale, zeros = (entries[part.part] for part in scheme.parts)
    (rows, columns), (groups, n) = codes.shape, scale.shape
    bits = 32 * zeros.shape[1] // n
    awq = columns != n
    words_fit = bits > 0 and columns * (32 // bits if awq else 1) == n
    if not words_fit or zeros.shape[0] != groups or packing.awq not in (None, awq):
        known = {False: "GPTQ's [K/8, N]", True: "AWQ's [K, N/8]"}
        either = " or ".join(known.values())
        raise CheckpointError(
            f"{codes} with {scale} and {zeros}",
            expected=f"{either if packing.awq is None else known[packing.awq]}, with [K/group, N] "
            "and [K/group, N/8]",
            where=str(codes.file),
        )
    if awq:
        words, less = Words(bits, order=AWQ_ORDER if bits == 4 else ()), 0
        of_codes = replace(scheme.parts[0], words=words, transposed=True)
    else:
        words, less = Words(bits), packing.less
        of_codes = replace(scheme.parts[0], words=Words(bits, along_rows=True), transposed=True)
    fixed: tuple[Fixed, ...] = () if awq else (_order(".g_idx"),)
    parts = [of_codes, scheme.parts[1]]
    if packing.symmetric and not awq:
        fixed += (_middle(scheme.parts[2], bits, less),)
    else:
        parts.append(replace(scheme.parts[2], words=replace(words, less=less)))
    name = f"{'AWQ' if awq else 'GPTQ'} INT4{' with zero points' if len(parts) > 2 else ''}"
    k = rows if awq else rows * 32 // bits
    return bits, k, groups, replace(scheme, name=name, parts=tuple(parts), fixed=fixed)


def _group(k: int, groups: int, bits: int, packing: Packing) -> int:
    """The columns that share a scale; ROW for a whole row, unless that is a group by its size and
    the configuration does not say otherwise.
    """
    if groups == 1 and ((bits, ROW) in packing.groups or k not in GROUPS):
        return ROW
    return k // groups


# Tensors that say the same ------------------------------------------------------------------------


# What a scheme has of these is pickled with the model that was loaded by it: no local functions.


def _shape() -> Fixed:
    return Fixed(".weight_shape", torch.int64, _sizes, _not_sizes)


def _sizes(n: int, k: int, encoding: Encoding) -> Tensor:
    return torch.tensor([n, k])


def _not_sizes(tensor: Tensor, wanted: Tensor) -> Error:
    return CheckpointError(
        f"{tensor.tolist()}", expected=f"{wanted.tolist()}, which the codes have"
    )


def _order(suffix: str) -> Fixed:
    """The group of each column: they follow one another."""
    return Fixed(suffix, torch.int32, _groups, _not_groups, of_columns=True)


def _groups(n: int, k: int, encoding: Encoding) -> Tensor:
    return torch.arange(k, dtype=torch.int32) // (k // encoding.blocks(k))


def _not_groups(tensor: Tensor, wanted: Tensor) -> Error:
    if tensor.shape != wanted.shape or not torch.equal(tensor.sort().values, wanted):
        return CheckpointError(
            f"groups of columns {list(tensor.shape)}, of {tensor.unique().numel()} numbers",
            expected=f"{len(wanted)} numbers, each group from 0 to {int(wanted[-1])} as often",
        )
    return UnsupportedError(
        "columns of a group that do not lie side by side (desc_act)",
        expected="groups of consecutive columns",
        todo="take a checkpoint that was made with desc_act=False, or convert it "
        'to="dense", and quantize that',
    )


def _middle(part: StoredPart, bits: int, less: int) -> Fixed:
    """Zero points that are all the same: half of the range of codes."""
    number = 2 ** (bits - 1) - less
    made, refused = partial(_zeros, bits=bits, number=number), partial(_not_zeros, number=number)
    return Fixed(part.suffix, torch.int32, made, refused)


def _zeros(n: int, k: int, encoding: Encoding, bits: int, number: int) -> Tensor:
    word = sum(number << i for i in range(0, 32, bits))
    size = (encoding.blocks(k), n * bits // 32)
    return torch.full(size, word - 2**32 if word >= 2**31 else word, dtype=torch.int32)


def _not_zeros(tensor: Tensor, wanted: Tensor, number: int) -> Error:
    return CheckpointError(
        "several zero points",
        expected=f"{number} in all groups: config.json says sym",
        todo='"sym": false in its quantization_config, if these are right',
    )
