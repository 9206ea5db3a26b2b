"""Calls that C++ launches on a GPU: what Python launches, bit for bit."""

from __future__ import annotations

import pytest
import torch

import fusion_moe
from fusion_moe import options
from fusion_moe.bodies import eager
from fusion_moe.encodings import FP8, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import native

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]


@pytest.fixture(autouse=True)
def loaded():
    if not options.current().native_calls:
        pytest.skip("FUSION_MOE_NATIVE_CALLS=0")
    native.load()


@pytest.fixture
def without_python(monkeypatch):
    """From here on Python runs no call."""

    def refuse() -> None:
        def run(self, tensors):
            raise AssertionError("Python ran a call with a known key")

        monkeypatch.setattr(eager._Found, "run", run)

    return refuse


def layer(experts: int = 8) -> NVFP4Experts:
    g = torch.Generator("cuda").manual_seed(0)
    return NVFP4Experts.from_float(
        torch.randn(experts, 256, 128, generator=g, device="cuda"),
        torch.randn(experts, 128, 128, generator=g, device="cuda"),
    )


def call(
    tokens: int, seed: int = 0, experts: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, 128, generator=g, device="cuda").bfloat16()
    return (
        x,
        torch.randint(0, experts, (tokens, 2), generator=g, device="cuda"),
        torch.rand(tokens, 2, generator=g, device="cuda"),
    )


def by_python(experts: NVFP4Experts, *token: torch.Tensor) -> torch.Tensor:
    with options.override():
        return experts(*token)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
def test_equal_bits(tokens, mode, without_python):
    experts = layer()
    calls = [call(tokens, seed) for seed in range(4)]
    with mode():
        want = [by_python(experts, *token) for token in calls]
        experts(*calls[0])
        without_python()
        for token, expected in zip(calls, want, strict=True):
            assert experts(*token).equal(expected)


def test_other_streams(without_python):
    experts, token = layer(), call(16)
    with torch.inference_mode():
        want = experts(*token)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            experts(*token)  # Python gives a stream its word
        without_python()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**7)
            y = torch.zeros_like(token[0]).copy_(token[0])
            found = experts(y, *token[1:])
        stream.synchronize()
        assert found.equal(want)


def test_graphs(without_python):
    experts = layer()
    token, other = call(16), call(16, seed=1)
    with torch.inference_mode():
        want = [by_python(experts, *token), by_python(experts, *other)]
        experts(*token)
        without_python()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = experts(*token)
        graph.replay()
        assert found.equal(want[0])
        for t, o in zip(token, other, strict=True):
            t.copy_(o)
        graph.replay()
        assert found.equal(want[1])


def test_bad_ids_are_raised_later():
    experts, (x, ids, w) = layer(), call(16)
    with torch.inference_mode():
        want = experts(x, ids, w)
        experts(x, ids + 8, w)
        with pytest.raises(GroupsError, match="in an earlier call"):
            fusion_moe.synchronize()
        experts(x, ids + 8, w)
        torch.cuda.synchronize()
        with pytest.raises(GroupsError, match="in an earlier call"):
            experts(x, ids, w)
        assert experts(x, ids, w).equal(want)


def test_addresses_that_vectors_are_not_loaded_from():
    experts, (x, ids, w) = layer(), call(16)
    with torch.inference_mode():
        want = experts(x, ids, w)
        odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
        assert odd.is_contiguous()
        assert odd.data_ptr() % 16
        assert experts(odd, ids, w).equal(want)


def test_compiled_graphs(without_python):
    experts, token = layer(), call(16)
    compiled = torch.compile(experts, backend="fusion_moe")
    with torch.inference_mode():
        want = by_python(experts, *token)
        compiled(*token)
        without_python()
        assert compiled(*token).equal(want)


@pytest.mark.needs("TMA", "wgmma")
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_kernels_that_copy_in_boxes(fmt, without_python):
    """Wherever their tensors lie."""
    g = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(2, 256, 128, generator=g, device="cuda").bfloat16()
    weight = [*quantize(w, FP8)] if fmt == "fp8" else [w]
    ends = torch.tensor([100, 300], dtype=torch.int32, device="cuda")
    xs = [torch.randn(300, 128, generator=g, device="cuda").bfloat16() for _ in range(3)]
    op, how = torch.ops.fusion_moe.grouped_mm, {"weight_format": fmt, "activation_format": fmt}
    with options.override():
        wanted = [op(x, weight, ends, **how) for x in xs]
    op(xs[0], weight, ends, **how)
    without_python()
    for x, y in zip(xs, wanted, strict=True):
        assert torch.equal(op(x, [t.clone() for t in weight], ends, **how), y)
