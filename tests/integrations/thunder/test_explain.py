"""fusion_moe.explain of what thunder.jit made: the same report, nothing run, for targets that are
not here too.
"""

from __future__ import annotations

import pytest
import torch
from layer import Layer

import fusion_moe
from fusion_moe.integrations.nvfuser import library
from fusion_moe.ir.core import Fusion
from fusion_moe.thunder import thunder_executors

pytestmark = pytest.mark.thunder

HIDDEN, TOKENS = 256, 6


@pytest.fixture
def x():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()


def jitted(f, ours=True):
    import thunder

    return thunder.jit(f, executors=thunder_executors() if ours else None)


def told(report):
    """What a report says of each segment, wherever it was found."""
    return [
        (s.kind, s.ops, s.flops, s.bytes_written, s.backend)
        for f in report.fusions
        for s in f.segments
    ]


@pytest.mark.parametrize("ours", [True, False], ids=["our executor", "thunder's alone"])
def test_the_same_report_as_of_torch_compile(x, ours):
    """Of weights without values too."""
    layer = Layer(hidden=HIDDEN)
    with torch.device("meta"):
        meta = Layer(hidden=HIDDEN)
    with torch.inference_mode():
        report = fusion_moe.explain(jitted(layer if ours else meta, ours), x)
        assert told(report) == told(fusion_moe.explain(layer, x))
    assert {left.op: left.why for left in report.not_fused}[
        "aten.topk.default"
    ] == "it has no translator"
    assert "layer.py" in report.fusions[0].segments[0].sources[0]


def test_nothing_runs_and_what_was_compiled_stays(x, monkeypatch):
    import thunder

    layer = Layer(hidden=HIDDEN)
    run = jitted(lambda x: layer(x))
    with torch.no_grad():
        run(x)
        before = thunder.cache_misses(run), {name: id(p) for name, p in layer.named_parameters()}
        monkeypatch.setattr(Fusion, "evaluate", None)
        assert len(fusion_moe.explain(run, x[:3]).fusions) == 1
        monkeypatch.undo()
        assert before == (
            thunder.cache_misses(run),
            {name: id(p) for name, p in layer.named_parameters()},
        )


def test_of_a_training_step_the_forward_pass(x):
    assert len(fusion_moe.explain(jitted(Layer(hidden=HIDDEN)), x.requires_grad_()).fusions) == 1


def test_targets_that_are_not_here(x):
    with torch.no_grad():
        report = fusion_moe.explain(
            jitted(Layer("nvfp4", hidden=HIDDEN, inner=128)), x, target="sm_100"
        )
    assert "for sm_100 (emitted, unexecuted)" in report.details()
    assert {s.kind for s in report.fusions[0].segments} == {"nvfuser"}
    if not library.why_missing():
        assert report.stage("source").count("fd.ops.cutlass_nvfp4_grouped_mm(") == 2
