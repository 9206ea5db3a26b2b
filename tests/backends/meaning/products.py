"""Matrix products. All are computed in float64 and rounded once to the dtype of the result; what no
group covers stays poison.
"""

from __future__ import annotations

from typing import Any

import torch

from .block_scaled_mma import block_scaled_mma
from .blockscale import ceil_to, memory_of, unswizzle
from .values import (
    E2M1,
    E4M3,
    FLOATS,
    HALVES,
    Value,
    described,
    held,
    need,
    poison,
    tensor,
)


def _runs(offsets: Any, size: int) -> list[tuple[int, int]]:
    """int32[g] ends -> (first, end) of each group of the dimension of `size`."""
    offsets = tensor(offsets, "Int32")
    need(offsets.data.dim() == 1, f"offsets {list(offsets.shape)}, expected one dimension")
    ends = offsets.data.tolist()
    need(
        ends == sorted(ends) and min(ends, default=0) >= 0 and max(ends, default=0) <= size,
        f"offsets {ends} are no ends within {size}",
    )
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: Any) -> torch.Tensor:
    """float64: [m, k] x [g, k, n] -> [m, n], rows in groups; [g, m, k] x [k, n] -> [m, n], columns
    in groups; [m, k] x [k, n] -> [g, m, n], the contracted dimension in groups.
    """
    dims = (a.dim(), b.dim())
    need(dims in ((2, 3), (3, 2), (2, 2)), f"grouped_mm of {list(a.shape)} and {list(b.shape)}")
    count = tensor(offsets).shape[0]
    need(
        all(t.shape[0] == count for t in (a, b) if t.dim() == 3),
        f"grouped_mm of {list(a.shape)} and {list(b.shape)} in {count} groups",
    )
    need(
        a.shape[-1] == b.shape[-2], f"grouped_mm of {list(a.shape)} and {list(b.shape)}: K differs"
    )
    runs = _runs(offsets, {(2, 3): a.shape[0], (3, 2): b.shape[1], (2, 2): a.shape[1]}[dims])
    if dims == (2, 2):
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in runs])
    out = torch.full((a.shape[-2], b.shape[-1]), torch.nan, dtype=torch.float64)
    for g, (i, j) in enumerate(runs):
        rows, columns = (slice(i, j), slice(None)) if dims == (2, 3) else (slice(None), slice(i, j))
        out[rows, columns] = a[rows] @ b[g] if dims == (2, 3) else a[g] @ b[:, columns]
    return out


def grouped_mm(mat1: Any, mat2: Any, offsets: Any) -> Value:
    """Rows past the last end are not written by the kernel of capability 10.0; elsewhere nvFuser
    fails if there are any.
    """
    a = tensor(mat1, *FLOATS, *HALVES)
    product = _grouped(a.data.double(), tensor(mat2, a.dtype).data.double(), offsets)
    return Value(product.to(held(a.dtype)), a.dtype)


