"""The CUDA C++ of copies in e4m3 codes, around kernels/block_copies.cuh: with a scale for 32
numbers of a row or a column, or for 128 of a row, 128 of a column, or 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...encodings import Encoding, find
from ...ir import AnySize, Dim, Fusion, Op, Value, ceildiv, elements, plain, value
from ...ir.kinds.eight_bits import TRAINED
from ...schedule.product import products
from ..cxx import known, scale_class, size
from .source import MAX_RESIDENT, THREADS, KernelSource, Sizes, Source

BLOCK = 128
BLOCK_COPY = "BlockCopy<{scale}>"
# of a multiprocessor: leave registers for what a lane loads ahead, in copies of whole blocks that
# are made from one or two arrays, or in others
_MIN_BLOCKS, _FEW_BLOCKS = 3, 2
ENCODINGS = tuple(name for name in TRAINED if find(name).block == BLOCK)
# of a matrix, on average: with fewer, a step that rounds its weights takes longer than in bf16, on
# an H200 (docs/performance/training.md)
_ENOUGH_ROWS = 384


def why_slow(fusions: Sequence[Fusion], sizes: Sizes) -> str:
    """Why a call that rounds weights for its products would be faster in bf16; "" if not."""
    weights = [
        op.values[0].type
        for fusion in fusions
        for op in fusion.ops
        if op.kind.name == "quantize" and op.encoding.name in ENCODINGS
        if kind_of(op.encoding) == "squares"
    ]
    rows = [value(elements([p.size("M")]), sizes) for f in fusions for p in products(f)]
    average = max(rows, default=0) // max((known(w.shape[0]) for w in weights), default=1)
    if not weights or average >= _ENOUGH_ROWS:
        return ""
    return (
        f"a layer by an FP8 recipe rounds {weights[0]} for {average} rows of each matrix on "
        f"average, which takes longer than its products gain; expected {_ENOUGH_ROWS} rows or "
        "more; for fewer, round weights once for several microbatches "
        "(layer(..., is_first_microbatch=)), or leave them in bf16 (fusion_moe.autocast(None))"
    )


def kind_of(encoding: Encoding) -> str:
    """What a scale of an encoding is for."""
    if encoding.axis == -2:
        return "columns"
    return "squares" if encoding.scales[0].rows > 1 else "rows"


def kernel(
    source: Source,
    name: str,
    row: Sequence[str],
    copies: Sequence[tuple[Encoding, str, str]],
    number: str,
    shape: Sequence[Dim],
    ends: Value | None,
    left: Sequence[Value],
    cut: int = 0,
) -> KernelSource:
    """The kernel that makes copies of a value [*lead, N, K]. row: the C++ of its rows; copies:
    their encodings, where each is stored, and the C++ type of each; number: that of the value's
    numbers; cut: the column from which on they are made in another way.
    """
    *lead, n, k = shape
    results = {
        kind_of(e): f"{copy.format(scale=scale_class(e))}{{{where}}}" for e, where, copy in copies
    }
    rows, block = elements((*lead, n)), copies[0][0].block
    if "squares" in results:
        tiles = f"MatrixTiles<{known(n)}>{{{size(elements(lead))}}}"
        count: AnySize = elements(lead) * -(-known(n) // BLOCK)
    elif ends is None:
        tiles, count = f"PlainTiles<{block}>{{{size(rows)}}}", ceildiv(rows, block)
    else:
        tiles, count = _grouped(source, ends, rows, left, block)
    to = ", ".join(results.get(kind, "NoCopy{}") for kind in ("rows", "columns", "squares"))
    looked_up = "return [=]" not in row[1] or block != BLOCK  # a row is more than its number
    cut = cut if block == BLOCK else 0
    types = f"Lanes<{known(k)}, {block}>, {number}, {str(looked_up).lower()}, {cut}"
    make = f"make_copies<{types}>({tiles}, row, {to});"
    heavy = looked_up or cut or "squares" in results or known(k) % BLOCK
    few = heavy or sum("load_eight" in line for line in row) > 2
    blocks = _FEW_BLOCKS if few else _MIN_BLOCKS
    return _of_tiles(source, name, [*row, make], count, known(k), block, blocks)


def reading(source: Source, name: str, op: Op, left: Sequence[Value]) -> KernelSource:
    """The kernel that decodes a saved copy in blocks along rows of groups, whose scales are powers
    of two. left: values that are not in memory yet.
    """
    (packed, ends), (numbers,), block = op.values, op.outputs, op.values[0].type.encoding.block
    rows, k = plain(numbers.type.shape[0]), known(numbers.type.shape[-1])
    tiles, count = _grouped(source, ends, rows, left, block)
    arguments = ", ".join(source.array(v, left) for v in source.fusion.producers[packed].values)
    read = f"read_copy<Lanes<{k}, {block}>>({tiles}, {arguments}, {source.names[numbers]});"
    few = _MIN_BLOCKS if block == BLOCK else _FEW_BLOCKS
    return _of_tiles(source, name, [read], count, k, block, few)


def transpose_blocks(source: Source, name: str, op: Op, left: Sequence[Value]) -> KernelSource:
    """The kernel that transposes matrices in blocks of 128 x 128."""
    (codes, scales), result = op.values, op.outputs
    groups, n, k = codes.type.shape
    inputs = [*(source.array(v, left) for v in (codes, scales)), *(source.names[v] for v in result)]
    turn = f"transpose_blocks<{known(n)}, {known(k)}>({size(plain(groups))}, {', '.join(inputs)});"
    return _of_tiles(source, name, [turn], plain(groups) * -(-known(n) // BLOCK), known(k))


def transpose_row_blocks(source: Source, name: str, op: Op, left: Sequence[Value]) -> KernelSource:
    """The kernel that stores by columns the codes of rows of groups."""
    (codes, ends), (turned,) = op.values, op.outputs
    rows, k = (plain(d) for d in codes.type.shape)
    tiles, count = _grouped(source, ends, rows, left)
    arguments = f"{source.array(codes, left)}, {source.names[turned]}"
    return _of_tiles(
        source, name, [f"transpose_row_blocks<{known(k)}>({tiles}, {arguments});"], count, known(k)
    )


def _grouped(
    source: Source, ends: Value, rows: AnySize, left: Sequence[Value], block: int = BLOCK
) -> tuple[str, AnySize]:
    """Tiles of rows of groups, and how many there are."""
    groups = known(ends.type.shape[0])
    tiles = f"GroupedRows<{groups}, {block}>{{{source.array(ends, left)}, {size(rows)}, error}}"
    return tiles, ceildiv(rows, block) + groups + 1


def _of_tiles(
    source: Source,
    name: str,
    body: Sequence[str],
    tiles: AnySize,
    width: int,
    block: int = BLOCK,
    min_blocks: int = _MIN_BLOCKS,
) -> KernelSource:
    """A kernel whose blocks compute tiles, several at once if they have fewer rows."""
    assert THREADS == 256  # as the headers have it
    return source.kernel(
        name,
        [*source.WAIT, *body],
        ceildiv(tiles * -(-width // BLOCK) * block, BLOCK),
        headers=("block_copies.cuh",),
        max_resident=MAX_RESIDENT,
        min_blocks=min_blocks,
    )
