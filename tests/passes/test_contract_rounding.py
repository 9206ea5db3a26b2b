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
    assert kinds(contract_rounding(fd.fusion())) == (["cast", "cast", "add"] if stored else ["add", "cast"])


def test_what_was_not_rounded_is_added_as_it_is():
    fd = FusionDefinition()
    x, y = fd.define_tensor(shape=[4], dtype="f32"), fd.define_tensor(shape=[4], dtype="bf16")
    fd.add_output(fd.ops.add(fd.ops.cast(x, dtype="bf16"), y))
    assert kinds(contract_rounding(fd.fusion())) == ["cast", "add"]
