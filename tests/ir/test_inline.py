"""Programs in a program: partitions by the same ends are one."""

from __future__ import annotations

import torch

from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion


def product() -> Fusion:
    """x bf16[s0, 8], w bf16[2, 8, 8], ends i32[2] -> bf16[s0/g0, 8]"""
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[-1, 8], dtype="bf16"),
        fd.define_tensor(shape=[2, 8, 8], dtype="bf16"),
    )
    offs = fd.define_tensor(shape=[2], dtype="i32")
    ends = fd.groups_of(offs, x.type.shape[0])
    fd.add_output(fd.ops.cast(fd.ops.grouped_mm(fd.partition_by(x, ends), w, ends), dtype="bf16"))
    return fd.fusion()


def two(same: bool) -> Fusion:
    """A product of what a product made, by the same ends or by others."""
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[-1, 8], dtype="bf16"),
        fd.define_tensor(shape=[2, 8, 8], dtype="bf16"),
    )
    first = fd.define_tensor(shape=[2], dtype="i32")
    second = first if same else fd.define_tensor(shape=[2], dtype="i32")
    sizes = {"s0": x.type.shape[0]}
    (y,) = fd.inline(product(), (x, w, first), sizes)
    (y,) = fd.inline(product(), (y, w, second), sizes)
    fd.add_output(y)
    return fd.fusion()


def test_the_same_ends_are_one_partition():
    assert [op.kind.name for op in two(same=True).ops].count("ends") == 1


def test_other_ends_partition_anew():
    x, w = torch.randn(5, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    first, second = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    (y,) = product().evaluate(x, w, first)
    (want,) = product().evaluate(y, w, second)
    (got,) = two(same=False).evaluate(x, w, first, second)
    assert torch.equal(got, want)
