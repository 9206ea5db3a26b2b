"""Activations of a table, and modules that stand between layers in a Sequential."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import assert_near, layer, uniform, wide
from torch import Tensor, nn
from torch.nn import functional as F
from ways import compiled

from fusion_moe import nn as ours
from fusion_moe import options
from fusion_moe.errors import OptionError, ShapeError

G, H, I = 3, 24, 16
SPLITS = torch.tensor([5, 0, 6])
ROWS = 13


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


# what each computes of its parts
MEANT: dict[str, Any] = {
    "SReLU": lambda x: F.relu(x).square(),
    "ScaledSReLU": lambda x: F.relu(x).square(),
    "ScaledSiTUGLU": situ,
    "GLU": lambda gate, up: gate.sigmoid() * up,
    "SwiGLU": lambda gate, up: F.silu(gate) * up,
    "GEGLU": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "QGEGLU": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up,
    "ReGLU": lambda gate, up: F.relu(gate) * up,
    "SReGLU": lambda gate, up: F.relu(gate).square() * up,
}


@pytest.mark.parametrize("name", MEANT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_against_float64(name, dtype):
    gated = name.endswith("GLU")
    for size in (None, 4) if gated else (None,):
        module = getattr(ours, name)(*[size] * gated)
        x = uniform(5, 7, 2 * I if gated else I, dtype=dtype, low=-4, high=4).requires_grad_()
        scales = [uniform(5, 7, seed=1, low=0.0).requires_grad_()] * module.scaled
        dy = uniform(5, 7, I, dtype=dtype, seed=2)
        with options.override(target="reference"):
            found = module(x, *scales)
            found.backward(dy)
        other, factors = wide(x), [wide(t) for t in scales]
        columns = other if size is None else ours.deinterleave(other, size, -1)
        want = MEANT[name](*columns.chunk(1 + gated, -1))
        want = want * factors[0][..., None] if scales else want
        want.backward(dy.double())
        assert found.dtype == dtype
        for a, b, scale in ((found, want, 16), (x.grad, other.grad, 16)):
            assert_near(a, b, dtype, scale)
        for a, b in zip(scales, factors, strict=True):
            assert_near(a.grad, b.grad, torch.float32, 1000)


@pytest.mark.parametrize("name", MEANT)
def test_a_layer_with_each_is_one_program(name, monkeypatch):
    module = getattr(ours, name)()
    model = ours.Sequential(layer(G, H, module.parts * I), module, layer(G, I, H, seed=9))
    x, scales = uniform(ROWS, H), [uniform(ROWS, seed=3, low=0.0)] * module.scaled
    programs = []
    run = torch.ops.fusion_moe.run

    def counted(text: str, *args: Any) -> list[Tensor]:
        programs.append(text)
        return run(text, *args)

    with torch.no_grad(), options.override(target="reference"):
        want = model[2](module(model[0](x, SPLITS), *scales), SPLITS)
        monkeypatch.setattr(torch.ops.fusion_moe, "run", counted)
        found = model(x, SPLITS, *scales, SPLITS)
    assert len(programs) == 1
    assert_near(found, want.double(), torch.float32, 10)


def between() -> ours.Sequential:
    return ours.Sequential(
        ours.MakeExtraOutput("residual"),
        nn.RMSNorm(H),
        layer(G, H, 2 * I),
        ours.SwiGLU(),
        layer(G, I, H, seed=9),
        ours.AddExtraInput("residual"),
        ours.MakeExtraOutput(),
        ours.ConstantScale(0.5),
        ours.Bias(H),
        ours.AddExtraInput(),
        nn.Dropout(0.5),
        nn.Linear(H, 4),
        ours.Reshape(-1, 2),
    ).eval()


@pytest.mark.compiler
def test_channels_and_steps_between_layers():
    """As written out; compiled too."""
    model, x, added = between(), uniform(ROWS, H).requires_grad_(), uniform(ROWS, H, seed=5)
    with torch.no_grad():
        model[8].bias += 1
    y = model[3](model[2](model[1](x), SPLITS))
    residual = model[4](y, SPLITS) + x
    want = model[11](residual * 0.5 + model[8].bias + added).reshape(-1, 2)
    (of_x,) = torch.autograd.grad(want.sum() + residual.sum(), x)
    for f in model, compiled(model):
        found, extra = f(x, SPLITS, SPLITS, added)
        for a, b in ((found, want), (extra, residual)):
            assert_near(a, b.double(), torch.float32, 10)
        (got,) = torch.autograd.grad(found.sum() + extra.sum(), x)
        assert_near(got, of_x.double(), torch.float32, 10)


def test_an_activation_of_your_own():
    text = ours.activation(lambda gate, up: torch.tanh(gate) * up)
    module, x = ours.Activation(text, scaled=True), uniform(6, 2 * I)
    gate, up = x.chunk(2, -1)
    assert_near(module(x, torch.full((6,), 2.0)), 2 * (gate.tanh() * up).double(), torch.float32, 2)
    assert str(module).startswith("Activation(t2 = tanh(gate); ")


def test_bad_calls():
    x = uniform(ROWS, H)
    with pytest.raises(OptionError, match=r"AddExtraInput\('late'\); expected a MakeExtraOutput"):
        ours.Sequential(ours.AddExtraInput("late"), ours.MakeExtraOutput("late"))(x)
    with pytest.raises(ShapeError, match="0 tensors beside x; expected 1: what it adds"):
        ours.Sequential(ours.AddExtraInput())(x)
    with pytest.raises(ShapeError, match="x of 25 columns; expected a multiple of 2"):
        ours.SwiGLU()(uniform(3, 25))
    with pytest.raises(ShapeError, match="scales; expected none"):
        ours.SReLU()(x, torch.ones(ROWS))
    with pytest.raises(ShapeError, match="no scales; expected"):
        ours.ScaledSReLU()(x)
    for beta in 0, -1.0, float("inf"), float("nan"):
        with pytest.raises(OptionError, match="expected a positive number"):
            ours.ScaledSiTUGLU(beta1=beta)
    parameters = ours.activation(lambda x, slope: x * slope, parts=1, parameters=1)
    with pytest.raises(OptionError, match="1 parameters; expected one without"):
        ours.Activation(parameters)
