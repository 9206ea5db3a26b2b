"""fusion_moe.explain traces on fakes: nothing is computed, weights need no memory, and the model
stays as it is.
"""

import layer
import pytest
import torch
from bad_calls import messages
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_moe
from fusion_moe.backends import TARGETS
from fusion_moe.errors import UnsupportedError

EXPERTS, HIDDEN, TOKENS, TOP_K = 4, 64, 6, 2


class Layer(layer.Layer):
    """A layer that writes into itself, as layers with statistics or caches do."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.last = super().forward(x)
        return self.last


class Executed(TorchDispatchMode):
    """Elements of the largest result that has memory of its own."""

    largest = 0

    @classmethod
    def ignore_compile_internals(cls):
        return True  # Dynamo traces under it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(t, torch.Tensor)
                and not isinstance(t, FakeTensor)
                and t.device.type != "meta"
            ):
                self.largest = max(self.largest, t.numel())
        return result


@pytest.fixture(scope="module")
def x():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize(
    ("context", "target"),
    [(torch.no_grad, "sm_90"), (torch.inference_mode, "sm_100"), (torch.enable_grad, None)],
)
def test_nothing_is_computed(x, context, target):
    layer = Layer()
    with context(), Executed() as executed:
        report = fusion_moe.explain(layer, x, target=target)
    assert report.fusions
    assert executed.largest <= EXPERTS * TOKENS  # not even a token's hidden state
    with Executed() as executed:
        layer(x)
    assert executed.largest >= TOKENS * HIDDEN


LAYER = None
GIVEN = {
    "module": (lambda m: m, torch.inference_mode),
    "method": (lambda m: m.forward, torch.no_grad),
    "function": (lambda m: lambda x: m(x), torch.enable_grad),
    "global": (lambda m: calls_a_global, torch.no_grad),
}


def calls_a_global(x, *, layer=None):
    return (layer or LAYER)(x)


@pytest.mark.parametrize("name", GIVEN)
def test_the_model_stays_as_it_is(x, name, monkeypatch):
    layer = Layer()
    given, context = GIVEN[name]
    monkeypatch.setitem(globals(), "LAYER", layer)
    before = dict(layer.named_parameters()) | dict(layer.named_buffers())
    with context():
        assert fusion_moe.explain(given(layer), x, target="sm_100").fusions
    after = dict(layer.named_parameters()) | dict(layer.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is t and type(after[name]) is type(t) for name, t in before.items())
    assert (layer.calls, layer.last) == (0, None)


def test_weights_and_arguments_may_have_no_values(x):
    def explained(layer, x):
        with torch.no_grad():
            return fusion_moe.explain(layer, x, target="sm_90").details()

    with torch.device("meta"):
        meta = Layer()
    with FakeTensorMode():
        fake = Layer()
    real = explained(Layer(), x)
    assert explained(lambda x: meta(x), x) == real
    assert explained(meta, x.to("meta")) == real
    assert explained(fake, x) == real
    assert explained(Layer(), x.to("meta")) == real
    assert all(p.is_meta for p in meta.parameters())


def test_a_model_larger_than_any_memory():
    with torch.device("meta"):
        layer = Layer(count=2**12, hidden=2**15, inner=2**16)
    bytes_of_weights = layer.experts.nbytes
    assert bytes_of_weights > 10**13
    x = torch.randn(1, 2**15, dtype=torch.bfloat16)
    with torch.no_grad(), Executed() as executed:
        report = fusion_moe.explain(layer, x, target="sm_90")
    assert executed.largest <= 2**12
    assert report.fusions[0].segments[0].bytes_read < bytes_of_weights  # one token's two experts


def test_a_call_that_asks_for_values_is_run(x):
    layer = Layer()

    def asks(x):
        return layer(x) if x.sum() > 0 else layer(layer(x))

    x = x.abs()
    with torch.no_grad():
        assert sum(f.times for f in fusion_moe.explain(asks, x).fusions) == 1
        assert sum(f.times for f in fusion_moe.explain(asks, -x, target="sm_90").fusions) == 2
        with pytest.raises(
            UnsupportedError,
            match=r"reads tensor values \(aten.*expected tensors "
            r"with data",
        ):
            fusion_moe.explain(asks, x.to("meta"))


def test_what_cannot_be_copied_is_run(x):
    class Guarded(Layer):
        def __deepcopy__(self, memo):
            raise TypeError("there is one of me")

    layer = Guarded()
    with torch.no_grad():
        assert len(fusion_moe.explain(layer, x).fusions) == 1
    assert layer.calls == 1


def test_parameters_of_one_tensor_stay_one(x):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Layer(), Layer()
            self.two.experts = self.one.experts

        def forward(self, x):
            return self.two(self.one(x))

    seen = []
    with torch.no_grad():
        tied = Tied()
        tied.register_forward_hook(
            lambda m, args, out: seen.append(m.one.experts.down_proj is m.two.experts.down_proj)
        )
        fusion_moe.explain(tied, x)
    assert seen == [True]


@torch.no_grad()
def test_wrong_calls(golden):
    """What an operation says, and what is no call."""
    ids, w = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.rand(TOKENS, TOP_K)
    experts, x = Layer().experts, torch.randn(TOKENS, 63)
    with pytest.raises(
        UnsupportedError, match="^explain: arguments without a tensor: .*; expected"
    ):
        fusion_moe.explain(torch.relu, [1, 2])
    text = messages(
        {
            "features": lambda: fusion_moe.explain(experts, x, ids, w),
            "a number": lambda: fusion_moe.explain(3),
        }
    )
    # torch 2.15 traces the module's own handler
    names = "NVFP4Experts, whose hidden_states, top_k_index and top_k_weights are x, ids and w"
    golden(text.replace(f"{names}: ", "explain: "))


@pytest.mark.gpu
def test_on_a_gpu_no_weight_is_copied(x):
    layer, x = Layer(inner=256).cuda(), x.cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name in "cuda", "sm_90", "sm_100":
        with torch.no_grad():
            report = fusion_moe.explain(layer, x, target=name)
        assert report.fusions
        assert report.executed == (
            TARGETS[name].capability in (None, torch.cuda.get_device_capability())
        )
    # some rows, and no weight: the smaller one is a third of all
    assert torch.cuda.max_memory_allocated() - before < layer.experts.nbytes // 4
