"""Tokens of a rank on their way to the ranks that hold their experts, and the sums on their way
back.

    dispatch        x [T, H], ids int[T, k], w [T, k] of this rank -> those of all ranks; x may be
                    codes, with their scales
    combine_from    y [R*C/s, H], this rank's sums for the tokens of all ranks -> [T, H], the sums
                    over ranks for its own

Gradients take the same ways: those of a combine_from are dispatched, those of a dispatch's rows and
weights combined.

R ranks; C rows for each, as the stride of the partition s says: T if all ranks have equally many
tokens, else the most that any of them has. Row s * C + t is token t of rank s. E experts in all are
divided like DTensor's Shard(0), ceil(E / R) to a rank.

All ranks of a group run the same of these operations in one order. Each waits for all ranks, so
these have ended the one before when it ends. peers i64[R + 4] says where their buffers are, for
kernels that share memory (symmetric.py); the definitions here go through the process group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....errors import DtypeError, FusionError, ShapeError
from ....ir import DTYPES, FLOATS, NARROW, AnySize, Groups, Op, TensorType, Value, plain
from ....ir.core import Need, OpKind
from ....ir.kinds.rules import (
    Types,
    need,
    need_ends,
    need_float,
    need_rank,
    need_rows_of,
    need_same,
)
from ....ir.types import INTS, wide
from ....layouts import as_bytes, ceil_to
from ..collectives import all_gather, all_to_all

PEERS = 4  # entries of `peers` before the addresses of the ranks' memory
_NAME = re.compile(r"[\w.:/,+-]+", re.ASCII)  # of a process group, in texts of programs
PIECE = 16  # bytes of a row that kernels copy at once
MOST_SLOTS = 32  # of a token, for which the ranks' memory has room


def peers_of(op: Op) -> Value:
    """The operand that says where the ranks' memory is."""
    return op.values[3 if op.kind.name == "dispatch" else 4]


def sent_of(op: Op) -> tuple[AnySize, AnySize]:
    """How many rows of each rank, and bytes of each, the ranks' memory needs room for."""
    x, *others = op.values
    groups: Groups | None = (
        op.attrs["groups"] if op.kind.name == "dispatch" else others[2].type.ends
    )
    rows = (x, *others[3:]) if op.kind.name == "dispatch" else (x,)
    assert groups is not None
    assert groups.stride is not None
    return groups.stride, sum(plain(v.type.shape[1]) * DTYPES[v.type.dtype].itemsize for v in rows)


def _need_ranks(
    peers: TensorType, ids: TensorType, groups: Groups, experts: int, group: str
) -> int:
    need("ids", ids, 2, *INTS)
    slots = ids.shape[1]
    if not isinstance(slots, int) or slots > MOST_SLOTS:
        raise ShapeError(f"{slots} slots of a token", expected=f"at most {MOST_SLOTS}")
    need("peers", peers, 1, "i64")
    if not isinstance(groups.count, int) or groups.count < 1:
        raise ShapeError(f"{groups.count} ranks", expected="a number known when compiling")
    if groups.stride is None:
        raise FusionError(
            f"the groups {groups} follow each other",
            expected="as many rows for each rank: fd.define_groups(name, ranks, stride=rows)",
        )
    need_same("size", "peers", peers.shape[0], "ranks", groups.count + PEERS)
    if experts < 1 or not _NAME.fullmatch(group):
        raise FusionError(
            f"experts = {experts}, group = {group!r}",
            expected="the number of all ranks' experts, and the name of a process group",
        )
    return groups.count


