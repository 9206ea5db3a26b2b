"""fusion_moe.last_compiled: the report of what torch.compile compiled.

tests/compile/test_caches.py has what it found in its caches.
"""

from __future__ import annotations

import pages
import pytest
import torch

import fusion_moe
from fusion_moe.errors import UnsupportedError
from fusion_moe.frontends import compiled
from fusion_moe.frontends.inductor import backend, compile_graph


@pytest.fixture(autouse=True)
def none_so_far(monkeypatch):
    """Inductor's kernels have no part in it, and take long."""
    monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)
    monkeypatch.setattr(compiled, "_compiled", type(compiled._compiled)(maxlen=2))
    torch._dynamo.reset()


def test_nothing_compiled():
    with pytest.raises(
        UnsupportedError,
        match="no graph was compiled in this process; expected a call of torch.compile",
    ):
        fusion_moe.last_compiled()


def test_it_reports_what_explain_reports():
    layer, x = pages.Layer(), torch.zeros(pages.TOKENS, pages.HIDDEN, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(layer, backend="fusion_moe")(x)
        assert fusion_moe.last_compiled() == fusion_moe.explain(layer, x)


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
    assert (found.graphs, found.options["contract_rounding"]) == (2, "False")


def test_a_graph_of_other_origin_is_compiled_and_not_kept():
    x = torch.ones(3)
    backend(torch.fx.symbolic_trace(lambda x: (torch.relu(x),)), [x])
    assert compiled.kept() == ()


@pytest.mark.parametrize("of", [lambda x, s: x.clamp(max=s), lambda x, s: x.relu() * s])
def test_numbers_that_are_inputs(of, monkeypatch):
    """Dynamo begins again with a constant where a graph cannot take a float; who traces the graph
    again, after Dynamo has forgotten that, does not.
    """
    monkeypatch.setattr(compiled, "_compiled", type(compiled._compiled)())
    function = torch.compile(of, backend="fusion_moe")
    for number in 7.0, 5.0, 3.0:
        function(torch.ones(2, 3), number)
    torch._dynamo.reset()
    assert fusion_moe.last_compiled().fusions is not None
