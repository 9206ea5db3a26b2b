"""What rows of e4m3 codes are decoded to for products by 16-bit numbers: by the header itself, on
the CPU, where another one stands for what is PTX (cuda_on_cpu/).
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from on_cpu import copy, library, pointer

from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.encodings import FP8_ROWS, dequantize, quantize

pytestmark = [pytest.mark.compiler, pytest.mark.once]
_CALL = """
#include "coded_rows.cuh"
extern "C" void decode(const u8* codes, const float* scales, i64 pieces, bf16* to) {{
    for (i64 i = 0; i < pieces; ++i)
        reinterpret_cast<Vector<bf16, 8>*>(to)[i] =
            decoded_piece<bf16, {k}, {order}>(codes, scales, i);
}}
"""


@pytest.mark.parametrize(("k", "order"), [(192, False), (192, True), (400, False)])
def test_decoded_rows_are_those_of_the_encoding(k, order, tmp_path):
    rows = quantize(torch.randn(5, k) * 2.0 ** torch.arange(-4, 6, 2)[:, None], FP8_ROWS)
    copy(tmp_path, KERNELS / "coded_rows.cuh", KERNELS / "fragment_order.cuh")
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
