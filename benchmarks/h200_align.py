"""A kernel that gives each expert's rows whole blocks, for Humming's indexed products."""

import triton
import triton.language as tl


@triton.jit
def align(
    ids,
    ends,
    slot_of,
    sorted_ids,
    expert_ids,
    count,
    rows,
    blocks,
    experts,
    height: tl.constexpr,
    E: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program for SIZE slots, blocks and places in blocks; E: experts, rounded up to a power of
    two.
    """
    e = tl.arange(0, E)
    end = tl.load(ends + e, e < experts, other=0)
    start = tl.where(e > 0, tl.load(ends + e - 1, (e > 0) & (e < experts), other=0), 0)
    taken = tl.where(e < experts, (end - start + height - 1) // height, 0)
    until = tl.cumsum(taken, 0)
    first = (until - taken) * height  # place of an expert's first row

    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    owner = tl.sum((until[None, :] <= i[:, None]).to(tl.int32), 1)
    tl.store(expert_ids + i, owner, (i < blocks) & (owner < experts))

    own = tl.load(ids + i, i < rows, other=0)[:, None] == e[None, :]
    place = tl.load(slot_of + i, i < rows, other=0) + tl.sum(
        tl.where(own, (first - start)[None, :], 0), 1
    )
    tl.store(sorted_ids + place, i, i < rows)

    # no place that is to be filled up
    inside = (first[None, :] <= i[:, None]) & (i[:, None] < (first + end - start)[None, :])
    tl.store(sorted_ids + i, rows, (i < blocks * height) & (tl.sum(inside.to(tl.int32), 1) == 0))
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(taken, 0) * height)
