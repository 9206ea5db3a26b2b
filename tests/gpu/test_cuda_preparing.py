"""Kernels that were compiled beforehand, on a GPU: nothing is compiled later, and a graph may
capture the first call.
"""

from __future__ import annotations

import statistics
import threading
import time

import pytest
import torch
from test_cuda_kernels import quantized, tokens

import fusion_moe
from fusion_moe import options
from fusion_moe.runtime import background, nvrtc

pytestmark = pytest.mark.gpu

O = torch.ops.fusion_moe


@pytest.fixture
def cold(tmp_path):
    """A cache without anything in it."""
    with options.override(cache_dir=str(tmp_path)):
        yield tmp_path


def arguments(count: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(count)
    return [*tokens(torch.randint(0, 4, (count, 2), generator=g)), *quantized("w16x64")]


@pytest.mark.parametrize("count", [1, 200])
def test_a_graph_captures_the_first_call(cold, count, monkeypatch):
    args = arguments(count)
    with fusion_moe.preparing():
        noted = O.expert_mlp(*args, weight_layout="w16x64")
    assert noted.shape == args[0].shape
    assert not noted.any()
    cubins = {path.name for path in cold.rglob("*.cubin")}
    assert cubins

    def compiles(*args):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(nvrtc, "_compile", compiles)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = O.expert_mlp(*args, weight_layout="w16x64")
    graph.replay()
    torch.cuda.synchronize()
    assert found.any()
    assert torch.equal(found, O.expert_mlp(*args, weight_layout="w16x64"))
    assert {path.name for path in cold.rglob("*.cubin")} == cubins


def test_a_backward_inside_is_compiled_too(cold, monkeypatch):
    x, *others = arguments(3)
    x.requires_grad_()

    def gradient() -> torch.Tensor:
        y = O.expert_mlp(x, *others, weight_layout="w16x64")
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with fusion_moe.preparing():
        assert not gradient().any()
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert gradient().any()


def test_a_capture_inside_is_a_capture(cold):
    """What a graph captures must run when it is replayed."""
    args = arguments(3)
    want = O.expert_mlp(*args, weight_layout="w16x64")
    graph = torch.cuda.CUDAGraph()
    with fusion_moe.preparing(), torch.cuda.graph(graph):
        found = O.expert_mlp(*args, weight_layout="w16x64")
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, want)


def test_all_sizes_are_compiled_from_one_call(cold, monkeypatch):
    """Counts that nobody called with compile nothing."""
    with fusion_moe.preparing("all"):
        O.expert_mlp(*arguments(8), weight_layout="w16x64")
    monkeypatch.setattr(nvrtc, "_compile", None)
    for count in (1, 3, 17, 65, 300, 2000):
        assert O.expert_mlp(*arguments(count), weight_layout="w16x64").any()


def test_first_calls_of_new_counts_are_short(cold):
    """Far below what compiling takes: host time of this thread, beside other tests."""
    with fusion_moe.preparing("all"):
        O.expert_mlp(*arguments(8), weight_layout="w16x64")
    took = []
    for count in range(1, 600, 13):
        args = arguments(count)
        torch.cuda.synchronize()
        begun = time.thread_time()
        O.expert_mlp(*args, weight_layout="w16x64")
        took.append(time.thread_time() - begun)
    assert statistics.median(took) < 20e-3
    assert max(took) < 200e-3


def ahead() -> bool:
    """Whether something is being compiled that calls may need."""
    return any("compile ahead" in thread.name for thread in threading.enumerate())


def test_the_first_call_compiles_for_other_counts_too(cold, monkeypatch, caplog):
    """In the background; bits are those of calls that compile for themselves."""
    with options.override(compile_ahead=True):
        O.expert_mlp(*arguments(8), weight_layout="w16x64")
    end = time.monotonic() + 120
    while ahead() and time.monotonic() < end:
        time.sleep(0.05)
    assert not ahead()
    assert [said for said in caplog.messages if "not compiled ahead" in said] == []
    monkeypatch.setattr(nvrtc, "_compile", None)
    for count in (1, 3, 17, 65, 300, 2000):
        assert O.expert_mlp(*arguments(count), weight_layout="w16x64").any()


def test_nothing_is_compiled_ahead_that_is_not_asked_for(cold):
    O.expert_mlp(*arguments(8), weight_layout="w16x64")
    assert not ahead()


def test_other_sizes_do_not_wait_for_their_kernels(cold):
    """Until they are compiled, kernels for any size run: the same up to the order of sums."""
    with options.override(background_compile=True):
        O.expert_mlp(*arguments(9), weight_layout="w16x64")
        cubins = {path.name for path in cold.rglob("*.cubin")}
        # no other test calls this layer with it, and every table has other kernels for it than for
        # any size
        args = arguments(903)
        first = O.expert_mlp(*args, weight_layout="w16x64")
        end = time.monotonic() + 60
        while background._unfinished and time.monotonic() < end:
            time.sleep(0.05)
        assert not background._unfinished
        then = O.expert_mlp(*args, weight_layout="w16x64")
    assert cubins < {path.name for path in cold.rglob("*.cubin")}
    torch.testing.assert_close(first, then, rtol=2e-2, atol=2e-2 * float(then.abs().max()))
