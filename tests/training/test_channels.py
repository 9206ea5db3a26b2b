"""Activations of a table, and modules that stand between layers in a Sequential."""

from __future__ import annotations

import pytest
import torch
from bad_calls import messages
from layers import assert_near, layer, uniform
from torch import nn
from ways import Called, compiled

from fusion_moe import nn as ours, options

pytestmark = pytest.mark.usefixtures("meaning_without_all")

G, H, I = 3, 24, 16
SPLITS = torch.tensor([5, 0, 6])
ROWS = 13


ACTIVATIONS = (
    *("SReLU", "ScaledSReLU", "ScaledSiTUGLU", "GLU", "SwiGLU", "QGELU"),
    *("GEGLU", "QGEGLU", "ReGLU", "SReGLU", "ClampedSwiGLU", "SiTUGLU"),
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_layer_with_each_is_one_program(name):
    module = getattr(ours, name)()
    model = ours.Sequential(layer(G, H, module.parts * I), module, layer(G, I, H, seed=9))
    x, scales = uniform(ROWS, H), [uniform(ROWS, seed=3, low=0.0)] * module.scaled
    with torch.no_grad(), options.override(target="reference"):
        want = model[2](module(model[0](x, SPLITS), *scales), SPLITS)
        with Called() as programs:
            found = model(x, SPLITS, *scales, SPLITS)
    assert programs.names == ["run"]
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
@pytest.mark.usefixtures("call_by_call")
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


def test_bad_calls(golden):
    x = uniform(ROWS, H)
    late = ours.AddExtraInput("late"), ours.MakeExtraOutput("late")
    parameters = ours.activation(lambda x, slope: x * slope, parts=1, parameters=1)
    cases = {
        "read before it is made": lambda: ours.Sequential(*late)(x),
        "nothing to add": lambda: ours.Sequential(ours.AddExtraInput())(x),
        "an odd number of columns": lambda: ours.SwiGLU()(uniform(3, 25)),
        "scales for nothing": lambda: ours.SReLU()(x, torch.ones(ROWS)),
        "no scales": lambda: ours.ScaledSReLU()(x),
        "parameters": lambda: ours.Activation(parameters),
        **{
            f"beta {b}": lambda b=b: ours.ScaledSiTUGLU(beta1=b)
            for b in (0, -1.0, float("inf"), float("nan"))
        },
    }
    golden(messages(cases))