def cutlass_nvfp4_grouped_mm(
    mat1: Any,
    mat2: Any,
    scale1: Any,
    scale2: Any,
    alpha: Any,
    problem_sizes: Any,
    expert_offsets: Any,
    sf_offsets: Any,
    *,
    dtype: str = "BFloat16",
    simulated: bool = False,
) -> Value:
    """mat1 e2m1[m, k], mat2 e2m1[g, k, n] with k fastest -> [m, n]: rows of group i times matrix i,
    times alpha[i].

    scale1: block scales [m, k/16] in the grouped order; scale2: [g, n, k/16], each group's in
    tiles; alpha Float[g]; problem_sizes Int32[g, 3], (rows, n, k) of each group; expert_offsets
    Int32[g], first rows; sf_offsets Int32[g], first padded rows of scale1. Refused is also what the
    kernel takes without a check and computes wrongly. simulated: by the arithmetic of the
    instruction, and alpha in float32.
    """
    a, b = tensor(mat1, E2M1).data, tensor(mat2, E2M1).data
    m, k, n, count = _nvfp4_sizes(a, b)
    need(dtype in HALVES, f"a result in {dtype}")
    factor = _offsets("alpha", alpha, "Float", count).double()
    sizes = _offsets("problem_sizes", problem_sizes, "Int32", count, 3).tolist()
    firsts = _offsets("expert_offsets", expert_offsets, "Int32", count).tolist()
    scale_firsts = _offsets("sf_offsets", sf_offsets, "Int32", count).tolist()
    _check_groups(sizes, firsts, scale_firsts, m, n, k)
    scales_a, scales_b = memory_of(scale1, E4M3), memory_of(scale2, E4M3)
    need(
        len(scales_b) == count * n * (k // 16),
        f"scale2 has {len(scales_b)} elements, expected {count * n * (k // 16)}",
    )

    out = torch.full((m, n), poison("Float"), dtype=torch.float64)
    for i, ((rows, _, _), first, scale_first) in enumerate(
        zip(sizes, firsts, scale_firsts, strict=True)
    ):
        left = a[first : first + rows], unswizzle(scales_a, scale_first, rows, k // 16)
        right = b[i].T, unswizzle(scales_b, i * n, n, k // 16)
        if simulated:
            product = block_scaled_mma(left[0], right[0], left[1], right[1])
            out[first : first + rows] = (product * factor[i].float()).double()
        else:
            out[first : first + rows] = _scaled(*left) @ _scaled(*right).T * factor[i]
    return Value(out.to(held(dtype)), dtype)


def _nvfp4_sizes(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int, int]:
    """m, k, n, and the number of groups."""
    fit = a.dim() == 2 and b.dim() == 3 and a.shape[1] == b.shape[1]
    need(fit, f"mat1 {list(a.shape)} and mat2 {list(b.shape)}, expected [m, k] and [g, k, n]")
    (m, k), (count, _, n) = a.shape, b.shape
    need(m > 0, "no rows: nvFuser fails when it compiles this")
    need(k % 64 == 0 and n % 128 == 0, f"k = {k} and n = {n}, expected multiples of 64 and 128")
    need(a.is_contiguous(), "mat1 is not contiguous")
    need(b.transpose(1, 2).is_contiguous(), "mat2: k is not the fastest dimension in memory")
    return m, k, n, count


def _offsets(name: str, x: Any, dtype: str, *shape: int) -> torch.Tensor:
    need(
        isinstance(x, Value) and x.dtype == dtype, f"{name}: expected {dtype}, found {described(x)}"
    )
    need(
        x.shape == shape and x.data.is_contiguous(),
        f"{name} {list(x.shape)}, expected contiguous {list(shape)}",
    )
    return x.data


def _check_groups(
    sizes: list[list[int]], firsts: list[int], scale_firsts: list[int], m: int, n: int, k: int
) -> None:
    """Groups lie within the m rows and do not overlap, nor do their tiles of block scales."""
    row = scale_row = 0
    for i, ((rows, *others), first, scale_first) in enumerate(
        zip(sizes, firsts, scale_firsts, strict=True)
    ):
        need(
            others == [n, k] and rows >= 0,
            f"problem_sizes[{i}] = {sizes[i]}, expected [rows, {n}, {k}]",
        )
        need(
            row <= first and first + rows <= m,
            f"expert_offsets[{i}] = {first} with {rows} rows, expected within {row} to {m}",
        )
        need(
            scale_first % 128 == 0 and scale_first >= scale_row,
            f"sf_offsets[{i}] = {scale_first}, expected a multiple of 128 from {scale_row} on",
        )
        if rows:
            row, scale_row = first + rows, scale_first + ceil_to(rows, 128)


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [rows, k] times scales [rows, k/16], in float64."""
    return codes.double() * scales.double().repeat_interleave(16, dim=1)


OPS = {"grouped_mm": grouped_mm, "cutlass_nvfp4_grouped_mm": cutlass_nvfp4_grouped_mm}
