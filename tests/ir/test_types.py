"""Types: their text, and what no input may be."""

import pytest
import torch

from fusion_moe import FusionDefinition
from fusion_moe.errors import DtypeError, FusionError, ShapeError
from fusion_moe.ir.binding import storage_shape
from fusion_moe.ir.sizes import ceildiv, symbol
from fusion_moe.ir.types import DTYPES, Groups, Rows, TensorType, dim_value, dtype_name, plain
from fusion_moe.layouts.groups import bound

M = symbol("m")
GROUPS = Groups("g", 16)


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (TensorType((M / GROUPS, 256), "bf16"), "bf16[m/g, 256]"),
        (TensorType((2 * M / GROUPS, 256), "bf16"), "bf16[2*m/g, 256]"),
        (TensorType(((M + 1) / GROUPS,), "f32"), "f32[(m + 1)/g]"),
        (TensorType((16,), "i32", ends=GROUPS), "i32[16]@ends(g)"),
        (TensorType((16, 256, 128), "nvfp4"), "nvfp4[16, 256, 128]"),
        (TensorType((M / GROUPS % 128, 16), "f8e4m3", "sf128x4"), "f8e4m3[m/g%128, 16]@sf128x4"),
        (TensorType((7 / GROUPS, ceildiv(M, 4)), "u8"), "u8[7/g, ceildiv(m, 4)]"),
        (TensorType((), "f32"), "f32[]"),
    ],
)
def test_text(type, text):
    assert str(type) == text


def test_dtype_names():
    assert {dtype_name(d): d for d in DTYPES.values()} == DTYPES
    with pytest.raises(DtypeError, match=r"torch\.int8"):
        dtype_name(torch.int8)


def test_sizes_of_dimensions():
    env = {"m": 300}
    assert dim_value(M / GROUPS, env) == 300
    assert dim_value(M / GROUPS % 128, env) == bound(300, 16, 128)
    assert plain(M / GROUPS % 128) == M == Rows(M, GROUPS).total
    assert storage_shape(TensorType((4, M, 64), "nvfp4"), env) == (4, 300, 32)
    assert storage_shape(TensorType((M / GROUPS % 128, 5), "f8e4m3", "sf128x4"), env) == (
        bound(300, 16, 128),
        8,
    )
    assert list(TensorType((M / Groups("h", symbol("n")), 3), "f32").symbols()) == ["m", "n"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"shape": [4], "dtype": "bf17"}, DtypeError),
        ({"shape": [4], "dtype": torch.int8}, DtypeError),
        ({"shape": [4], "dtype": "f32", "layout": "sideways"}, ShapeError),
        ({"shape": [16], "dtype": "f32", "ends": GROUPS}, ShapeError),
        ({"shape": [15], "dtype": "i32", "ends": GROUPS}, ShapeError),
        ({"shape": [4], "dtype": "f32", "role": "guest"}, FusionError),
    ],
)
def test_inputs_that_no_tensor_is(arguments, error):
    with pytest.raises(error):
        FusionDefinition().define_tensor(**arguments)


def test_a_name_is_given_once():
    fd = FusionDefinition()
    fd.define_size("m")
    with pytest.raises(FusionError, match="'m' is taken"):
        fd.define_groups("m", 4)