def _dispatch_type(
    x: TensorType,
    ids: TensorType,
    w: TensorType,
    peers: TensorType,
    *scales: TensorType,
    groups: Groups,
    experts: int,
    group: str,
) -> Types:
    """x [T, H], ids int[T, k], experts of tokens, w [T, k] -> x [R*C/s, H], ids i32[R*C/s, k] and w
    [R*C/s, k] of all ranks, and ends i32[R]@ends(s), after the last token of each

    x codes of rows, with their scales [T, B] -> the scales [R*C/s, B] of all ranks, too, after
    these.

    Rows after a rank's last token have ids -1. What x, its scales and w have there, and for tokens
    with no expert on this rank, is not defined: no expert here reads it.
    """
    ranks = _need_ranks(peers, ids, groups, experts, group)
    for part in (x, *scales):
        need_rank("x", part, 2)
        need_same("token count", "x", part.shape[0], "ids", ids.shape[0])
    if not scales:
        need_float("x", x)
    need("w", w, 2, *FLOATS)
    if (x.dtype == "f64") != (w.dtype == "f64"):
        raise DtypeError(f"x is {x}, w is {w}", expected="f64 for both, or for neither")
    for a, b in zip(ids.shape, w.shape, strict=True):
        need_same("size", "ids", a, "w", b)
    assert groups.stride is not None
    rows = groups.stride * ranks / groups
    return (
        TensorType((rows, x.shape[1]), x.dtype),
        TensorType((rows, ids.shape[1]), "i32"),
        TensorType((rows, w.shape[1]), w.dtype),
        TensorType((ranks,), "i32", ends=groups),
        *(TensorType((rows, part.shape[1]), part.dtype) for part in scales),
    )


def _dispatch_needs(
    x: TensorType,
    ids: TensorType,
    w: TensorType,
    peers: TensorType,
    *scales: TensorType,
    groups: Groups,
    experts: int,
    group: str,
) -> Iterator[Need]:
    assert groups.stride is not None
    tokens = plain(x.shape[0])
    yield groups.stride + tokens * -1, f"{tokens} tokens of a rank, and room for {groups.stride}"


def _dispatch(
    x: Tensor,
    ids: Tensor,
    w: Tensor,
    peers: Tensor,
    *scales: Tensor,
    groups: Groups,
    experts: int,
    group: str,
) -> tuple[Tensor, ...]:
    ranks = groups.count
    assert isinstance(ranks, int)
    tokens = len(x)
    each = groups.stride if isinstance(groups.stride, int) else tokens

    def of_all(t: Tensor, empty: int = 0) -> Tensor:
        stored = as_bytes(t)  # gloo sends no 8-bit floats
        padded = F.pad(stored, (0, 0, 0, each - tokens), value=empty)
        return all_gather(padded, group, ranks).view(t.dtype)

    counts = all_gather(torch.full((1,), tokens, dtype=torch.int32), group, ranks)
    ends = counts + torch.arange(ranks, dtype=torch.int32) * each
    return of_all(x), of_all(ids.int(), -1), of_all(w), ends, *map(of_all, scales)


def _dispatch_grad(
    fd: Any, op: Op, dx: Value | None, dids: None, dw: Value | None, *others: None
) -> Sequence[Value | None]:
    """What ranks found for the rows and weights that they got, added up."""
    x, w = (None if g is None else _back(fd, op, g) for g in (dx, dw))
    return [x, None, w, *[None] * len(others)]


