"""QuantizedLinear: a linear layer as a grouped product of one group."""

from __future__ import annotations

import pytest
import torch

from fusion_moe.encodings import ENCODINGS, NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import ShapeError
from fusion_moe.nn import QuantizedLinear

N, K = 48, 128


def linear(bias: bool = True) -> QuantizedLinear:
    g = torch.Generator().manual_seed(0)
    return QuantizedLinear(
        quantize(torch.randn(N, K, generator=g), NVFP4),
        torch.randn(N, generator=g) if bias else None,
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(K,), (5, K), (2, 3, K), (0, K)])
def test_it_is_a_linear_layer(bias, shape):
    module, x = linear(bias), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = dequantize(
        Quantized(module.weight, module.weight_scale, module.weight_scale_2, encoding=NVFP4)
    )
    want = torch.nn.functional.linear(x, weight, module.bias)
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


@pytest.mark.parametrize("encoding", ["mxfp4", "int4", "fp8", "fp8_tensor"])
def test_other_encodings(encoding):
    weight = quantize(
        torch.randn(N, K, generator=torch.Generator().manual_seed(0)), encoding=ENCODINGS[encoding]
    )
    module, x = (
        QuantizedLinear(weight, torch.ones(N)),
        torch.randn(5, K, generator=torch.Generator().manual_seed(1)),
    )
    want = torch.nn.functional.linear(x, dequantize(weight), torch.ones(N))
    torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
