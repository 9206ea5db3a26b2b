"""The C++ of rules by which scales are chosen, CUDA's and that of CPUs, at the bits at which a rule
turns: as the encodings have them.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from fusions import assert_same_bits
from on_cpu import copy, library, pointer

from fusion_moe.backends.cpu.readers import KERNELS as CPU_KERNELS
from fusion_moe.backends.cuda.launch import KERNELS
from fusion_moe.backends.cxx import scale_class
from fusion_moe.encodings import FP8_E8M0, FP8_ROWS, FP8_ROWS_F32, MXFP8

pytestmark = [pytest.mark.compiler, pytest.mark.once]
_CALL = """
#include "{header}"
extern "C" void choose(const u32* most, i64 count, {stored}* scales, float* over) {{
    for (i64 i = 0; i < count; ++i) {{
        const {rule} by(most[i]);
        scales[i] = by.stored, over[i] = by.over;
    }}
}}
"""


@pytest.mark.parametrize("header", ["codes.cuh", "numbers.h"])
@pytest.mark.parametrize(
    "encoding", [MXFP8, FP8_E8M0, FP8_ROWS, FP8_ROWS_F32], ids=lambda e: e.name
)
def test_scales_are_those_of_the_encoding(encoding, header, tmp_path):
    turns = (
        0,
        1,
        2,
        0x3FFFFF,
        0x400000,
        0x5FFFFF,
        0x600000,
        0x600001,
        0x600002,
        0x7FFFFE,
        0x7FFFFF,
    )
    bits = torch.arange(255, dtype=torch.int32)[:, None] * 2**23 + torch.tensor(turns)
    nan = 0x7FFFFFFF
    bits = torch.cat([bits.flatten(), torch.tensor([0x7F800000, nan])]).int()
    (scale,) = encoding.scales
    want = scale.rounded(bits.view(torch.float32), 1.0)
    found, over = torch.empty_like(want), torch.empty(len(bits))
    copy(tmp_path, KERNELS / "codes.cuh")
    stored = "float" if want.dtype == torch.float32 else "u8"
    text = _CALL.format(header=header, rule=scale_class(encoding), stored=stored)
    choose = library(tmp_path, text, f"-I{CPU_KERNELS}").choose
    choose(pointer(bits), ctypes.c_int64(len(bits)), pointer(found), pointer(over))
    assert_same_bits([found.float().nan_to_num(nan=-1)], [want.float().nan_to_num(nan=-1)])
    factor = scale.over(bits.view(torch.float32)) if scale.over else 1 / want.float()
    assert torch.equal(over.nan_to_num(nan=-1), factor.nan_to_num(nan=-1))
