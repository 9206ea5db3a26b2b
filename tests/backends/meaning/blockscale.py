"""Block scales: the order in which compute capability 10.0 reads them.

Scales [rows, c] are padded to whole tiles of 128 rows and 4 columns, C = 4 ceil(c/4) columns.
Element (r, j) is at

    r // 128 * 128 * C  +  j // 4 * 512  +  r % 32 * 16  +  r % 128 // 32 * 4  +  j % 4

In the grouped order each group is such a matrix of its own, group i starting at output_offsets[i] *
C.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .values import (
    Swizzled,
    described,
    held,
    need,
    poison,
    tensor,
)

TILE_ROWS, TILE_COLUMNS = 128, 4


def ceil_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def addresses(rows: int, columns: int) -> torch.Tensor:
    """i64[rows, columns]: where each element of one matrix is."""
    r, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    row_bands = r // 128 * 128 * ceil_to(columns, TILE_COLUMNS)
    return row_bands + j // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + j % 4


def groups(starts: Any, rows: int) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of each group; the last one takes what is left."""
    firsts = tensor(starts, "Int32", "Int").data.tolist()
    need(firsts and firsts[0] == 0, f"input_offsets {firsts}: the first group must start at row 0")
    need(
        firsts == sorted(firsts) and firsts[-1] <= rows,
        f"input_offsets {firsts}: not starts of groups among {rows} rows",
    )
    for first, end in zip(firsts, [*firsts[1:], rows], strict=True):
        yield first, end - first


def swizzle(scales: torch.Tensor, dtype: str, input_offsets: Any, output_offsets: Any) -> Swizzled:
    """[m, c] in g groups -> (m + 127 g) * C elements. Refused: groups that would overlap or leave
    that memory; no rows at all.
    """
    need(scales.dim() == 2, f"block scales {list(scales.shape)}, expected two dimensions")
    (m, c), offsets = scales.shape, tensor(output_offsets, tensor(input_offsets).dtype).data
    need(
        input_offsets.shape == offsets.shape and offsets.dim() == 1,
        f"offsets {list(input_offsets.shape)} and {list(offsets.shape)}",
    )
    need(m > 0, "block scales of no rows: nvFuser fails when it compiles this")
    columns, free = ceil_to(c, TILE_COLUMNS), 0
    storage = torch.full(((m + 127 * len(offsets)) * columns,), poison(dtype)).to(held(dtype))
    for (first, rows), start in zip(groups(input_offsets, m), offsets.tolist(), strict=True):
        need(
            start % TILE_ROWS == 0 and start >= free,
            f"output_offsets {offsets.tolist()}: expected multiples of 128, from {free} on",
        )
        free = start + ceil_to(rows, TILE_ROWS) if rows else free
        need(
            free <= m + 127 * len(offsets),
            f"output_offsets {offsets.tolist()} leave the memory of {m + 127 * len(offsets)} rows",
        )
        storage[start * columns + addresses(rows, c)] = scales[first : first + rows]
    return Swizzled(storage, dtype)


def unswizzle(memory: torch.Tensor, start_row: int, rows: int, columns: int) -> torch.Tensor:
    """The scales [rows, columns] of the group that starts at padded row `start_row`."""
    at = start_row * ceil_to(columns, TILE_COLUMNS) + addresses(rows, columns)
    need(
        not at.numel() or int(at.max()) < len(memory),
        f"block scales: {len(memory)} elements, too few for {rows} rows from {start_row} on",
    )
    return memory[at]


def memory_of(x: Any, dtype: str) -> torch.Tensor:
    """The elements of a tensor in the order in which memory has them."""
    if not isinstance(x, Swizzled):
        need(tensor(x).data.is_contiguous(), f"{described(x)} is not contiguous")
    need(x.dtype == dtype, f"expected {dtype}, found {described(x)}")
    return x.storage if isinstance(x, Swizzled) else x.data.reshape(-1)


def preprocess_grouped_matmul_input_sf(x: Any, input_offsets: Any, output_offsets: Any) -> Swizzled:
    """x [m, c] in any dtype; the offsets [g] are starts, of rows and of padded rows."""
    x = tensor(x)
    return swizzle(x.data, x.dtype, input_offsets, output_offsets)


OPS = {"preprocess_grouped_matmul_input_sf": preprocess_grouped_matmul_input_sf}
