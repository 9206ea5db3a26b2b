"""All arithmetic on group sizes. M rows are partitioned into G groups (experts); how many rows each
has, only the device knows.

Three spellings of the same partition, all int32 [G], converted here and nowhere else:

    ends            the row after each run; `offs` of torch.nn.functional.grouped_mm and of the
                    public ops
    starts          the first row of each run, without the total; nvFuser's `expert_offsets`
    padded starts   starts once every run is padded to a multiple of `align` rows; nvFuser's
                    `blockscale_offsets`

>>> ends = ends_from_sizes(torch.tensor([3, 0, 6, 2], dtype=torch.int32))
>>> ends.tolist(), starts(ends).tolist(), sizes(ends).tolist()
([3, 3, 9, 11], [0, 3, 3, 9], [3, 0, 6, 2])
>>> padded_starts(ends, 4).tolist()      # runs of 4, 0, 8 and 4 rows once padded to multiples of 4
[0, 4, 4, 12]
>>> # what to allocate before the sizes are known: 16 here, 20 for sizes [1, 1, 1, 8]
>>> bound(11, 4, 4)
20
>>> # row 11 lies past the last end: group 4, which does not exist
>>> row_groups(ends, 12).tolist()
[0, 0, 0, 2, 2, 2, 2, 2, 2, 3, 3, 4]

Nothing here waits for the device, except the checks, which say so. Rows at or past the last end
belong to no group.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..errors import DtypeError, GroupsError, ShapeError

Size = TypeVar("Size", int, Tensor)


def ends_from_sizes(sizes: Tensor) -> Tensor:
    """sizes int [G] -> ends i32 [G]. Ends that do not fit 32 bits become the nearest i32, so that
    checks still find them wrong.
    """
    limits = torch.iinfo(torch.int32)
    return sizes.to(torch.int64).cumsum(0).clamp(limits.min, limits.max).to(torch.int32)


def ends_from_problem(starts: Tensor, problem_sizes: Tensor) -> Tensor:
    """starts i32 [G], problem_sizes i32 [G, 3], (m, n, k) of each group -> ends i32 [G]."""
    return starts + problem_sizes[:, 0]


def sizes(ends: Tensor) -> Tensor:
    """ends i32 [G] -> sizes i32 [G]: the rows of each run."""
    return ends - starts(ends)


def starts(ends: Tensor) -> Tensor:
    """ends i32 [G] -> starts i32 [G]: the first row of each run, without the total."""
    return torch.nn.functional.pad(ends, (1, 0))[:-1]


def padded_starts(ends: Tensor, align: int) -> Tensor:
    """ends i32 [G] -> i32 [G]: the first row of each run once every run is padded to a multiple of
    `align` rows.
    """
    padded = ceil_to(sizes(ends), align)
    return padded.cumsum(0, dtype=torch.int32) - padded


def ceil_to(n: Size, align: int) -> Size:
    """n (int, SymInt or integer tensor) rounded up to a multiple of `align`."""
    return (n + (align - 1)) // align * align


def bound(total: int, count: int, align: int) -> int:
    """Rows to allocate: the most that a partition of `total` rows into `count` groups takes once
    each is padded to a multiple of `align`.

    The maximum is reached by runs of one row each and one run with all others. total and count may
    be int or SymInt; nothing is read from the device.
    """
    ones: int = torch.sym_min(total, count)
    rest: int = torch.sym_max(0, total - count)
    return align * (ones + rest // align)


def row_groups(ends: Tensor, rows: int) -> Tensor:
    """ends i32 [G] -> i32 [rows]: the group of each row, G for rows at or past the last end. rows:
    int or SymInt.
    """
    return torch.searchsorted(
        ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True, out_int32=True
    )


def block_count(rows: Size, count: Size, block: int) -> Size:
    """How many blocks of `block` rows to allocate if each of `count` runs begins with a new block.
    Sizes of any kind.
    """
    return (rows + (block - 1)) // block + count


def block_slots(ends: Tensor, rows: int, block: int) -> Tensor:
    """ends i32 [G] -> i64 [rows]: where each row lies once each run begins at a multiple of
    `block`; its block is slot // block.

    Run g begins at block starts[g] // block + g, after the last block of the previous run. Rows
    past the last end get the slot after all blocks.

    >>> # runs of 3, 0 and 5 rows: blocks 0, none, 2 and 3
    >>> block_slots(torch.tensor([3, 3, 8], dtype=torch.int32), 9, 4).tolist()
    [0, 1, 2, 8, 9, 10, 11, 12, 24]
    """
    first = starts(ends) // block + torch.arange(len(ends), device=ends.device)
    return places(ends, rows, first * block, block_count(rows, len(ends), block) * block)


def places(ends: Tensor, rows: int, first: Tensor, nowhere: int) -> Tensor:
    """ends i32 [G], first int [G] -> i64 [rows]: where each row lies if run g begins at first[g];
    `nowhere` for rows past the last end.
    """
    group, row = row_groups(ends, rows), torch.arange(rows, device=ends.device)
    moved = torch.nn.functional.pad(first - starts(ends), (0, 1))  # group G: no group
    return torch.where(group < len(ends), row + moved.index_select(0, group), nowhere)


def clamp_ends(ends: Tensor, rows: int) -> Tensor:
    """ends i32 [G] -> i32 [G] that never decrease and lie in 0..rows: good ends unchanged, bad ones
    safe to read memory with.

    CUDA kernels do this with ends that were not checked, without waiting; `check_ends` says what
    was wrong.
    """
    return ends.clamp(0, rows).cummax(0).values


def check_ends(ends: Tensor, rows: int, name: str = "offs", stride: int | None = None) -> None:
    """Raises unless ends [G] are cumulative ends of runs among `rows` rows. Reads them, so it waits
    for the device. stride: run g begins at row g * stride, and ends before the next one begins.

    DtypeError unless int32; ShapeError unless one-dimensional; GroupsError with the first group
    whose end is negative, below the one before it, or past the rows. The last end may lie before
    `rows`: the rows after it belong to no group.
    """
    if ends.dtype != torch.int32:
        raise DtypeError(
            f"{name} is {ends.dtype}", expected="torch.int32", todo=f"{name}.to(torch.int32)"
        )
    if ends.dim() != 1:
        raise ShapeError(f"{name} is {list(ends.shape)}", expected="[G], one end for each group")
    before = 0
    for group, end in enumerate(ends.tolist()):
        if stride is not None and not 0 <= end - group * stride <= stride:
            raise GroupsError(
                f"{name}[{group}] = {end}",
                expected=f"{group * stride} to {(group + 1) * stride}: groups lie {stride} rows "
                "apart",
            )
        if not before <= end <= rows:
            what = (
                "negative"
                if end < 0
                else f"past the {rows} rows"
                if end > rows
                else f"below {name}[{group - 1}] = {before}"
            )
            raise GroupsError(
                f"{name}[{group}] = {end} is {what}",
                expected=f"an end from {before} to {rows} for group {group} of {len(ends)}",
                todo="pass cumulative ends, as torch.nn.functional.grouped_mm expects them: "
                "fusion_moe.layouts.groups.ends_from_sizes(sizes)",
            )
        before = end


def check_problem(
    starts: Tensor,
    problem_sizes: Tensor,
    padded_starts: Tensor,
    rows: int,
    n: int,
    k: int,
    align: int,
) -> None:
    """Raises unless the three describe one partition of `rows` rows, for products with n out- and k
    in-features. Waits for the device.

    starts i32 [G] and padded_starts i32 [G] as defined at the head of this file; problem_sizes i32
    [G, 3]: (m, n, k) of each group. Messages use nvFuser's names for them. GroupsError with the
    first group that does not fit.
    """
    end = padded = 0
    for group, (start, (m, *of), stored) in enumerate(
        zip(starts.tolist(), problem_sizes.tolist(), padded_starts.tolist(), strict=True)
    ):
        for bad, actual, expected in (
            (
                not 0 <= m <= rows - end,
                f"problem_sizes[{group}, 0] = {m} rows",
                f"0 to {rows - end}: {end} of {rows} precede them",
            ),
            (
                of != [n, k],
                f"problem_sizes[{group}, 1:] = {of}",
                f"N and K of the weight, {[n, k]}",
            ),
            (start != end, f"offsets[{group}] = {start}", f"{end}, the rows of the groups before"),
            (
                stored != padded,
                f"blockscale_offsets[{group}] = {stored}",
                f"{padded}, those rows padded to multiples of {align}",
            ),
        ):
            if bad:
                raise GroupsError(
                    actual,
                    expected=f"{expected}, for group {group} of {len(starts)}",
                    todo="offsets are group starts without the total; problem_sizes has a row for "
                    "each group, the last one too",
                )
        end, padded = end + m, padded + ceil_to(m, align)


def check_permutation(slots: Tensor, rows: int) -> None:
    """Raises unless integer slots [...] name each of `rows` rows exactly once. Reads them, so it
    waits for the device.

    GroupsError with the first fault.
    """
    check_slots(slots, rows)
    counts = torch.bincount(slots.flatten().long(), minlength=rows)
    if (counts != 1).any():
        raise GroupsError(
            f"slot_of contains row {int((counts != 1).nonzero()[0])} "
            f"{counts[counts != 1][0]} times",
            expected=f"each row from 0 to {rows - 1} exactly once",
            todo="pass slot_of as fusion_moe::route returns it",
        )


def check_slots(slots: Tensor, rows: int, name: str = "slot_of") -> None:
    """GroupsError unless integer slots [...] lie in 0..rows-1, with the first that does not. Reads
    them, so it waits for the device.
    """
    outside = (slots < 0) | (slots >= rows)
    if outside.any():
        raise GroupsError(
            f"{name} contains {slots[outside][0]}",
            expected=f"rows from 0 to {rows - 1}",
            todo="pass slot_of as fusion_moe::route returns it" if name == "slot_of" else "",
        )


def check_expert_map(expert_map: Tensor, here: int) -> None:
    """GroupsError unless expert_map i32[N] is in -1..here-1, with the first entry that is not.
    Reads them, so it waits for the device.
    """
    outside = (expert_map < -1) | (expert_map >= here)
    if outside.any():
        expert = int(outside.nonzero()[0])
        raise GroupsError(
            f"expert_map[{expert}] = {int(expert_map[expert])}",
            expected=f"0 to {here - 1}, an index of the experts here, or -1, elsewhere",
        )


def check_ids(ids: Tensor, groups: int, name: str = "ids", least: int = 0) -> None:
    """Raises unless integer ids [...] lie in least..groups-1. Reads them, so it waits for the
    device. least: -1 allows ids of no group.

    DtypeError unless an integer type; GroupsError with the first position (in row-major order)
    whose id names no group.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"{name} is {ids.dtype}",
            expected="torch.int32 or torch.int64",
            todo=f"{name}.to(torch.int64)",
        )
    bad = (ids < least) | (ids >= groups)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        place = ", ".join(map(str, first))
        raise GroupsError(
            f"{name}[{place}] = {ids[first].item()} is out of range ({int(bad.sum())} of "
            f"{ids.numel()} are)",
            expected=f"ids from 0 to {groups - 1}{', or -1 for no expert' if least else ''}",
            todo="check that the router has as many outputs as there are experts, or pass "
            "first_expert if others hold some of them",
        )
