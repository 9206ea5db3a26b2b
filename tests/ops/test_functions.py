"""fusion_moe.ops: functions from whose signatures the operations have their schemas."""

from __future__ import annotations

import inspect

import pytest
import torch
from test_ops import OPS, calls
from torch.utils._pytree import tree_leaves

from fusion_moe import ops, options
from fusion_moe.definitions.operations import SPECS


def test_there_is_a_function_for_each_operation():
    assert set(ops.__all__) == set(SPECS)
    assert ops.__all__ == sorted(ops.__all__)


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


def test_schemas_are_those_of_the_signatures(golden):
    golden("\n".join(str(getattr(torch.ops.fusion_moe, name).default._schema) for name in SPECS))


@pytest.mark.parametrize("name", calls())
@options.override(target="reference")
def test_a_function_calls_its_operation(name):
    args, kwargs = calls()[name]
    found, want = getattr(ops, name)(*args, **kwargs), getattr(OPS, name)(*args, **kwargs)
    for a, b in zip(tree_leaves(found), tree_leaves(want), strict=True):
        assert torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))
