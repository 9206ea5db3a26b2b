"""Activations as texts: traced from torch functions and from models' modules, read, and refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusion_moe
from fusion_moe.encodings import BF16, NVFP4, Quantized
from fusion_moe.errors import Error, OptionError, ParseError, UnsupportedError
from fusion_moe.ir.activation import read
from fusion_moe.nn import Experts, activation, swiglu
from fusion_moe.nn.conversion.traced_activation import activation_of
from tests.nn.test_padding import E, calls, padded, same_results, weight

FUNCTIONS = {
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu, tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "squared relu": lambda up: F.relu(up).square(),
    "situ": lambda gate, up: 30 * torch.tanh(gate / 30) * gate.sigmoid() * torch.tanh(up),
    "clamped after": lambda gate, up: F.silu(gate).clamp(max=1) * up.clamp(-1, 1),
    "leaky": lambda gate, up: F.leaky_relu(gate) * up,
}
PARTS = {"squared relu": 1}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("interleave", [0, 1, 8])
def test_a_text_means_its_function(name, interleave):
    function, parts = FUNCTIONS[name], PARTS.get(name, 2)
    text = activation(function, parts, interleave)
    columns = torch.randn(5, parts, 16, generator=torch.Generator().manual_seed(0)) * 3
    x = columns.view(5, parts, -1, interleave or 16).transpose(1, 2).reshape(5, -1)
    (found,) = read(text).fusion.evaluate(x)
    # 1 + erf cancels: an ulp of 1 times gate * up
    torch.testing.assert_close(found, function(*columns.unbind(1)), rtol=1e-6, atol=1e-5)
    assert (read(text).parts, read(text).interleave) == (parts, interleave if parts == 2 else 0)


def test_one_text_for_one_activation():
    """SwiGLU traced is SwiGLU written: it is the default, and `Experts` pass nothing."""
    assert activation(lambda gate, up: F.silu(gate) * up) == swiglu()
    assert activation(lambda gate, up: F.silu(gate) * up, interleave=1) == swiglu(1)
    up, down = (Quantized(torch.randn(2, *s), encoding=BF16) for s in ((32, 16), (16, 16)))
    assert Experts(up, down, activation=swiglu()).activation is None


REFUSED = {
    "it mixes columns": (lambda gate, up: gate.softmax(-1) * up, UnsupportedError),
    "it mixes rows": (lambda gate, up: gate.flip(0) * up, UnsupportedError),
    "it depends on data": (lambda gate, up: gate if gate.sum() > 0 else up, UnsupportedError),
    "it has parameters": (lambda gate, up: F.prelu(gate, torch.ones(1)) * up, UnsupportedError),
    "it has no derivative": (torch.maximum, UnsupportedError),
    "no translator": (lambda gate, up: gate.sin() * up, UnsupportedError),
    "columns of zeros": (lambda gate, up: gate.log() * up, UnsupportedError),
    "one column for all": (lambda gate, up: gate[:, :1] * up, UnsupportedError),
    "not python": ("silu", ParseError),
    "code": ("import os\ndef fusion(fd):\n    os.abort()", ParseError),
    "another function": (
        "def fusion(fd): m = fd.define_size('m'); i0 = fd.define_tensor(shape=[m], dtype='f32'); "
        "fd.add_output(i0)",
        OptionError,
    ),
    "fixed sizes": (swiglu().replace("[m, 2*n]", "[m, 64]").replace("n", "32"), Error),
    "columns of its own": (swiglu().replace("[0, n]", "[0, n + 1]"), Error),
    "a sum of columns": (
        "def fusion(fd): m = fd.define_size('m'); n = fd.define_size('n'); "
        "i0 = fd.define_tensor(shape=[m, n], dtype='f32'); "
        "t0 = fd.ops.sum(i0, dims=[1], keepdim=True); t1 = fd.ops.mul(i0, t0); fd.add_output(t1)",
        OptionError,
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    given, error = REFUSED[why]
    with pytest.raises(error):
        read(given if isinstance(given, str) else activation(given))


class Gate(nn.Module):
    """silu(gate) * up"""

    has_gate, is_concatenated = True, True

    def __init__(self, act_fn=F.silu):
        super().__init__()
        self.act_fn = act_fn
        self.gate_up_proj = nn.Parameter(torch.empty(2, 32, 16))

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate) * up


class Clamped(Gate):
    swiglu_limit = 10.0

    def _apply_gate(self, y):
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate.clamp(max=self.swiglu_limit)) * up


class InTurns(Gate):
    is_concatenated = False

    def _apply_gate(self, y):
        return self.act_fn(y[..., ::2]) * y[..., 1::2]


class NeedsMore(Gate):
    def _apply_gate(self, y):
        return super()._apply_gate(y) * self.gate_up_proj[0, 0, :8]


class Ungated(Gate):
    has_gate = False


MODULES = {
    Gate: ("silu(gate)", 0),
    Clamped: ("minimum(gate, 10.0)", 0),
    InTurns: ("silu(gate)", 1),
    Ungated: ("silu(up)", 0),
}


@pytest.mark.parametrize("without_memory", [None, lambda: torch.device("meta"), FakeTensorMode])
@pytest.mark.parametrize("gate", MODULES, ids=lambda c: c.__name__)
def test_of_a_module(gate, without_memory):
    """The same text, in the order of the weights or gate above up."""
    if without_memory is None:
        stored, apart = (activation_of(gate(), as_stored) for as_stored in (True, False))
    else:
        with without_memory():
            module = gate()
            stored, apart = (activation_of(module, as_stored) for as_stored in (True, False))
    operation, interleave = MODULES[gate]
    assert operation in read(stored).formula
    assert (read(stored).interleave, read(apart).interleave) == (interleave, 0)


def test_what_needs_weights_runs_between_products_and_says_so(caplog):
    module = type("WithWeights", (NeedsMore,), {})()
    assert activation_of(module) is None
    assert "activation of WithWeights runs between two products" in caplog.text


def test_numbers_and_functions_of_an_instance_count():
    module = Clamped()
    assert "10.0" in activation_of(module)
    module.swiglu_limit = 3.0
    assert "3.0" in activation_of(module)
    module.act_fn = F.relu
    assert "relu" in activation_of(module)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_experts_and_their_gradients(name):
    """Against the function by hand, in float64."""
    parts, function = PARTS.get(name, 2), FUNCTIONS[name]
    text, g = activation(function, parts), torch.Generator().manual_seed(0)
    up, down = (torch.randn(3, *s, generator=g).double() / 8 for s in ((parts * 48, 32), (32, 48)))
    x, w = torch.randn(7, 32).double(), torch.rand(7, 2).double()
    ids = torch.randint(0, 3, (7, 2))

    def fused(x, w, up, down):
        return fusion_moe.ops.fused_experts(
            x, ids, w, [up], [down], activation=text, weight_format="f64"
        )

    def by_hand(x, w, up, down):
        each = torch.einsum("tkph,th->tkp", up[ids], x).unflatten(-1, (parts, -1)).unbind(-2)
        return (torch.einsum("tkhi,tki->tkh", down[ids], function(*each)) * w[..., None]).sum(1)

    given = [t.requires_grad_() for t in (x, w, up, down)]
    found, want = fused(*given), by_hand(*given)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    dy = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, dy),
        torch.autograd.grad(want, given, dy),
        rtol=1e-6,
        atol=1e-6,
    )


def test_padded_columns_and_copies():

    text = activation(FUNCTIONS["squared relu"], 1)
    module = Experts(weight(NVFP4, E, 96, 80, runs=1), weight(NVFP4, E, 80, 96), activation=text)
    same_results(module, padded(module), *calls(80))
    assert "t0 = relu(up); t1 = mul(t0, t0)" in repr(copy.deepcopy(module))
