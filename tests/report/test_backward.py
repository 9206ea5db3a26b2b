"""explain(..., backward=True): the segments of both passes, what is saved and made again, where
gradients come from.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bad_calls import messages
from experts import experts

import fusion_moe
from fusion_moe.nn import add_lora_

ops = torch.ops.fusion_moe
EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K = 4, 64, 32, 6, 2
ROWS = TOKENS * TOP_K


class Layer(torch.nn.Module):
    """A router, experts with weights in bf16, and a residual sum."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.gate_up = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16())
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16())

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.routed(x, ids, weights)

    def routed(self, x, ids, weights):
        return x + ops.fused_experts(
            x, ids, weights, [self.gate_up], [self.down], weight_format="bf16"
        )


class Frozen(Layer):
    """The same with experts in NVFP4."""

    def __init__(self):
        super().__init__()
        del self.gate_up, self.down
        self.experts = experts(EXPERTS, HIDDEN, INTERMEDIATE)

    def routed(self, x, ids, weights):
        return x + self.experts(x, ids, weights)


class Adapted(Frozen):
    """And with adapters of them, which alone train."""

    def __init__(self):
        super().__init__()
        add_lora_(self, 8, 16)


@pytest.fixture
def x():
    return torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()


@pytest.mark.parametrize("layer", [Layer, Frozen, Adapted])
def test_table(layer, x, golden):
    weights, ids = torch.randn(TOKENS, EXPERTS).bfloat16().topk(TOP_K)
    report = fusion_moe.explain(layer().routed, x, ids, weights.requires_grad_(), backward=True)
    golden(report.details())
    assert max(map(len, report.details().splitlines())) <= 120


def test_what_is_saved_is_what_no_operation_may_make_again(x):
    saved = fusion_moe.explain(Layer(), x, backward=True).saved
    assert [s.name for s in saved if not s.made_by] == [
        "router.weight",
        "args[0]",
        "gate_up",
        "down",
    ]
    made = {(s.name, s.type): s.bytes for s in saved if s.made_by.startswith("fusion0")}
    assert made == {
        ("route", f"i32[{EXPERTS}]"): 4 * EXPERTS,
        ("route", f"i32[{ROWS}]"): 4 * ROWS,
        ("route", f"i32[{TOKENS}, {TOP_K}]"): 4 * ROWS,
        ("grouped_mm", f"bf16[{ROWS}, {2 * INTERMEDIATE}]"): 2 * ROWS * 2 * INTERMEDIATE,
    }


def test_no_product_is_made_again_and_weights_get_products_of_the_backward(x):
    report = fusion_moe.explain(Layer(), x, backward=True)
    forward, backward = report.fusions
    assert (forward.backward, backward.backward) == (False, True)
    assert forward.made_again == ()
    assert {"silu", "index_select"} <= set(backward.made_again)
    assert not {"grouped_mm", "grouped_mm_t", "grouped_outer", "route"} & set(backward.made_again)
    kinds = {s.id: s.ops for s in backward.segments}
    made_by = {g.name: g.made_by for g in report.gradients}
    assert list(made_by) == ["router.weight", "args[0]", "gate_up", "down"]
    assert {made_by[name].partition(".")[0] for name in ("gate_up", "down")} == {"fusion1"}
    assert sum(kind.count("grouped_outer") for kind in kinds.values()) == 2


def test_frozen_weights_get_no_gradient(x):
    report = fusion_moe.explain(Frozen(), x, backward=True)
    assert [g.name for g in report.gradients] == ["router.weight", "args[0]"]
    assert not any("grouped_outer" in s.ops for s in report.fusions[1].segments)


def test_the_rewriting_is_listed_unless_it_is_off(x):
    assert fusion_moe.explain(Layer(), x, backward=True).fusions[1].rewritten == (
        "router_gradient of combine",
    )
    with fusion_moe.options.override(router_gradient=False):
        assert fusion_moe.explain(Layer(), x, backward=True).fusions[1].rewritten == ()


def test_without_it_the_forward_pass_alone_is_reported(x):
    report = fusion_moe.explain(Layer(), x)
    assert (report.graphs, len(report.fusions), report.saved, report.gradients) == (1, 1, (), ())


def test_several_graphs_have_a_backward_each(x):
    first, second = Layer(), Layer()

    def model(x):
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    report = fusion_moe.explain(model, x, backward=True)
    assert report.graphs == 4
    assert [f.backward for f in report.fusions] == [False, True]
    assert [f.times for f in report.fusions] == [2, 2]
    assert [g.name for g in report.gradients].count("gate_up") == 2


def test_bad_calls(x, golden):
    explain = partial(fusion_moe.explain, Layer(), x, backward=True)
    golden(
        messages(
            {
                "without gradients": torch.no_grad()(explain),
                "measured": lambda: explain(load=True),
            }
        )
    )
