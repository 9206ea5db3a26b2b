"""Which columns of a product make up the columns of a result, and the blocks in which a kernel can
compute them.

A kernel has tiles of 16 rows of a matrix, which are columns of its product. A block of BLOCK
columns of the result is made from COLUMNS_PER_RESULT * BLOCK / 16 tiles. Either these are separate
tiles, if the f-th columns of 16 results are adjacent, like gate and up in two halves (BLOCK = 16,
tile f for each). Or they are interleaved, if 16 rows hold all columns of 8 results, like gate and
up in blocks of 8 (BLOCK = 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UnsupportedError
from ..cxx import Index, follow

TILE = 16
_WHOLE = 4  # tiles that make whole columns of any result, on which kernels rely


@dataclass(frozen=True)
class Columns:
    """read: the columns of the product, as functions of j; width: that of the result; block:
    BLOCK.
    """

    read: tuple[Index, ...]
    width: int
    block: int

    @property
    def tiles(self) -> int:
        """The number of tiles in a block."""
        return self.block * len(self.read) // TILE

    def functions(self) -> list[str]:
        """The C++ functions that kernels call: column, first_row and local."""
        local = f"{TILE} * f + i" if self.block == TILE else f"column(f, i) % {TILE}"
        return [
            "// Column j of the result is made of these of the product; the q-th tile of a block "
            "begins at a row; where its columns lie.",
            column_function(self.read),
            "__device__ static constexpr i32 first_row(i32 block, i32 q) { return column(q, block "
            "* BLOCK)" + (" / 16 * 16" if self.block < TILE else "") + "; }",
            f"__device__ static constexpr i32 local(i32 f, i32 i) {{ return {local}; }}",
        ]


def column_function(read: Sequence[Index]) -> str:
    """The C++ function that says which column of the product is the f-th that column j reads."""
    choice = str(read[-1])
    for f in range(len(read) - 2, -1, -1):
        choice = f"f == {f} ? {read[f]} : {choice}"
    return f"__device__ static constexpr i32 column(i32 f, i32 j) {{ return {choice}; }}"


def need_whole(read: Sequence[Index]) -> None:
    """UnsupportedError unless tiles contain all columns from which one of a result is made."""
    if _WHOLE % len(read):
        raise UnsupportedError(
            f"a result of {len(read)} columns of the product has no kernel here",
            expected="1, 2 or 4",
        )


def columns(read: Sequence[Index], width: int, *, aligned: bool) -> Columns:
    """The blocks of columns. aligned: tiles begin at multiples of 16 rows. UnsupportedError if the
    columns are in neither order.
    """
    need_whole(read)
    if all(follow(column, TILE, TILE if aligned else 1) for column in read):
        return Columns(tuple(read), width, TILE)
    if len(read) == 2 and _interleaved(
        [[column.evaluate({"j": j}) for j in range(width)] for column in read]
    ):
        return Columns(tuple(read), width, TILE // 2)
    raise UnsupportedError(
        f"a result whose columns are made of the columns {', '.join(map(str, read))} of the "
        "product has no kernel here",
        expected="runs of 16 columns, or gate and up within 16",
    )


def _interleaved(read: Sequence[Sequence[int]]) -> bool:
    half, width = TILE // 2, len(read[0])
    tiles = [start // TILE * TILE for start in read[0][::half]]
    inside = [[r[j] - tiles[j // half] for j in range(width)] for r in read]
    return width % half == 0 and all(
        0 <= r[j] < TILE and r[j] == r[j % half] for r in inside for j in range(width)
    )
