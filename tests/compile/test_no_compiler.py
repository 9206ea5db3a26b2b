"""Without a C++ compiler the same pass runs, and everything around the fusions call by call.
(test_inductor.py: with one, Inductor's code is used.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT = """
import json, logging, torch
from moe_models import Block, calls, tokens
from fusion_moe import options
from fusion_moe.frontends.inductor.compile_graph import compile_with
from fusion_moe.frontends.inductor.fusion_pass import FusionPass

logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
model, results = Block(), []

def backend(gm, inputs):
    fusion_pass = FusionPass(options.current(), found=results.append)
    return compile_with(fusion_pass, gm, inputs, "max-autotune", {})

def gradients(f):
    x = tokens(5).requires_grad_()
    model.zero_grad()
    y = f(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]

run = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
for got, want in zip(gradients(run), gradients(model), strict=True):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
from torch._inductor import metrics
regions = [[calls(r.nodes) for r in f.regions] for f in results]
print(json.dumps([regions, metrics.generated_kernel_count]))
"""


@pytest.mark.slow
def test_without_a_compiler_the_pass_runs_and_the_rest_is_called(tmp_path):
    """Where nothing is on PATH."""
    root = TESTS.parent
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")} | {
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS, root, root / "translators"))),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (forward, backward), kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels == 0
    assert forward == [["fusion_moe.run.default", "aten.add.Tensor"]]
    assert "fusion_moe.run.default" in backward[0]
    assert done.stderr.count("fusion_moe WARNING no C++ compiler found") == 1
