"""Arguments whose elements are places in memory, or numbers of rows: each bad one is an error
before anything is read, in a call and in a program's text, by kernels and by the reference. IR
operations: tests/ir/test_indices.py.
"""

from __future__ import annotations

import pytest
import torch
from contents import ANY, INDICES, NUMBERS, bad_calls, calls
from fusions import fusion_of_call

import fusion_moe
from fusion_moe.definitions.operations import SPECS, bind
from fusion_moe.errors import GroupsError, OptionError
from fusion_moe.ir.text import text

OPS = torch.ops.fusion_moe


def test_each_tensor_of_each_operation_is_in_a_table():
    """A new argument fails until it is said what its elements are, and what is bad."""
    for name in SPECS:
        arguments = getattr(OPS, name).default._schema.arguments
        tensors = {a.name for a in arguments if "Tensor" in str(a.type)}
        assert tensors - NUMBERS == INDICES.get(name, {}).keys(), name
    tested = {(op, argument) for op, _, argument, _ in bad_calls()}
    assert tested >= {(op, a) for op, of in INDICES.items() for a in of if of[a]}


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_bad_elements(target):
    with fusion_moe.options.override(target=target):
        for name, good, argument, cases in bad_calls():
            op, error = getattr(OPS, name), OptionError if argument == "peers" else GroupsError
            if argument != "peers":
                op(**good)
            for bad in cases:
                with pytest.raises(error):
                    print(name, argument, op(**bad))
                tensors = [*bind(SPECS[op.__name__], (), bad).tensors.values()]
                program = text(fusion_of_call(name, static=True, **bad))
                with pytest.raises(error):
                    print(program, argument, OPS.run(program, tensors, []))


def test_numbers_of_adapters_are_compared():
    """One that no feature has is no adapter."""
    good = calls()["fused_experts"]
    for name in ("lora_of", "gate_up_lora_of"):
        assert INDICES["fused_experts"][name] is ANY
        for far in (-1, 2**40, -(2**63)):
            none = OPS.fused_experts(**{**good, name: torch.full_like(good[name], far)})
            without = {k: v for k, v in good.items() if "lora" not in k}
            assert none.equal(OPS.fused_experts(**without))
