"""What rows of e4m3 codes are decoded to for products by 16-bit numbers, and what rows are rounded
to there: by the headers themselves, on the CPU, where others stand for what is PTX (cuda_on_cpu/).
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from on_cpu import copy, library, pointer

from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.backends.cxx import scale_class
from fusion_moe.encodings import FP8_ROWS, dequantize, quantize

pytestmark = [pytest.mark.compiler, pytest.mark.once]
_CALL = """
#include "fragment_order.cuh"
#include "coded_rows.cuh"
extern "C" void decode(const u8* codes, const float* scales, i64 pieces, bf16* to) {{
    for (i64 i = 0; i < pieces; ++i)
        reinterpret_cast<Vector<bf16, 8>*>(to)[i] =
            decoded_piece<{k}, {order}>(codes, scales, i);
}}
"""
_ROUND = f"""
#include "codes.cuh"
extern "C" void round_rows(uint4* x) {{
    on_threads([=] {{
        uint4& own = x[threadIdx.x];
        own = rounded_to_codes<{scale_class(FP8_ROWS)}>(own);
    }});
}}
"""


@pytest.mark.parametrize(("k", "order"), [(192, False), (192, True), (400, False)])
def test_decoded_rows_are_those_of_the_encoding(k, order, tmp_path):
    rows = quantize(torch.randn(5, k) * 2.0 ** torch.arange(-4, 6, 2)[:, None], FP8_ROWS)
    headers = ("codes.cuh", "coded_rows.cuh", "fragment_order.cuh")
    copy(tmp_path, *(KERNELS / header for header in headers))
    found = torch.empty(5, k, dtype=torch.bfloat16)
    codes, scales = (t.contiguous() for t in rows)
    library(tmp_path, _CALL.format(k=k, order=str(order).lower())).decode(
        pointer(codes), pointer(scales), ctypes.c_int64(found.numel() // 8), pointer(found)
    )
    if order:  # see fragment_order.cuh
        k_ = torch.arange(k)
        place = k_ // 64 * 64 + k_ // 2 % 4 * 16 + k_ // 8 % 2 * 8 + k_ // 16 % 4 * 2 + k_ % 2
        found = found[:, place]
    assert torch.equal(found.float(), dequantize(rows).float())


def test_rows_are_rounded_to_what_their_codes_stand_for(tmp_path):
    """Also zeros, numbers that have no scale of their own, and what is not finite."""
    x = torch.randn(8, 256) * 2.0 ** torch.arange(-24, 8, 4)[:, None]
    x[0, :128], x[1, 3], x[2, 200], x[3, 5] = 0, 3e38, torch.inf, torch.nan
    x[4] = 2.0**-133 * torch.randint(-2, 3, (256,))
    x = x.bfloat16()
    want = dequantize(quantize(x, FP8_ROWS)).bfloat16()
    copy(tmp_path, KERNELS / "codes.cuh")
    library(tmp_path, _ROUND).round_rows(pointer(x))
    assert want.isnan().sum() == 2 * 128
    found, want = (t.nan_to_num(9).view(torch.int16) for t in (x, want))
    assert torch.equal(found, want)
