"""What calls remember of their sizes, on a GPU."""

from __future__ import annotations

import pytest
import torch
from test_cuda_kernels import program

from fusion_moe.emit.cuda import launch
from fusion_moe.errors import BuildError
from fusion_moe.runtime import cuda

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
    with pytest.raises(BuildError, match="not compiled yet"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        made([x])
    x.copy_(torch.randn(8, 64))
    graph.replay()
    assert torch.equal(found, made([x])[0])


def test_faults_are_written_to_pinned_memory_whatever_device_tensors_are_made_on():
    with torch.device("cuda"):
        word, _ = cuda._pinned.__wrapped__()  # as a process's first call does
    assert word.is_pinned()
