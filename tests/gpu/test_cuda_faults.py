"""What kernels find wrong, told by program and stream, also in replays of CUDA graphs; and what
calls remember of their sizes.
"""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import E, K, generator, program, quantized, tokens

import fusion_moe
from fusion_moe.backends.cuda import launch
from fusion_moe.errors import BuildError, GroupsError
from fusion_moe.runtime import faults

pytestmark = pytest.mark.gpu


def layer():
    """A program, its arguments with good ids, and bad ids."""
    good = torch.randint(0, E, (40, K), generator=generator())
    x, ids, w = tokens(good)
    bad = ids.clone()
    bad[3, 1] = E
    weights = quantized("w16x64")
    made = program("expert_mlp", (x, ids, w, *weights), {"weight_layout": "w16x64"})
    return made, lambda some: [x, some, w, *weights], ids, bad


def test_who_found_it_raises_it():
    made, given, good, bad = layer()
    other = program("scaled_swiglu", (torch.zeros(8, 64, device="cuda").bfloat16(),), {})
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        made(given(bad))
    torch.cuda.synchronize()
    with torch.cuda.stream(b):
        made(given(good))
    with torch.cuda.stream(a):
        other([torch.zeros(8, 64, device="cuda").bfloat16()])
        with pytest.raises(GroupsError) as caught:
            made(given(good))
    found = (
        f"ids.flatten()[{3 * K + 1}] = {E} is out of range, in an earlier call of `route "
        "index_select grouped_mm ...` by nvfp4["
    )
    assert found in str(caught.value)
    assert f"on cuda:0, stream {a.cuda_stream:#x}, first called at test_cuda_faults.py:" in str(
        caught.value
    )
    fusion_moe.synchronize()  # said once


@pytest.mark.parametrize("eager", [True, False])
def test_replays_of_a_graph(eager):
    made, given, good, bad = layer()
    ids = good.clone()
    want = made(given(ids))[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = made(given(ids))
    graph.replay()
    fusion_moe.synchronize()
    assert torch.equal(found, want)
    ids.copy_(bad)
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(
        GroupsError,
        match=r"= 8 is out of range, in an earlier call of .* on "
        r"cuda:0, in a CUDA graph, first called at",
    ):
        made(given(good)) if eager else fusion_moe.synchronize()
    ids.copy_(good)
    graph.replay()
    fusion_moe.synchronize()
    assert torch.equal(found, want)


def test_a_program_that_was_only_prepared_is_captured():
    x = torch.randn(8, 64, device="cuda").bfloat16()
    made = program("scaled_swiglu", (x,), {})
    with fusion_moe.preparing():
        made([x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = made([x])
    graph.replay()
    assert torch.equal(found, made([x])[0])


def test_words_are_pinned_whatever_device_tensors_are_made_on():
    made = faults._Words()
    with torch.device("cuda"):
        made.new("")
    assert made._memory[0].is_pinned()


def test_a_graph_replays_after_its_sizes_were_forgotten(monkeypatch):
    monkeypatch.setattr(launch, "_REMEMBERED", 2)
    x = torch.randn(8, 64, device="cuda").bfloat16()
    made = program("scaled_swiglu", (x,), {})
    made([x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = made([x])
    for rows in range(9, 12):
        made([x.new_zeros(rows, 64)])
    with (
        pytest.raises(BuildError, match="not compiled yet"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        made([x])
    x.copy_(torch.randn(8, 64))
    graph.replay()
    assert torch.equal(found, made([x])[0])
