"""`contract_rounding`: which roundings it leaves out."""

from __future__ import annotations

import pytest

from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.passes import contract_rounding


def kinds(fusion: Fusion) -> list[str]:
    return [op.kind.name for op in fusion.ops]


@pytest.mark.parametrize("stored", [False, True])
def test_a_sum_of_rounded_numbers_is_rounded_once(stored):
    """Unless one of the two is stored."""
    fd = FusionDefinition()
    x, y = (fd.ops.cast(fd.define_tensor(shape=[4], dtype="f32"), dtype="bf16") for _ in "xy")
    fd.add_output(fd.ops.add(x, y))
    if stored:
        fd.add_output(y)
    assert kinds(contract_rounding(fd.fusion())) == (
        ["cast", "cast", "add"] if stored else ["add", "cast"]
    )


def test_what_was_not_rounded_is_added_as_it_is():
    fd = FusionDefinition()
    x, y = fd.define_tensor(shape=[4], dtype="f32"), fd.define_tensor(shape=[4], dtype="bf16")
    fd.add_output(fd.ops.add(fd.ops.cast(x, dtype="bf16"), y))
    assert kinds(contract_rounding(fd.fusion())) == ["cast", "add"]


def rounded(fd, v, dtype="bf16"):
    return fd.ops.cast(fd.ops.cast(v, dtype=dtype), dtype="f32")


OUTPUTS = {  # of x and y = -x
    "an input": lambda fd, x, y: [rounded(fd, x)],
    "an input, rounded twice": lambda fd, x, y: [rounded(fd, rounded(fd, x, "f16"))],
    "one that is an output too": lambda fd, x, y: [rounded(fd, y), y],
    "one that is rounded to two": lambda fd, x, y: [rounded(fd, y), rounded(fd, y, "f16")],
    "one that becomes another": lambda fd, x, y: [fd.ops.exp(rounded(fd, y)), fd.ops.exp(y)],
    "all of these": lambda fd, x, y: [
        rounded(fd, x),
        rounded(fd, rounded(fd, x, "f16")),
        rounded(fd, y, "f16"),
        rounded(fd, y),
        y,
    ],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_stay_values_of_their_own(name):
    """none becomes an input, nor another output: kernels store each"""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[4], dtype="f32")
    for v in OUTPUTS[name](fd, x, fd.ops.neg(x)):
        fd.add_output(v)
    made = contract_rounding(fd.fusion())
    assert len({*made.outputs, *made.inputs}) == len(made.outputs) + len(made.inputs)
