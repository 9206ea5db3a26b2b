"""Activations as texts: traced from torch functions and from models' modules, read, and refused."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import BF16, NVFP4, Quantized
from fusion_moe.errors import Error, OptionError, ParseError, ShapeError, UnsupportedError
from fusion_moe.integrations.distributed.shares import keep_experts, keep_features
from fusion_moe.ir.activation import read
from fusion_moe.nn import Experts, activation, swiglu
from fusion_moe.nn.conversion import traced_activation
from fusion_moe.nn.conversion.traced_activation import activation_of
from tests.nn.test_padding import E, calls, padded, same_results, weight

FUNCTIONS = {
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu, tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "squared relu": lambda up: F.relu(up).square(),
    "situ": lambda gate, up: 30 * torch.tanh(gate / 30) * gate.sigmoid() * torch.tanh(up),
    "clamped after": lambda gate, up: F.silu(gate).clamp(max=1) * up.clamp(-1, 1),
    "softplus": lambda gate, up: F.softplus(gate) * up,
    "mish": lambda gate, up: F.mish(gate) * up,
    "elu": lambda gate, up: F.elu(gate) * up,
    "the larger, the smaller": lambda gate, up: torch.maximum(gate, up) * torch.minimum(gate, up),
    "leaky": lambda gate, up: F.leaky_relu(gate) * up,
}
PARTS = {"squared relu": 1}
OF_EXPERTS = {  # parameters of each expert: for each feature, or one for all
    "slope": lambda gate, up, slope: torch.where(gate > 0, gate, slope * gate) * up,
    "two": lambda up, scale, shift: F.silu(up * (scale + 1)) + shift.tanh() * up,
}
CASES = [  # parts, parameters, and features of these
    *((name, PARTS.get(name, 2), 0, 1) for name in FUNCTIONS),
    ("slope", 2, 1, 1),
    ("slope", 2, 1, 48),
    ("two", 1, 2, 48),
]


@pytest.mark.parametrize(("name", "parts", "count", "width"), CASES)
@pytest.mark.parametrize("interleave", [0, 1, 8])
def test_a_text_means_its_function(name, parts, count, width, interleave):
    function, g = (FUNCTIONS | OF_EXPERTS)[name], torch.Generator().manual_seed(0)
    text = activation(function, parts, interleave, count)
    columns = torch.randn(5, parts, 16, generator=g) * 3
    more = torch.randn(count, 5, 16, generator=g)
    x = columns.view(5, parts, -1, interleave or 16).transpose(1, 2).reshape(5, -1)
    (found,) = read(text).fusion.evaluate(x, *more)
    # 1 + erf cancels: an ulp of 1 times gate * up
    torch.testing.assert_close(found, function(*columns.unbind(1), *more), rtol=1e-6, atol=1e-5)
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
    "it has no derivative": (lambda gate, up: gate.sign(), UnsupportedError),
    "no translator": (lambda gate, up: gate.lgamma() * up, UnsupportedError),
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


class Layer(torch.nn.Module):
    """An expert module of a model of many layers."""

    has_gate = True

    def __init__(self, config, **own):
        super().__init__()
        self.config, self.act_fn = config, torch.nn.SiLU()
        vars(self).update(own)

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.config.limit) * up


def test_layers_that_compute_the_same_are_traced_once(monkeypatch):
    traced, real = [], traced_activation._of_module
    monkeypatch.setattr(traced_activation, "_by_kind", {})
    monkeypatch.setattr(traced_activation, "_of_module", lambda m: real(traced.append(m) or m))
    config = SimpleNamespace(limit=5.0)
    layers = [Layer(config) for _ in range(4)]
    (text,) = {activation_of(m) for m in layers}
    assert traced == layers[:1]

    (other := Layer(config)).act_fn = torch.nn.ReLU()
    config_of_its_own = Layer(SimpleNamespace(limit=6.0))
    (hooked := Layer(config)).act_fn.register_forward_hook(lambda *_: _[-1] * 2)
    assert "6.0" in activation_of(config_of_its_own)
    assert "relu" in activation_of(other)
    assert activation_of(hooked) not in (None, text)
    config.limit = 7.0
    assert "7.0" in activation_of(Layer(config))
    assert len(traced) == 5
    for _ in range(2):  # two that cannot be compared
        activation_of(Layer(config, names=["a"]))
    assert len(traced) == 7


@pytest.mark.parametrize("beside", ["traces", "compiles"])
def test_threads_that_trace_at_once(beside):
    """torch's tracer keeps what it does in variables of the process: a second trace left it marked
    as running, and nothing compiled any more.
    """
    texts, ready, done = [], threading.Event(), threading.Event()

    def trace():
        ready.set()
        for i in range(30):
            texts.append(activation(lambda gate, up: gate.relu() * up * i))  # noqa: B023

    def compiles():
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3))  # imports the tracer
        ready.set()
        while not done.is_set():
            torch._dynamo.reset()
            with contextlib.suppress(RuntimeError):  # torch's, for a call during another's trace
                torch.compile(lambda x: x.relu() + 1, backend="aot_eager")(torch.ones(3))

    other = threading.Thread(target=compiles if beside == "compiles" else trace)
    activation(lambda gate, up: gate * up)
    other.start()
    ready.wait(60)
    trace()
    done.set()
    other.join()
    assert len(texts) == (30 if beside == "compiles" else 60)
    assert not torch.fx._symbolic_trace._is_fx_tracing_flag


@pytest.mark.parametrize(("name", "parts", "count", "width"), CASES)
def test_experts_and_their_gradients(name, parts, count, width):
    """Against the function by hand, in float64."""
    function, g = (FUNCTIONS | OF_EXPERTS)[name], torch.Generator().manual_seed(0)
    text = activation(function, parts, parameters=count)
    more = torch.randn(3, count, width, generator=g).double() if count else None
    up, down = (torch.randn(3, *s, generator=g).double() / 8 for s in ((parts * 48, 32), (32, 48)))
    x, w = torch.randn(7, 32).double(), torch.rand(7, 2).double()
    ids = torch.randint(0, 3, (7, 2))

    def fused(x, w, up, down, more=None):
        return fusion_moe.ops.fused_experts(
            *(x, ids, w, [up], [down]),
            activation=text,
            activation_parameters=more,
            weight_format="f64",
        )

    def by_hand(x, w, up, down, more=None):
        each = torch.einsum("tkph,th->tkp", up[ids], x).unflatten(-1, (parts, -1)).unbind(-2)
        each = each if more is None else (*each, *more[ids].unbind(2))
        return (torch.einsum("tkhi,tki->tkh", down[ids], function(*each)) * w[..., None]).sum(1)

    given = [t.requires_grad_() for t in (x, w, up, down, more) if t is not None]
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


@pytest.mark.parametrize(
    ("name", "parts", "count", "width", "dtype"),
    [("slope", 2, 1, 1, torch.float32), ("two", 1, 2, 96, torch.bfloat16)],
)
def test_parameters_of_each_expert(name, parts, count, width, dtype):
    """The module in its own kernels, padded, in a graph, without compilers, on one rank of several
    and with a gradient.
    """
    g = torch.Generator().manual_seed(0)
    text = activation(OF_EXPERTS[name], parts, parameters=count)
    up, down = weight(NVFP4, E, parts * 96, 80, runs=1), weight(NVFP4, E, 80, 96)
    more = torch.randn(E, count, width, generator=g)
    module = Experts(up, down, activation=text, activation_parameters=more)
    x, ids, w = calls(80)
    x = x.to(dtype)
    found = module(x, ids, w)
    torch.testing.assert_close(torch.compile(module, fullgraph=True)(x, ids, w), found)
    with options.override(target="reference"):
        for other in (module, padded(module)):
            torch.testing.assert_close(other(x, ids, w), found, rtol=1e-2, atol=1e-2)
    for divide in (keep_experts, keep_features):
        ranks = [copy.deepcopy(module) for _ in range(2)]
        for rank, part in enumerate(ranks):
            divide(part, rank, 2)
        wide = x.float(), ids, w  # partial sums are not rounded to bfloat16
        torch.testing.assert_close(sum(r(*wide) for r in ranks), module(*wide), rtol=1e-4, atol=0.1)
    kept = ranks[1].activation_parameters
    whole = ranks[1].sharding.whole("activation_parameters", kept)
    assert (whole.shape, kept.shape[2]) == (more.shape, max(1, width // 2))
    assert [offset for offset, _ in whole.pieces] == [(0, 0, width // 2)]
    module.activation_parameters.requires_grad_()
    module(x, ids, w).float().sum().backward()
    assert module.activation_parameters.grad.abs().sum(-1).gt(0).all()


def test_parameters_that_do_not_fit_are_refused():
    up, down = weight(NVFP4, E, 192, 80, runs=1), weight(NVFP4, E, 80, 96)
    text, given = activation(OF_EXPERTS["slope"], parameters=1), torch.ones(E, 1, 96)
    for activation_, more in ((text, None), (text, given[..., :5]), (None, given)):
        with pytest.raises(ShapeError, match="activation_parameters"):
            Experts(up, down, activation=activation_, activation_parameters=more)
    with pytest.raises(UnsupportedError, match="parameter 0 has no derivative"):
        activation(lambda gate, up, slope: gate * up, parameters=1)
