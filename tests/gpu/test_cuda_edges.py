"""Functions at the edges of what fusions hold, compiled on a CUDA device to what eager computes on
a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from edges import EDGES, in_bf16

import fusion_moe
from fusion_moe.errors import GroupsError
from fusion_moe.frontends.inductor import backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EDGES)
def test_compiled_as_eager_on_a_cpu(name, dynamic):
    edge = EDGES[name]
    inputs = in_bf16(edge.inputs())
    on_cuda = [t.cuda() for t in inputs]
    torch._dynamo.reset()
    run = torch.compile(edge.f, backend=backend, fullgraph=True, dynamic=dynamic)
    if edge.wrong:
        # at once from the reference, later from kernels, which read nothing outside
        with pytest.raises(GroupsError):
            _ = run(*on_cuda), fusion_moe.synchronize()
        return
    for f in edge.f, run:
        torch.testing.assert_close(f(*on_cuda).cpu(), edge.f(*inputs), rtol=2e-2, atol=2e-2)


def test_what_is_empty_takes_no_time():
    script = Path(__file__).resolve().parents[1] / "backends" / "empty_but_endless.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), "cuda"],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
