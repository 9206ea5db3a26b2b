"""What calls remember of their sizes, on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import program

from fusion_moe.backends.cuda import launch
from fusion_moe.errors import BuildError

pytestmark = pytest.mark.gpu


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
