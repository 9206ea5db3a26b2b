"""What a run did on a GPU: replays of CUDA graphs count too, and tiles of multiprocessors."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fusion_moe
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import native

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]
EXPERTS, SLOTS = 8, 2


def model(layers: int = 2) -> torch.nn.ModuleList:
    g = torch.Generator("cuda").manual_seed(0)
    return torch.nn.ModuleList(
        NVFP4Experts.from_float(
            torch.randn(EXPERTS, 256, 128, generator=g, device="cuda"),
            torch.randn(EXPERTS, 128, 128, generator=g, device="cuda"),
        )
        for _ in range(layers)
    )


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(tokens, 128, device="cuda").bfloat16(),
        torch.randint(0, EXPERTS, (tokens, SLOTS), device="cuda"),
        torch.rand(tokens, SLOTS, device="cuda"),
    )


def forward(layers: torch.nn.ModuleList, x, ids, w) -> torch.Tensor:
    for layer in layers:
        x = layer(x, ids, w)
    return x


@pytest.mark.parametrize("by_cxx", [True, False])
@pytest.mark.parametrize("tokens", [1, 300])
def test_calls_are_counted_without_waiting(tokens, by_cxx):
    if by_cxx:
        native.load()
    layers, (x, ids, w) = model(), inputs(tokens)
    want = torch.zeros(EXPERTS, dtype=torch.int64)
    with torch.no_grad(), nullcontext() if by_cxx else fusion_moe.options.override():
        forward(layers, x, ids, w)
        with fusion_moe.record(layers, profile=()) as run:
            for _ in range(5):
                ids.random_(0, EXPERTS)
                want += torch.bincount(ids.flatten(), minlength=EXPERTS).cpu()
                torch.cuda.set_sync_debug_mode("error")
                forward(layers, x, ids, w)
                torch.cuda.set_sync_debug_mode("default")
    assert [layer.name for layer in run.data.layers] == ["0", "1"]
    for layer in run.data.layers:
        assert (layer.calls, layer.rows) == (5, want.tolist())


def test_replays_are_counted_and_profiled():
    layers, (x, ids, w) = model(), inputs(4)
    want = torch.zeros(EXPERTS, dtype=torch.int64)
    with torch.no_grad():
        with fusion_moe.preparing():
            forward(layers, x, ids, w)
        with fusion_moe.record(layers, profile=range(2, 4)) as run:
            forward(layers, x, ids, w)
            want += torch.bincount(ids.flatten(), minlength=EXPERTS).cpu()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = forward(layers, x, ids, w)
            for _ in range(6):
                run.step()
                ids.random_(0, EXPERTS)
                want += torch.bincount(ids.flatten(), minlength=EXPERTS).cpu()
                graph.replay()
        torch.testing.assert_close(y, forward(layers, x, ids, w), rtol=0, atol=0)
    for layer in run.data.layers:
        assert (layer.calls, layer.rows) == (7, want.tolist())
    assert len(run.data.begun) == 6
    assert {k.calls for k in run.data.kernels} == {4}  # two layers in two replays
    assert all(k.seconds > 0 for k in run.data.kernels)
    assert run.data.window > run.data.idle >= 0


TILES = """
import torch, fusion_moe
from test_cuda_record import forward, inputs, model
layers, given = model(), inputs(300)
with torch.no_grad():
    forward(layers, *given)
    with fusion_moe.record(layers, profile=range(1, 2)) as run:
        for _ in range(3):
            forward(layers, *given)
tiles = run.data.tiles
assert tiles and all(t.seconds > 0 for t in tiles), tiles[:3]
names = {t.name for t in tiles}
spans = [s for s in run.data.spans if s.name in names]
last = max(t.start + t.seconds for t in tiles) - min(t.start for t in tiles)
whole = max(s.start + s.seconds for s in spans) - min(s.start for s in spans)
assert 0 < last < 1.5 * whole + 1e-4, (last, whole)
print(len(tiles), "tiles of", names, "on", len({t.track for t in tiles}), "lines")
"""


def test_tiles_lie_within_their_kernels():
    """In a process of its own: its kernels are compiled to mark tiles."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    more = {"FUSION_MOE_CUDA_DEBUG": "timeline", "PYTHONPATH": here}
    done = subprocess.run(
        [sys.executable, "-c", TILES],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiles of" in done.stdout
