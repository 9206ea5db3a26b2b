"""The CUDA C++ of weights in E2M1 codes, NVFP4 and MXFP4, in linear order or in that of the
kernels, around kernels/e2m1_copies.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...encodings import MXFP4, NVFP4, Encoding
from ...ir import AnySize, Fusion, Op, Value, ceildiv, elements, plain
from ..cxx import Variable, known, size
from ..inexpressible import Inexpressible
from .source import MAX_RESIDENT, THREADS, Array, KernelSource, Source

_MIN_BLOCKS = 2  # leaves registers for everything that a lane loads ahead
_M = Variable("m")
# encoding -> how the header chooses its scales, by "max"
SCALES = {NVFP4.name: "E4m3Scale", MXFP4.name: "PowerOfTwoOf4Bits"}
LAYOUT = "w16x64"


def kernel(
    source: Source,
    name: str,
    row: Sequence[str],
    op: Op,
    stored: Sequence[Value],
    number: str,
    left: Sequence[Value],
) -> KernelSource:
    """The kernel that makes codes and scales. row: the C++ of rows; stored: both, in linear order
    or that of tiles; number: the C++ type of the numbers.
    """
    (x, *of_matrix), (codes, scales) = op.values, stored
    *lead, n, k = x.type.shape
    rows = elements((*lead, n))
    scale = "1.f"
    for argument in of_matrix:
        runs = argument.type.shape[len(lead)] if len(argument.type.shape) > len(lead) else 1
        scale = f"{source.array(argument, left)}[{_M // (size(n) // size(runs))}]"
    body = [
        *row,
        f"const auto of_matrix = [&](i64 m) {{ return {scale}; }};",
        f"make_e2m1<{number}, {scale_of(op.encoding, op.rule)}, {known(k)}, {_in_tiles(codes)}>("
        f"{size(rows)}, "
        f"row, of_matrix, {source.names[codes]}, {source.names[scales]});",
    ]
    return _of_warps(source, name, body, ceildiv(rows, 16) * -(-known(k) // 64))


def scale_of(encoding: Encoding, rule: str) -> str:
    """How the header chooses scales by a rule, whose candidates have one factor and consecutive
    offsets.
    """
    usual = SCALES[encoding.name]
    if rule == "max":
        return usual
    tried = tuple(encoding.scales[0].others[rule])
    (factor, first), (_, last) = tried[0], tried[-1]
    return f"Searched<{usual}, {int(2 * factor)}, {first}, {last}>"


def chosen_inside(fusion: Fusion, op: Op) -> Op | None:
    """The `decode_scale` of what a `quantize` rounds, if the same kernel computes it."""
    producer = fusion.producer(op.values[1], "decode_scale") if len(op.values) > 1 else None
    return producer if producer is not None and producer.values == op.values[:1] else None


def scratch(op: Op) -> Array:
    """The memory of a `decode_scale`. Inexpressible for encodings other than NVFP4."""
    if op.attrs["encoding"] != NVFP4.name:
        raise Inexpressible(op, f"scales of matrices in {op.attrs['encoding']} have no kernel here")
    return Array("state", "i32", 2 * elements(op.values[0].type.shape[:-2]) + 1)


def by_matrix(
    source: Source, name: str, row: Sequence[str], op: Op, stored: Sequence[Value], number: str
) -> tuple[KernelSource, KernelSource]:
    """The kernels that choose the scales of matrices and make codes and scales."""
    (x, scale), (codes, scales), encoding = op.values, stored, op.encoding
    *lead, n, k = x.type.shape
    matrices, state = elements(lead), scratch(source.fusion.producers[scale])
    most = encoding.element.maximum * encoding.scales[0].maximum
    types = f"{number}, {scale_of(encoding, op.rule)}, {known(k)}, {_in_tiles(codes)}"
    counts = f"{size(matrices)}, {size(plain(n))}, row, {most!r}f"
    arrays = ", ".join(source.names[v] for v in (codes, scales, scale))
    make = (
        f"make_e2m1_by_matrix<{types}>({counts}, reinterpret_cast<u32*>({state.name}), {arrays});"
    )
    tiles = matrices * (ceildiv(plain(n), 16) * -(-known(k) // 64))
    return (
        source.for_all("begin", state.count, [f"{state.name}[i] = 0;"]),
        _of_warps(source, name, [*row, make], tiles),
    )


def _in_tiles(codes: Value) -> str:
    return str(codes.type.layout == LAYOUT).lower()


def _of_warps(source: Source, name: str, body: Sequence[str], warps: AnySize) -> KernelSource:
    return source.kernel(
        name,
        [*source.WAIT, *body],
        ceildiv(warps, THREADS // 32),
        headers=("e2m1_copies.cuh",),
        max_resident=MAX_RESIDENT,
        min_blocks=_MIN_BLOCKS,
    )
