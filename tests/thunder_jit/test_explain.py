"""fusion_moe.explain of what thunder.jit made: the same report, nothing run, for targets that are
not here too.
"""

from __future__ import annotations

import pytest
import torch
from experts import experts_of_ones

import fusion_moe
from fusion_moe.ir.core import Fusion
from fusion_moe.thunder import thunder_executors

pytestmark = pytest.mark.thunder

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 256, 128, 6, 2


class Layer(torch.nn.Module):
    """A mixture-of-experts layer."""

    def __init__(self, activation_format="bf16"):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, dtype=torch.bfloat16)
        self.experts = experts_of_ones(EXPERTS, HIDDEN, INTERMEDIATE, activation_format)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.experts(x, ids, weights)


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
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_same_report_as_of_torch_compile(x, context, ours):
    layer = Layer()
    with context():
        report = fusion_moe.explain(jitted(layer, ours), x)
        assert told(report) == told(fusion_moe.explain(layer, x))
    assert {left.op: left.why for left in report.not_fused}[
        "aten.topk.default"
    ] == "it has no translator"
    assert "test_explain.py" in report.fusions[0].segments[0].sources[0]


@pytest.mark.parametrize("whole", [True, False], ids=["module", "function"])
def test_nothing_runs_and_what_was_compiled_stays(x, whole, monkeypatch):
    import thunder

    layer = Layer()
    run = jitted(layer if whole else lambda x: layer(x))
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
    assert len(fusion_moe.explain(jitted(Layer()), x.requires_grad_()).fusions) == 1


def test_weights_may_have_no_values(x):
    with torch.device("meta"):
        layer = Layer()
    with torch.no_grad():
        assert told(fusion_moe.explain(jitted(layer), x)) == told(
            fusion_moe.explain(jitted(Layer()), x)
        )


@pytest.mark.parametrize(("target", "activation_format"), [("sm_90", "bf16"), ("sm_100", "nvfp4")])
def test_targets_that_are_not_here(x, target, activation_format):
    with torch.no_grad():
        report = fusion_moe.explain(jitted(Layer(activation_format)), x, target=target)
    assert f"for {target} (emitted, unexecuted)" in report.details()
    assert {s.kind for s in report.fusions[0].segments} == {"nvfuser"}


@pytest.mark.nvfuser
def test_the_source_is_nvfusers_definition(x):
    with torch.no_grad():
        report = fusion_moe.explain(jitted(Layer("nvfp4")), x, target="sm_100")
    assert report.stage("source").count("fd.ops.cutlass_nvfp4_grouped_mm(") == 2
