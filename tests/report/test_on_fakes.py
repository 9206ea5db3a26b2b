"""fusion_moe.explain traces on fakes: nothing is computed, weights need no memory, and the model
stays as it is.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_moe
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.errors import ShapeError, UnsupportedError

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 256, 128, 6, 2


def quantized(g, n, k, device=None):
    """nvfp4[g, n, k] with memory and no particular values."""
    return Quantized(
        torch.zeros(g, n, k // 2, dtype=torch.uint8, device=device),
        torch.ones(g, n, k // 16, device=device).to(torch.float8_e4m3fn),
        torch.ones(g, device=device),
        encoding=NVFP4,
    )


def experts(e=EXPERTS, h=HIDDEN, i=INTERMEDIATE, activation_format="bf16"):
    """Experts on the device in force."""
    gate_up = quantized(e, 2 * i, h)
    both = gate_up.with_(decode_scale=gate_up.decode_scale[:, None].expand(e, 2))
    return fusion_moe.NVFP4Experts(both, quantized(e, h, i), activation_format)


class Layer(torch.nn.Module):
    """A layer that writes into itself, as layers with statistics or caches do."""

    def __init__(self, h=HIDDEN, **sizes):
        super().__init__()
        self.router = torch.nn.Linear(h, EXPERTS, dtype=torch.bfloat16)
        self.experts = experts(h=h, **sizes)
        self.register_buffer("calls", torch.zeros(()))
        self.last = None

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        self.calls += 1
        self.last = x + self.experts(x, ids, weights)
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


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("target", [None, "sm_90", "sm_100"])
def test_nothing_is_computed(x, context, target):
    layer = Layer()
    with context(), Executed() as executed:
        report = fusion_moe.explain(layer, x, target=target)
    assert report.fusions
    assert executed.largest <= EXPERTS * TOKENS  # not even a token's hidden state


def test_a_call_that_runs_is_seen(x):
    """What the test above leans on."""
    with torch.no_grad(), Executed() as executed:
        Layer()(x)
    assert executed.largest >= TOKENS * HIDDEN


LAYER = None
GIVEN = {
    "module": lambda m: m,
    "method": lambda m: m.forward,
    "function": lambda m: lambda x: m(x),
    "global": lambda m: calls_a_global,
}


def calls_a_global(x, *, layer=None):
    return (layer or LAYER)(x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("given", GIVEN)
def test_the_model_stays_as_it_is(x, context, given, monkeypatch):
    layer = Layer()
    monkeypatch.setitem(globals(), "LAYER", layer)
    before = dict(layer.named_parameters()) | dict(layer.named_buffers())
    with context():
        assert fusion_moe.explain(GIVEN[given](layer), x, target="sm_100").fusions
    after = dict(layer.named_parameters()) | dict(layer.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is t and type(after[name]) is type(t) for name, t in before.items())
    assert (layer.calls, layer.last) == (0, None)


@pytest.mark.parametrize("target", [None, "sm_90"])
def test_weights_and_arguments_may_have_no_values(x, target):
    def explained(layer, x):
        with torch.no_grad():
            return fusion_moe.explain(layer, x, target=target).details()

    with torch.device("meta"):
        meta = Layer()
    with FakeTensorMode():
        fake = Layer()
    real = explained(Layer(), x)
    assert explained(meta, x) == real
    assert explained(lambda x: meta(x), x) == real
    assert explained(meta, x.to("meta")) == real
    assert explained(fake, x) == real
    assert explained(Layer(), x.to("meta")) == real
    assert all(p.is_meta for p in meta.parameters())


def test_a_model_larger_than_any_memory():
    with torch.device("meta"):
        layer = Layer(e=2**12, h=2**15, i=2**16)
    bytes_of_weights = layer.experts.nbytes
    assert bytes_of_weights > 10**13
    x = torch.randn(1, 2**15, dtype=torch.bfloat16)
    with torch.no_grad(), Executed() as executed:
        report = fusion_moe.explain(layer, x, target="sm_90")
    assert executed.largest <= EXPERTS
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


def test_a_wrong_call_raises_the_operations_error():
    ids, w = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.rand(TOKENS, TOP_K)
    with (
        torch.no_grad(),
        pytest.raises(
            ShapeError, match=f"^explain: fused_experts: x has 63 features; expected {HIDDEN}"
        ),
    ):
        fusion_moe.explain(experts(), torch.randn(TOKENS, 63), ids, w)
    with pytest.raises(
        UnsupportedError, match="explain: a int; expected a torch.nn.Module or a function"
    ):
        fusion_moe.explain(3)


@pytest.mark.gpu
def test_on_a_gpu_no_weight_is_copied(x):
    layer, x = Layer().cuda(), x.cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name in "cuda", "sm_90", "sm_100":
        with torch.no_grad():
            report = fusion_moe.explain(layer, x, target=name)
        assert report.fusions
        assert report.executed == (
            TARGETS[name].capability in (None, torch.cuda.get_device_capability())
        )
    # some numbers, and no weight
    assert torch.cuda.max_memory_allocated() - before < layer.experts.nbytes // 10
