"""What Transformer Engine's recipe Float8BlockScaling has beside `fp8_rows` and `fp8_e8m0`: blocks
along columns, and scales that are no powers of two.

    codes        float8_e4m3fn [..., N, K]
    block_scale  float32       [..., N/128, K]  fp8_columns: one for 128 rows of a column; powers of
                                                two, chosen as in fp8_rows
                               [..., N, K/128]  fp8_rows_f32: one for 128 columns of a row
                               [..., N/128, K]  fp8_columns_f32: one for 128 rows of a column
                               [..., N, K/128]  fp8_blocks_f32: one for 128 x 128, as in fp8

In the last three, numbers are multiplied by float32(448 / amax), or by 1 for zeros, and rounded;
the scale is float32(1 / that). The factor is the largest bfloat16 at most. (Transformer Engine
takes the largest number of the input's dtype.) In all four a block with infinity or NaN has the
scale NaN. (Transformer Engine rounds infinity to 448.) Source: its common/recipe/recipe_common.cuh.

>>> import torch
>>> from fusion_moe.encodings import quantize
>>> q = quantize(torch.full((1, 128), 3.0), FP8_ROWS_F32)
>>> q.codes[0, 0].item(), q.block_scale.item() == 3 / 448
(448.0, True)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .encoding import Encoding, Scale, register
from .fp8 import BLOCK, FP8_ROWS
from .mxfp8 import E4M3


def _over(amax: Tensor) -> Tensor:
    # a tensor: CUDA would multiply by a reciprocal
    over = torch.full_like(amax, E4M3.maximum) / amax
    over = over.clamp(max=torch.finfo(torch.bfloat16).max)
    return torch.where(amax == 0, 1.0, over.where(amax.isfinite(), torch.nan))


def _f32(name: str, axis: int = -1, rows: int = 1) -> Encoding:
    scale = Scale(
        "block_scale",
        torch.float32,
        BLOCK,
        lambda amax, outer: _over(amax).reciprocal(),
        signed=False,
        rows=rows,
        short=axis == -1,
        over=_over,
    )
    return register(Encoding(name, E4M3, (scale,), axis))


_COLUMN = replace(FP8_ROWS.scales[0], short=False)
FP8_COLUMNS = register(Encoding("fp8_columns", E4M3, (_COLUMN,), axis=-2))
FP8_ROWS_F32 = _f32("fp8_rows_f32")
FP8_COLUMNS_F32 = _f32("fp8_columns_f32", axis=-2)
FP8_BLOCKS_F32 = _f32("fp8_blocks_f32", rows=BLOCK)
