"""Encodings: how weights are stored, as data. encoding.py defines the data model; nvfp4.py,
mxfp4.py, mxfp8.py, fp8.py, fp8_block.py, integers.py, nf4.py and plain.py are the known encodings.

>>> import torch
>>> q = quantize(torch.tensor([[6.0, -3.0, 0.5, 0.0] * 4]), NVFP4, torch.tensor(1.0))
>>> # 7 is 6.0, 13 is -3.0, 1 is 0.5
>>> [hex(b) for b in q.codes[0, :2].tolist()], q.block_scale.float().tolist()
(['0xd7', '0x1'], [[1.0]])
>>> dequantize(q)[0, :4].tolist()
[6.0, -3.0, 0.5, 0.0]
>>> [part.name for part in MXFP4.parts], MXFP4.weight_bits
(['codes', 'block_scale'], 4.25)
"""

from .checks import (
    check_finite,
    check_matrix_scales,
    check_part_scales,
    check_parts,
)
from .convert import dequantize, exactly, matrix_scale_of, quantize, quantize_weight
from .encoded import EncodedParameter, as_plain_tensors, is_dtensor
from .encoding import (
    ENCODINGS,
    FLOATS,
    ROW,
    Element,
    Encoding,
    Part,
    Quantized,
    Scale,
    find,
    register,
    unregister,
)
from .fp8 import FP8, FP8_CHANNEL, FP8_E8M0, FP8_ROWS, FP8_TENSOR
from .fp8_block import FP8_BLOCKS_F32, FP8_COLUMNS, FP8_COLUMNS_F32, FP8_ROWS_F32
from .integers import INT4, INTEGERS
from .mxfp4 import MXFP4
from .mxfp8 import MXFP8, MXFP8_COLUMNS
from .nf4 import NF4
from .nvfp4 import NVFP4
from .orders import NIBBLES, CodeOrder, Order
from .plain import BF16, F16, F32, PLAIN
from .real import real_tensors
from .requantized import REQUANTIZED, requantizable
from .search import check_rule, has_values

__all__ = [
    "BF16",
    "ENCODINGS",
    "F16",
    "F32",
    "FLOATS",
    "FP8",
    "FP8_BLOCKS_F32",
    "FP8_CHANNEL",
    "FP8_COLUMNS",
    "FP8_COLUMNS_F32",
    "FP8_E8M0",
    "FP8_ROWS",
    "FP8_ROWS_F32",
    "FP8_TENSOR",
    "INT4",
    "INTEGERS",
    "MXFP4",
    "MXFP8",
    "MXFP8_COLUMNS",
    "NF4",
    "NIBBLES",
    "NVFP4",
    "PLAIN",
    "REQUANTIZED",
    "ROW",
    "CodeOrder",
    "Element",
    "EncodedParameter",
    "Encoding",
    "Order",
    "Part",
    "Quantized",
    "Scale",
    "as_plain_tensors",
    "check_finite",
    "check_matrix_scales",
    "check_part_scales",
    "check_parts",
    "check_rule",
    "dequantize",
    "exactly",
    "find",
    "has_values",
    "is_dtensor",
    "matrix_scale_of",
    "quantize",
    "quantize_weight",
    "real_tensors",
    "register",
    "requantizable",
    "unregister",
]
