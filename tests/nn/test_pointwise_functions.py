"""Ordinary pointwise functions of torch as activations: what each computes, and its gradients,
against torch; and what a refusal says.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fusion_moe import options
from fusion_moe.errors import UnsupportedError
from fusion_moe.ir.activation import read
from fusion_moe.nn import activation

ONE = {
    **{
        name: getattr(torch, name)
        for name in (
            *("abs", "neg", "exp", "exp2", "expm1", "log1p", "sqrt", "square"),
            *("sin", "cos", "tan", "asin", "atan", "acos", "sinh", "cosh", "tanh", "asinh"),
            *("atanh", "sinc", "erf", "erfc", "sigmoid", "floor", "ceil", "round", "trunc"),
            *("frac", "deg2rad", "nan_to_num"),
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            *("relu", "relu6", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus"),
            *("softsign", "logsigmoid", "tanhshrink", "softshrink", "hardshrink", "hardtanh"),
            *("hardswish", "hardsigmoid", "leaky_relu"),
        )
    },
    "gelu of tanh": partial(F.gelu, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.1, -2.0),
    "softplus with a beta": lambda x: F.softplus(x, 2.0, 5.0),
    "leaky relu in place": lambda x: F.leaky_relu(x * 1.0, 0.2, inplace=True),
    "masked_fill": lambda x: x.masked_fill(x < 0.2, 0.5),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "where of numbers": lambda x: x * torch.where(x > 0, 1.0, 0.5),
    "a mask as a factor": lambda x: x * (x > 0),
    "a mask of type": lambda x: (x > 0).type_as(x) * x,
    "masks": lambda x: torch.where(~(x > 0) | (x > 1) & (x < 2) ^ (x < 1.5), x, -x),
    "sign": lambda x: x * x.sign(),
    "sgn": lambda x: x.abs().sqrt() * x.sgn(),
    "clamp": lambda x: x.clamp(-1, 1) + x.clip(min=0.5) + x.clamp_min(0.1) + x.clamp_max(0.2),
    "clamp of tensors": lambda x: torch.clamp(x, -x.square(), x.square() + 0.5),
    "zeros_like": lambda x: torch.maximum(x, torch.zeros_like(x)) + torch.full_like(x, 2.0),
    "log2": lambda x: torch.log2(x.abs() + 1) + torch.log10(x.abs() + 2),
    "acosh": lambda x: x.cosh() - 1,
    "powers": lambda x: x**3 + 2**x + (x.abs() + 1) ** 0.5 + (x + 9).pow(-1),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5) + torch.rsub(x, 1.0) + 1 / (x + 9),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
    "lerp": lambda x: torch.lerp(x, 2 * x, 0.3) + torch.lerp(x, -x, 0.8),
    "isfinite": lambda x: torch.where(torch.isfinite(x) & ~torch.isnan(x), x, 0.0),
    "dtypes": lambda x: x.double().tanh().float(),
    "ndtr": torch.special.ndtr,
}
TWO = {
    **{
        name: getattr(torch, name)
        for name in ("add", "sub", "mul", "maximum", "minimum", "fmax", "fmin", "logaddexp")
    },
    "div": lambda gate, up: gate / (1 + up.abs()),
    "pow": lambda gate, up: (gate.abs() + 1) ** up,
    "prelu": lambda gate, up: torch.where(gate > 0, gate, up * gate),
    "masked_fill": lambda gate, up: gate.masked_fill(up < 0, 0.0) * up,
    "lerp": lambda gate, up: torch.lerp(gate, up, 0.4),
    "losses": lambda gate, up: (
        F.smooth_l1_loss(gate, up, reduction="none") + F.huber_loss(gate, up, reduction="none")
    ),
}
# inside of which a function is computed; others anywhere
WITHIN = dict.fromkeys(("asin", "acos", "atanh"), 0.9) | {"log1p": 0.9}
POSITIVE = ("sqrt",)
# where functions of one argument are pieced together
JOINTS = [0.0, *(s * x for x in (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0) for s in (-1, 1))]
# whose derivative there is that of clamp, which torch's versions disagree on, or none
UNLIKE = ("relu6", "hardtanh", "hardswish", "hardsigmoid", "clamp of tensors", "zeros_like", "sgn")


def columns(name, parts):
    x = torch.linspace(-3.2, 3.1, 96)
    if parts == 1 and name not in UNLIKE:
        x[: len(JOINTS)] = torch.tensor(JOINTS)
    x = x.reshape(3, 32)
    x = (x * WITHIN[name] / 3.2) if name in WITHIN else x.abs() + 0.1 if name in POSITIVE else x
    x = x[:, torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    return [t.clone().requires_grad_() for t in x.chunk(parts, 1)]


def passes(function, inputs):
    """The result, and the gradients for one that is not of ones."""
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, torch.linspace(0.5, 1.5, y.numel()).view(y.shape))]


@pytest.mark.parametrize(
    ("name", "parts"), [*((n, 1) for n in ONE), *((n, 2) for n in TWO)], ids=str
)
def test_functions_and_their_gradients(name, parts):
    function = (ONE if parts == 1 else TWO)[name]
    fusion = read(activation(lambda *x: function(*x), parts=parts)).fusion
    inputs = columns(name, parts)

    def ours(*inputs):
        m, n = inputs[0].shape
        with options.override(target="reference"):
            return torch.ops.fusion_moe.run(str(fusion), [torch.cat(inputs, 1)], [m, n])[0]

    for found, want in zip(passes(ours, inputs), passes(function, inputs), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (torch.lgamma, r"aten\.lgamma, which has no translator"),
        (lambda x: torch.remainder(x, 2.0), r"aten\.remainder, which has no translator"),
        (lambda x: x.softmax(-1), "aten._softmax, which has no translator"),
        (lambda x: x * x.detach(), "a tensor that is detached"),
    ],
)
def test_refusals_name_the_function(function, says):
    with pytest.raises(UnsupportedError, match=says) as refused:
        activation(function, parts=1)
    assert "prims::" not in str(refused.value)


def clamped(x, limit=7.0, alpha=1.702):
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=limit) * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({}, r"a function of 1 tensors \(x\) for 2; .* write f\(gate, up\)"),
        ({"parts": 1}, "f\\(gate"),
    ],
)
def test_a_function_that_chunks_is_told_what_to_write(how, says, capfd):
    with pytest.raises(UnsupportedError, match=says):
        activation(clamped, **how)
    assert "fake_tensor" not in capfd.readouterr().err
    assert math.isfinite(read(activation(lambda gate, up, limit=7.0: gate.clamp(max=limit))).parts)
