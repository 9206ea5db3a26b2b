"""A kernel that gives each expert's rows whole blocks, for Humming's indexed products."""

import triton
import triton.language as tl


@triton.jit
def align(
    ids, ends, slot_of, sorted_ids, expert_ids, count, rows, blocks, experts, height: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr
):
    """One program for SIZE slots and SIZE blocks; E: experts, rounded up to a power of two. sorted_ids hold what fills up blocks."""
    e = tl.arange(0, E)
    end = tl.load(ends + e, e < experts, other=0)
    start = tl.where(e > 0, tl.load(ends + e - 1, (e > 0) & (e < experts), other=0), 0)
    taken = tl.where(e < experts, (end - start + height - 1) // height, 0)
    until = tl.cumsum(taken, 0)
    moved = (until - taken) * height - start  # from a row among sorted ones to its place in blocks

    slot = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mine = slot < rows
    one = tl.load(ids + slot, mine, other=0)[:, None] == e[None, :]
    to = tl.load(slot_of + slot, mine, other=0) + tl.sum(tl.where(one, moved[None, :], 0), 1)
    tl.store(sorted_ids + to, slot, mine)
    owner = tl.sum((until[None, :] <= slot[:, None]).to(tl.int32), 1)  # the same numbers, now of blocks
    tl.store(expert_ids + slot, owner, (slot < blocks) & (owner < experts))
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(taken, 0) * height)
