"""Functions at the edges of what fusions hold, compiled on a CUDA device to what eager computes on a CPU."""

from __future__ import annotations

import pytest
import torch
from edges import EDGES

import fusion_moe
from fusion_moe.errors import GroupsError
from fusion_moe.frontends.inductor import backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EDGES)
def test_compiled_as_eager_on_a_cpu(name, dynamic):
    edge = EDGES[name]
    inputs = edge.inputs()
    on_cuda = [t.cuda() for t in inputs]
    torch._dynamo.reset()
    run = torch.compile(edge.f, backend=backend, fullgraph=True, dynamic=dynamic)
    if edge.wrong:
        run(*on_cuda)  # kernels read nothing outside, and tell
        with pytest.raises(GroupsError):
            fusion_moe.synchronize()
        return
    for f in edge.f, run:
        torch.testing.assert_close(f(*on_cuda).cpu(), edge.f(*inputs), rtol=1e-2, atol=1e-2)
