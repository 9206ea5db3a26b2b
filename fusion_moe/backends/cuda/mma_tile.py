"""The tiles of kernels/product_mma.cuh: the largest of which shared memory holds some stages."""

from __future__ import annotations

from itertools import product

from ...arch import Arch
from ...errors import UnsupportedError

MMA_THREADS = 256
MMA_NEEDS = ("mma", "cp.async")
_WARP_ROWS, _WARP_COLUMNS = 16, 64  # the least of a warp
_RESULT_COLUMNS = 32  # of a warp, for each that a result reads
_SIDES = (256, 128, 64)
_STAGES = (3, 2)  # that suffice; that are possible
_BYTES = 128  # of a row or column of a tile, in a stage
_GROUP_BYTES, _OTHER_BYTES = 20, 200  # of the scheduler


def warp_columns(read: int) -> int:
    """Columns of a warp. read: columns of the product that one of a result reads."""
    return max(_WARP_COLUMNS, _RESULT_COLUMNS * read)


def mma_tile(
    m: int, n: int, groups: int, arch: Arch, read: int = 1, narrowest: int = 0
) -> tuple[int, int]:
    """The rows and columns of the tile that a block of a product by `mma.sync` computes: the
    largest that fits in shared memory, of at most m rows and n columns.

    groups: of the call, whose ends are in shared memory; read: how many columns of the product one
    column of a result reads; narrowest: the fewest columns. UnsupportedError if the groups leave no
    room for any tile.
    """
    columns = warp_columns(read)
    least = MMA_THREADS // 32 * _WARP_ROWS * columns
    tiles = [
        (rows, across)
        for rows, across in product(_SIDES, _SIDES)
        if rows <= m and max(columns, narrowest) <= across <= n and rows * across >= least
    ]
    tiles.sort(key=lambda tile: (-tile[0] * tile[1], max(tile)))  # square ones read the least
    room = arch.shared_per_block - _GROUP_BYTES * groups - _OTHER_BYTES
    for stages in _STAGES:
        for tile in tiles:
            if stages * sum(tile) * _BYTES <= room:
                return tile
    raise UnsupportedError(f"{groups} groups have no kernel of products on {arch.name}")
