"""fusion_moe.ops: functions with the signatures of the operations, which are traced as these."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import get_type_hints

import pytest
import torch
from test_ops import calls
from torch import Tensor

from fusion_moe import ops
from fusion_moe.definitions.operations import SPECS

TYPES = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": Sequence[Tensor],
    "int": int,
    "float": float,
    "Optional[float]": float | None,
    "str": str,
    "Optional[str]": str | None,
    "bool": bool,
    "Optional[int]": int | None,
    "Optional[ScalarType]": torch.dtype | None,
}


def schema_of(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.fusion_moe, name).default._schema


def test_there_is_a_function_for_each_operation():
    assert set(ops.__all__) == set(SPECS)
    assert ops.__all__ == sorted(ops.__all__)


@pytest.mark.parametrize("name", SPECS)
def test_signatures_are_those_of_the_schemas(name):
    function, schema = getattr(ops, name), schema_of(name)
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    stated = [
        (p.name, p.kind is p.KEYWORD_ONLY, p.default, hints[p.name]) for p in parameters.values()
    ]
    want = [
        (
            a.name,
            a.kwarg_only,
            a.default_value if a.has_default_value() else inspect.Parameter.empty,
            TYPES[str(a.real_type)],
        )
        for a in schema.arguments
    ]
    assert stated == want
    returned = tuple(TYPES[str(r.type)] for r in schema.returns)
    assert hints["return"] == (returned[0] if len(returned) == 1 else tuple[returned])


@pytest.mark.parametrize("name", SPECS)
def test_docs_say_what_each_argument_is(name):
    function = getattr(ops, name)
    text = inspect.getdoc(function)
    others = {"nvfp4_grouped_mm": "grouped_mm", "expert_mlp": "fused_experts"}
    if name in others:
        assert f"`{others[name]}`" in text
        text += inspect.getdoc(getattr(ops, others[name]))
    missing = [
        argument for argument in inspect.signature(function).parameters if argument not in text
    ]
    assert not missing
    assert "->" in text


@pytest.mark.parametrize("name", calls())
def test_a_call_is_traced_as_the_operation(name):
    """Any of its arguments reaches the operation, in its place, and nothing else is in the
    graph.
    """
    args, kwargs = calls()[name]

    def call(*args):
        return getattr(ops, name)(*args, **kwargs)

    graph = torch.fx.symbolic_trace(getattr(ops, name)).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes] == [getattr(torch.ops.fusion_moe, name)]
    given = {
        a.name: v for a, v in zip(schema_of(name).arguments, nodes[0].args, strict=False)
    } | nodes[0].kwargs
    assert {argument: str(v) for argument, v in given.items()} == {
        a.name: a.name for a in schema_of(name).arguments
    }
    found, want = call(*args), getattr(torch.ops.fusion_moe, name)(*args, **kwargs)
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, want)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
