"""The CUDA C++ of weights in E2M1 codes, NVFP4 and MXFP4, in linear order or in that of the
kernels, around kernels/e2m1_copies.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...encodings import MXFP4, NVFP4, find
from ...ir.core import Op, Value
from ...ir.kinds.shape import elements
from ...ir.sizes import AnySize, ceildiv
from ...ir.types import plain
from ...runtime import cuda
from ..cxx.indices import Variable, size
from ..cxx.product_plan import known
from ..inexpressible import Inexpressible
from .source import MAX_RESIDENT, THREADS, Array, KernelSource, Source

_MIN_BLOCKS = 2  # leaves registers for everything that a lane loads ahead
_PIECES = 256  # as the header has it
_M = Variable("m")
# encoding -> how the header chooses its scales
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
    for given in of_matrix:
        runs = given.type.shape[len(lead)] if len(given.type.shape) > len(lead) else 1
        scale = f"{source.array(given, left)}[{_M // (size(n) // size(runs))}]"
    tiles = str(codes.type.layout == LAYOUT).lower()
    body = [
        *row,
        f"const auto of_matrix = [&](i64 m) {{ return {scale}; }};",
        f"make_e2m1<{number}, {SCALES[op.attrs['encoding']]}, {known(k)}, {tiles}>({size(rows)}, "
        f"row, of_matrix, {source.names[codes]}, {source.names[scales]});",
    ]
    return _of_warps(source, name, body, ceildiv(rows, 16) * -(-known(k) // 64))


def scratch(op: Op) -> Array:
    """The memory of a `decode_scale`. Inexpressible for encodings other than NVFP4, and for GPUs
    before Hopper.
    """
    if why := cuda.why_no_wgmma():
        raise Inexpressible(op, why)
    if op.attrs["encoding"] != NVFP4.name:
        raise Inexpressible(op, f"scales of matrices in {op.attrs['encoding']} have no kernel here")
    return Array("largest", "i32", elements(op.values[0].type.shape[:-2]) * _PIECES)


def of_matrices(
    source: Source, op: Op, row: Sequence[str], number: str
) -> tuple[KernelSource, KernelSource]:
    """The kernels that make the scales of matrices, each over all of a matrix."""
    (x,), (out,), encoding = op.values, op.outputs, find(op.attrs["encoding"])
    *lead, n, k = x.type.shape
    matrices, where = elements(lead), f"reinterpret_cast<u32*>({scratch(op).name})"
    most = encoding.element.maximum * encoding.scales[0].maximum
    pieces = f"largest_of_pieces<{number}, {known(k)}>({size(matrices)}, {size(plain(n))}, row, "
    scales = f"scales_of_matrices({size(matrices)}, {where}, {most!r}f, {source.names[out]});"
    return (
        _of_warps(source, "largest", [*row, f"{pieces}{where});"], matrices * _PIECES),
        _of_warps(source, "decode_scale", [scales], matrices),
    )


def _of_warps(source: Source, name: str, body: Sequence[str], warps: AnySize) -> KernelSource:
    return source.kernel(
        name,
        ["griddepcontrol_wait();", "griddepcontrol_launch_dependents();", *body],
        ceildiv(warps, THREADS // 32),
        headers=("e2m1_copies.cuh",),
        max_resident=MAX_RESIDENT,
        min_blocks=_MIN_BLOCKS,
    )
