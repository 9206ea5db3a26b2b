"""fusion_moe.last_compiled: the report of what torch.compile compiled, or found in its caches, and
the artifacts of both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch

import fusion_moe
from fusion_moe.errors import UnsupportedError
from fusion_moe.frontends import compiled
from fusion_moe.frontends.inductor import backend

HERE = Path(__file__).resolve().parent
SCRIPT = """
import sys, torch
from torch._dynamo.utils import counters
import fusion_moe, pages

model = torch.compile(pages.Layer(), backend="fusion_moe")
with torch.no_grad():
    for tokens in (6, 7):
        model(torch.zeros(tokens, pages.HIDDEN, dtype=torch.bfloat16))
print(counters["aot_autograd"]["autograd_cache_hit"])
print(fusion_moe.last_compiled().details())
"""


@pytest.fixture(autouse=True)
def none_so_far(monkeypatch):
    monkeypatch.setattr(compiled, "_compiled", type(compiled._compiled)(maxlen=2))
    torch._dynamo.reset()


def test_nothing_compiled():
    with pytest.raises(
        UnsupportedError,
        match="no graph was compiled in this process; expected a call of torch.compile",
    ):
        fusion_moe.last_compiled()


@pytest.mark.compiler
def test_it_reports_what_explain_reports():
    layer, x = pages.Layer(), torch.zeros(pages.TOKENS, pages.HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(layer, backend="fusion_moe")(x)
        assert fusion_moe.last_compiled() == fusion_moe.explain(layer, x)


@pytest.mark.compiler
def test_graphs_of_the_latest_options_and_no_more_than_are_kept():
    for tokens, rounding in (6, True), (7, False), (8, False), (9, False):
        model = torch.compile(
            pages.Layer(),
            backend="fusion_moe",
            options={"fusion_moe.contract_rounding": rounding},
            dynamic=False,
        )
        with torch.no_grad():
            model(torch.zeros(tokens, pages.HIDDEN, dtype=torch.bfloat16))
    found = fusion_moe.last_compiled()
    assert (found.graphs, dict(found.options)["contract_rounding"]) == (2, "False")


def test_a_graph_of_other_origin_is_compiled_and_not_kept():
    x = torch.ones(3)
    backend(torch.fx.symbolic_trace(lambda x: (torch.relu(x),)), [x])
    assert compiled.kept() == ()


@pytest.mark.slow
@pytest.mark.compiler
def test_hits_of_caches_are_reported_and_logged_like_misses(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    cache = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    told, logged = [], []
    for run in ("miss", "hit"):
        done = subprocess.run(
            [sys.executable, script],
            env=cache | {"TORCH_TRACE": str(tmp_path / run)},
            capture_output=True,
            text=True,
            check=True,
        )
        told.append(done.stdout.split("\n", 1))
        logged.append("".join(p.read_text() for p in (tmp_path / run).iterdir()))
    assert [hits for hits, _ in told] == ["0", "2"]
    assert told[0][1] == told[1][1]
    assert "2 graphs, 2 fusions with 4 segments for cpu" in told[0][1]
    assert [log.count('"name": "fusion_moe_fusions"') for log in logged] == [2, 2]
