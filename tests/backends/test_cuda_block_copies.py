"""What kernels/block_copies.cuh makes, on the CPU, where a header stands for what is PTX
(cuda_on_cpu/): codes and scales bit for bit those of the encodings, by rows and by columns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from cover import few
from fusions import assert_same_bits, numbers_of_all_sizes
from on_cpu import copy, library, pointer
from torch import Tensor

from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.backends.cxx import scale_class
from fusion_moe.encodings import (
    FP8_COLUMNS,
    FP8_E8M0,
    FP8_ROWS,
    MXFP8,
    MXFP8_COLUMNS,
    quantize,
)
from fusion_moe.ir.kinds.runs import dequantize_runs, quantize_runs, transpose_row_blocks

pytestmark = [pytest.mark.compiler, pytest.mark.once]
SIZES = (130, 0, 33, 128, 3)
MATRICES = [(384, 256), (352, 160), (32, 96)]  # K, N: whole blocks, or short last ones
RUNS = f"GroupedRows<{len(SIZES)}, 128>{{ends, rows, nullptr}}"
RUNS_OF_32 = RUNS.replace("128", "32")
ROW = """const auto row = [=](i64 m) {
    return [=](i64 j0, float (&eight)[8]) {
        for (int v = 0; v < 8; ++v) eight[v] = widen(x[m * K + j0 + v]);
    };
};"""
CALLS = f"""
extern "C" void runs(const bf16* x, const i32* ends, i64 rows, u8* by_rows, float* row_scales,
                     u8* by_columns, float* column_scales) {{
    {ROW}
    on_threads([=] {{
        make_copies<Lanes<K>, bf16>({RUNS}, row,
            BlockCopy<{scale_class(FP8_ROWS)}>{{by_rows, row_scales, nullptr}},
            TurnedCopy<{scale_class(FP8_ROWS)}>{{by_columns, column_scales}}, NoCopy{{}});
    }});
}}
extern "C" void turned(const u8* codes, const i32* ends, i64 rows, u8* by_columns) {{
    on_threads([=] {{ transpose_row_blocks<K>({RUNS}, codes, by_columns); }});
}}
extern "C" void blocks_of_32(const bf16* x, const i32* ends, i64 rows, u8* by_rows, u8* row_scales,
                             u8* by_columns, u8* column_scales) {{
    {ROW}
    on_threads([=] {{
        make_copies<Lanes<K, 32>, bf16, true>({RUNS_OF_32}, row,
            BlockCopy<{scale_class(MXFP8)}>{{by_rows, row_scales, nullptr}},
            BlockCopy<{scale_class(MXFP8)}>{{by_columns, column_scales, nullptr}}, NoCopy{{}});
    }});
}}
extern "C" void read_32(const u8* codes, const u8* scales, const i32* ends, i64 rows, bf16* x) {{
    on_threads([=] {{ read_copy<Lanes<K, 32>>({RUNS_OF_32}, codes, scales, x); }});
}}
extern "C" void read_128(const u8* codes, const float* scales, const i32* ends, i64 rows,
                         bf16* x) {{
    on_threads([=] {{ read_copy<Lanes<K>>({RUNS}, codes, scales, x); }});
}}
extern "C" void both_ways(const bf16* x, u8* codes, u8* scales, u8* turned, u8* turned_scales) {{
    {ROW}
    on_threads([=] {{
        make_copies<Lanes<K>, bf16>(MatrixTiles<N>{{2}}, row, NoCopy{{}}, NoCopy{{}},
            BothWays<{scale_class(MXFP8)}, N>{{{{codes, scales, nullptr}}, turned, turned_scales}});
    }});
}}
extern "C" void other_way(const u8* codes, const u8* scales, u8* turned, u8* turned_scales) {{
    on_threads([=] {{ transpose_blocks<N, K>(2, codes, scales, turned, turned_scales); }});
}}
"""


@pytest.fixture(scope="module", params=few(map(pytest.param, MATRICES), 2), ids=str)
def sizes(request) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module")
def kernels(sizes, tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("kernels")
    copy(folder, *(KERNELS / f"{name}.cuh" for name in ("codes", "team", "block_copies")))
    constants = "constexpr i32 K = {}, N = {};".format(*sizes)
    return library(folder, f'#include "block_copies.cuh"\n{constants}\n{CALLS}')


def numbers(rows: int, k: int) -> Tensor:
    x = numbers_of_all_sizes(rows, k).bfloat16()
    return torch.where(x.isinf(), 1, x)


def made(kernel: Callable[..., object], given: Sequence[Tensor | int], like: Sequence[Tensor]):
    """What a kernel writes into zeros."""
    found = [torch.zeros(t.shape, dtype=t.dtype) for t in like]
    kernel(*(pointer(t) if isinstance(t, Tensor) else ctypes.c_int64(t) for t in (*given, *found)))
    return found


def test_rows_of_groups(kernels, sizes):
    """From one read; and from codes of an earlier one."""
    x, ends = numbers(sum(SIZES) + 6, sizes[0]), torch.tensor(SIZES).cumsum(0).int()
    codes, scales = quantize_runs(x, ends, FP8_COLUMNS)
    turned = transpose_row_blocks(codes, ends, FP8_COLUMNS)
    want = [*quantize(x, FP8_ROWS), turned, scales]
    assert_same_bits(made(kernels.runs, (x, ends, len(x)), want), want)
    assert_same_bits(made(kernels.turned, (codes, ends, len(x)), [turned]), [turned])


def test_rows_of_groups_in_blocks_of_32(kernels, sizes):
    """As the encodings have them, from one read."""
    x, ends = numbers(sum(SIZES) + 6, sizes[0]), torch.tensor(SIZES).cumsum(0).int()
    want = [*quantize(x, MXFP8), *quantize_runs(x, ends, MXFP8_COLUMNS)]
    assert_same_bits(made(kernels.blocks_of_32, (x, ends, len(x)), want), want)


@pytest.mark.parametrize("encoding", [MXFP8_COLUMNS, FP8_COLUMNS], ids=lambda e: e.name)
def test_saved_copies_are_read(kernels, sizes, encoding):
    """Zeros in rows of no group."""
    x, ends = numbers(sum(SIZES) + 6, sizes[0]), torch.tensor(SIZES).cumsum(0).int()
    saved = quantize_runs(x, ends, encoding)
    (found,) = made(getattr(kernels, f"read_{encoding.block}"), (*saved, ends, len(x)), [x])
    want = dequantize_runs(saved, ends).bfloat16()
    assert torch.equal(found.nan_to_num(nan=-1), want.nan_to_num(nan=-1))


def test_matrices_both_ways(kernels, sizes):
    """From one read; and from a copy that was made before."""
    k, n = sizes
    x = numbers(2 * n, k).view(2, n, k)
    copied, other = ([*quantize(t, FP8_E8M0)] for t in (x, x.mT.contiguous()))
    assert_same_bits(made(kernels.both_ways, (x,), [*copied, *other]), [*copied, *other])
    assert_same_bits(made(kernels.other_way, copied, other), other)
