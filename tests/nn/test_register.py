"""Experts of a user's own class: a converter, `quantize_`, and a model that computes as before."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bad_calls import messages
from torch import nn

import fusion_moe
from fusion_moe import NVFP4Config, NVFP4Experts, register_converter
from fusion_moe.encodings import dequantize
from fusion_moe.errors import NonFiniteError, OptionError, UnsupportedError
from fusion_moe.nn import contract_of, convert, unregister_converter

E, K, H, I = 4, 2, 64, 32


class Mine(nn.Module):
    """A user's experts: up before gate in one weight [E, H, 2I], and the router's weights before
    its choice.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(E, H, 2 * I) / 8)
        self.second = nn.Parameter(torch.randn(E, I, H) / 8)

    def forward(self, x, weights, choice):
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(choice == e)
            up, gate = (x[token] @ self.first[e]).chunk(2, -1)
            y.index_add_(
                0,
                token,
                (nn.functional.silu(gate) * up) @ self.second[e] * weights[token, slot, None],
            )
        return y


class Replaced(nn.Module):
    """What takes its place, called as it was."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, weights, choice):
        return self.experts(x, choice, weights)


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router, self.experts = nn.Linear(H, E), experts

    def forward(self, x):
        weights, choice = self.router(x).softmax(-1).topk(K)
        return x + self.experts(x, weights, choice)


def to_nvfp4(experts, config):
    up, gate = experts.first.mT.chunk(2, 1)
    return Replaced(
        NVFP4Experts.from_float(
            torch.cat([gate, up], 1), experts.second.mT, config.activation_format
        )
    )


@pytest.fixture
def register():
    """Registers a converter of Mine for the length of a test."""
    yield lambda function=to_nvfp4: register_converter(Mine)(function)
    unregister_converter(Mine)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Layer(Mine()), Layer(Mine())).eval()


@torch.no_grad()
def test_end_to_end(register, model):
    assert register() is to_nvfp4
    originals, x = [layer.experts for layer in model], torch.randn(9, H)
    before = model(x)
    fusion_moe.quantize_(model)
    assert [type(layer.experts) for layer in model] == [Replaced, Replaced]
    for layer, mine in zip(model, originals, strict=True):
        experts = layer.experts.experts
        gate, up = dequantize(experts.weight_of("gate_up")).chunk(2, 1)
        mine.first.copy_(torch.cat([up, gate], 1).mT)
        mine.second.copy_(dequantize(experts.weight_of("down")).mT)
    want = nn.Sequential(*(Layer(mine) for mine in originals))
    for layer, quantized in zip(want, model, strict=True):
        layer.router = quantized.router
    torch.testing.assert_close(model(x), want(x), rtol=1e-4, atol=1e-4)
    assert 0 < (model(x) - before).norm() < 0.3 * before.norm()
    torch.testing.assert_close(
        torch.compile(model, backend="fusion_moe")(x), model(x), rtol=1e-4, atol=1e-4
    )
    fusion_moe.quantize_(model)  # nothing is left to do


def test_classes_that_derive_are_converted_too_the_nearest_first(register):
    class Derived(Mine):
        pass

    register()
    assert type(convert(Derived())) is Replaced
    register_converter(Derived)(lambda experts, config: nn.Identity())
    assert type(convert(Derived())) is nn.Identity
    assert type(convert(Mine())) is Replaced


def test_it_goes_before_what_the_library_has():
    class Described(nn.Module):
        has_gate, is_concatenated, has_bias, is_transposed = True, True, False, False

        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = (
                nn.Parameter(torch.randn(E, 2 * I, H)),
                nn.Parameter(torch.randn(E, H, I)),
            )

    assert contract_of(Described()) is not None
    register_converter(Described)(lambda experts, config: nn.Identity())
    assert type(convert(Described())) is nn.Identity


def test_it_gets_the_config(register):
    seen = []
    register(lambda experts, config: seen.append(config) or to_nvfp4(experts, config))
    config = NVFP4Config("nvfp4")
    assert convert(Mine(), config).experts.activation_format == "nvfp4"
    assert seen == [config] * 2


def test_nothing_is_replaced_if_one_of_them_fails(register, model):
    model[1].experts.second.data[1, 2, 3] = float("nan")
    register()
    with pytest.raises(NonFiniteError, match=r"1\.experts\.second"):
        fusion_moe.quantize_(model)
    assert [type(layer.experts) for layer in model] == [Mine, Mine]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda experts, config: None,
            "0.experts: the converter of Mine returned a NoneType; "
            "expected a new module, which is no Mine",
        ),
        (
            lambda experts, config: experts,
            "0.experts: the converter of Mine returned a Mine",
        ),
        (lambda experts, config: Mine(), "0.experts: the converter of Mine returned a Mine"),
        (
            lambda experts: None,
            "0.experts: the converter of Mine failed: TypeError: .* takes 1 positional argument",
        ),
        (
            lambda experts, config: nn.Linear(int(experts.first.max().item()), 1),
            "0.experts: the converter of Mine failed: RuntimeError: .*; it is called with "
            "parameters on the meta device first",
        ),
    ],
    ids=[
        "nothing",
        "itself",
        "another of them",
        "a function of other arguments",
        "one that reads values",
    ],
)
def test_what_a_converter_may_not_do(register, model, function, said):
    register(function)
    with pytest.raises(UnsupportedError, match=said):
        fusion_moe.quantize_(model)
    assert [type(layer.experts) for layer in model] == [Mine, Mine]


def test_what_is_no_class_of_experts(golden):
    wrong = {"all": nn.Module, "a name": "Mine", "no module": int, "a function": len}
    golden(messages({what: partial(register_converter, cls) for what, cls in wrong.items()}))


def test_one_converter_for_each_class(register):
    register()
    says = r"register_converter\(Mine\): a second converter; .*unregister_converter"
    with pytest.raises(OptionError, match=says):
        register()
    unregister_converter(Mine)
    register()


def test_what_is_not_registered_is_told_how(model, golden):
    golden(
        messages(
            {
                "a model": lambda: fusion_moe.quantize_(model),
                "a module": lambda: convert(Mine()),
            }
        )
    )