def _back(fd: Any, op: Op, y: Value) -> Value:
    """y [R*C/s, N], for the tokens of all ranks that a dispatch brought -> [T, N], the sums over
    ranks for its own. Kernels copy pieces of 16 bytes: N is padded to them.
    """
    _, ids, *_ = op.values
    _, all_ids, _, ends, *_ = op.outputs
    rows, width = map(plain, y.type.shape)
    # elements have 2 bytes at least
    wide = ceil_to(width, PIECE // 2) if isinstance(width, int) else width
    y = fd.ops.reshape(y, new_shape=(rows, width))
    if wide != width:
        y = fd.ops.pad(y, before=(0, 0), after=(0, wide - width), shape=(rows, wide))
    how = {name: op.attrs[name] for name in ("experts", "group")}
    combine = fd.ops.combine_from(
        fd.ops.partition(y, ends), all_ids, ids, ends, peers_of(op), **how
    )
    if wide == width:
        return combine
    tokens = plain(ids.type.shape[0])
    return fd.ops.slice(combine, start_indices=(0, 0), end_indices=(tokens, width))


def _combine_from_type(
    y: TensorType,
    all_ids: TensorType,
    ids: TensorType,
    ends: TensorType,
    peers: TensorType,
    experts: int,
    group: str,
) -> Types:
    """y [R*C/s, H] and all_ids i32[R*C/s, k], sums and ids of the tokens of all ranks, ids int[T,
    k] of this rank, ends i32[R]@ends(s) -> [T, H], for its own tokens.

    Of each rank that holds an expert of a token, its row for that token is added, in the order of
    ranks, in float32 (f64 in float64), and the sum is rounded once.
    """
    need("y", y, 2, *FLOATS)
    rows = need_rows_of("y", y, ends)
    _need_ranks(peers, ids, rows.groups, experts, group)
    need("all_ids", all_ids, 2, "i32")
    need_rows_of("all_ids", all_ids, ends)
    need_same("slots", "all_ids", all_ids.shape[1], "ids", ids.shape[1])
    return (TensorType((plain(ids.shape[0]), y.shape[1]), y.dtype),)


def _combine_from(
    y: Tensor, all_ids: Tensor, ids: Tensor, ends: Tensor, peers: Tensor, experts: int, group: str
) -> tuple[Tensor]:
    ranks, tokens = len(ends), len(ids)
    there = holders(ids, experts, ranks)
    total = wide(y.new_zeros(tokens, y.shape[1]))
    of_ranks = all_to_all(y, group, ranks).view(ranks, len(y) // ranks, y.shape[1])
    for rank, of_rank in enumerate(of_ranks):
        # rows of tokens that have no expert there may be anything
        total += torch.where(there[:, rank, None], wide(of_rank[:tokens]), 0)
    return (total.to(y.dtype),)


def _combine_from_grad(fd: Any, op: Op, d: Value) -> Sequence[Value | None]:
    """Each rank gets the gradient of the tokens for which it added a row; it travels before it is
    made wider.
    """
    y, _, ids, ends, peers = op.values
    dispatched = fd.producer(ends, "dispatch")
    if dispatched is None:
        raise NotImplementedError("the derivative of combine_from without a dispatch before it")
    widened = fd.producer(d, "cast")
    if widened is not None and widened.values[0].type.dtype in NARROW:
        (d,) = widened.values
    of = need_ends(ends.type)
    groups = fd.fresh_groups(of.count, stride=of.stride)
    how = {name: op.attrs[name] for name in ("experts", "group")}
    rows, *_ = fd.ops.dispatch(d, ids, dispatched.values[2], peers, groups=groups, **how)
    rows = fd.ops.reshape(rows, new_shape=y.type.shape)
    return [fd.ops.cast(rows, dtype=y.type.dtype), None, None, None, None]


def holders(ids: Tensor, experts: int, ranks: int) -> Tensor:
    """ids int[T, k] -> bool[T, R]: the ranks that hold an expert of each token.

    >>> holders(torch.arange(-1, 8)[:, None], 7, 3).int().tolist()[:4]
    [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    """
    known = (ids >= 0) & (ids < experts)
    rank = torch.where(known, ids.long() // math.ceil(experts / ranks), ranks)
    return rank.new_zeros(len(ids), ranks + 1, dtype=torch.bool).scatter(1, rank, True)[:, :ranks]


TABLE = (
    OpKind(
        "dispatch",
        _dispatch_type,
        _dispatch,
        _dispatch_grad,
        _dispatch_needs,
        role="collective",
        outputs=None,
        moves_rows_in=PIECE,
    ),
    OpKind(
        "combine_from", _combine_from_type, _combine_from, _combine_from_grad, role="collective"
    ),
)
