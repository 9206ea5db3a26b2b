"""QuantizedLinear: a linear layer as a grouped product of one group."""

from __future__ import annotations

import pytest
import torch

from fusion_moe.encodings import ENCODINGS, NVFP4, dequantize, quantize
from fusion_moe.errors import ShapeError
from fusion_moe.nn import QuantizedLinear

N, K = 48, 128


def linear(encoding: str = "nvfp4", bias: bool = True) -> QuantizedLinear:
    g = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(N, K, generator=g), ENCODINGS[encoding])
    return QuantizedLinear(weight, torch.randn(N, generator=g) if bias else None)


@pytest.mark.parametrize(
    ("encoding", "bias"),
    [("nvfp4", False), *((e, True) for e in ("nvfp4", "mxfp4", "int4", "fp8", "fp8_tensor"))],
)
@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K), (0, K)])
def test_it_is_a_linear_layer(encoding, bias, shape):
    module, x = (
        linear(encoding, bias),
        torch.randn(shape, generator=torch.Generator().manual_seed(1)),
    )
    want = torch.nn.functional.linear(x, dequantize(module.weight_of("weight")), module.bias)
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)


def test_a_cast_leaves_the_weight_alone():
    module = linear()
    module.register_buffer("input_scale", torch.tensor(0.1))
    module.bfloat16()
    assert [
        t.dtype
        for t in (
            module.weight,
            module.weight_scale,
            module.weight_scale_2,
            module.input_scale,
            module.bias,
        )
    ] == [
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]


def test_a_bias_of_another_length():
    with pytest.raises(
        ShapeError,
        match=r"weight \[48, 128\] and bias \[47\]; expected \[N, K\] "
        r"and \[N\]",
    ):
        QuantizedLinear(quantize(torch.randn(N, K), NVFP4), torch.randn(47))
