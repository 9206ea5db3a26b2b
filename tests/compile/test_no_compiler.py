"""Without a C++ compiler the same pass runs, and everything around the fusions call by call; with
one, Inductor's code is used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """
import json, logging, torch
from moe_models import Block, calls, tokens
from fusion_moe import options
from fusion_moe.frontends.inductor.compile_graph import compile_with, has_compiler
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
with torch.inference_mode():
    for t in (5, 9):
        torch.testing.assert_close(run(tokens(t)), model(tokens(t)), rtol=1e-5, atol=1e-5)
from torch._inductor import metrics
regions = [[calls(r.nodes) for r in f.regions] for f in results]
kernels = metrics.generated_kernel_count
print(json.dumps({"compiler": has_compiler(), "regions": regions, "kernels": kernels}))
"""


def process(folder: Path, **environment: str) -> tuple[dict, str]:
    """What the script says in a process with this environment, and its log."""
    root = HERE.parents[1]
    env = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, root, root / "translators"))),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        **environment,
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What the script says where nothing is on PATH."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "bin").mkdir()
    return process(folder / "a", PATH=str(folder / "bin"))


@pytest.mark.slow
def test_without_a_compiler_the_pass_runs_and_the_rest_is_called(without):
    found, said = without
    assert not found["compiler"]
    assert found["kernels"] == 0
    assert found["regions"] != []
    assert said.count("fusion_moe WARNING no C++ compiler found") == 1


@pytest.mark.slow
@pytest.mark.compiler
def test_with_one_the_regions_are_the_same_and_inductor_compiles_the_rest(
    without, tmp_path_factory
):
    with_, said = process(
        tmp_path_factory.getbasetemp() / "inductor",
        TORCHINDUCTOR_FX_GRAPH_CACHE="0",
        TORCHINDUCTOR_AUTOGRAD_CACHE="0",
    )
    assert "no C++ compiler" not in said
    assert with_["compiler"]
    assert with_["kernels"] > 0
    assert with_["regions"] == without[0]["regions"]
