"""Kernels in Triton around those of peers: one that gives each expert's rows whole blocks, and one
that rounds rows to e4m3.
"""

import torch
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


@triton.jit
def _to_e4m3(x, codes, scales, rows, width, down, across, GATED: tl.constexpr, SIZE: tl.constexpr):
    """One program for SIZE rows and 128 columns. GATED: of silu(gate) * up."""
    m = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)[:, None]
    block = tl.program_id(1)
    k = block * 128 + tl.arange(0, 128)[None, :]
    inside = (m < rows) & (k < width)
    from_row = x + m * width * (2 if GATED else 1)
    value = tl.load(from_row + k, inside, other=0).to(tl.float32)
    if GATED:
        up = tl.load(from_row + width + k, inside, other=0).to(tl.float32)
        value = (value * tl.sigmoid(value) * up).to(tl.bfloat16).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1, keep_dims=True) / 448, 1e-10)
    tl.store(codes + m * width + k, (value / scale).to(tl.float8e4nv), inside)
    tl.store(scales + m * down + block * across, scale, m < rows)


def to_e4m3(
    x: torch.Tensor, gated: bool = False, by_columns: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [M, K], or [M, 2 K] if gated -> e4m3 [M, K], f32 [M, K / 128]; by_columns: how scales
    lie.
    """
    rows, width = len(x), x.shape[1] // (1 + gated)
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, -(-width // 128)), device=x.device)
    if by_columns:
        scales = torch.empty(scales.shape[::-1], device=x.device).mT
    grid = -(-rows // 16), scales.shape[1]
    _to_e4m3[grid](x, codes, scales, rows, width, *scales.stride(), gated, 16)
    return codes, scales
