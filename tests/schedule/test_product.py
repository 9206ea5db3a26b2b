"""The plan of the three products of training: one type, built in one place, that agrees with what
the operations compute.
"""

from __future__ import annotations

import pytest
import torch
from fusions import G

from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.kinds import KINDS
from fusion_moe.schedule.product import GroupedProduct, products

M, N, K = 7, 4, 8
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
SIZES = {"M": M, "N": N, "K": K, "G": G}


def built(kind: str) -> Fusion:
    """A product by itself: a, b, offs."""
    fd = FusionDefinition()
    shapes = {
        "grouped_mm": ([M, K], [G, N, K]),
        "grouped_mm_t": ([M, N], [G, N, K]),
        "grouped_outer": ([M, N], [M, K]),
    }[kind]
    a, b = (fd.define_tensor(shape=s, dtype="f32") for s in shapes)
    ends = fd.groups_of(fd.define_tensor(shape=[G], dtype="i32"), M)
    fd.add_output(
        getattr(fd.ops, kind)(
            *(fd.ops.partition(v, ends) if len(v.type.shape) == 2 else v for v in (a, b)), ends
        )
    )
    return fd.fusion()


KNOWN = {
    "grouped_mm": ("fprop", "K", 1),
    "grouped_mm_t": ("dgrad", "N", 1),
    "grouped_outer": ("wgrad", "M", 2),
}


def test_every_grouped_kind_has_a_plan():
    assert {name for name, kind in KINDS.items() if kind.role == "grouped"} == set(KNOWN)


@pytest.mark.parametrize("kind", KNOWN)
def test_plan(kind):
    (product,) = products(built(kind))
    assert (product.kind, product.contracted, len(product.ragged)) == KNOWN[kind]
    assert product == GroupedProduct.of(product.op)
    assert (product.weight is product.b) == (kind != "grouped_outer")
    assert {
        axis: product.size(axis) for axis in SIZES if kind != "grouped_outer" or axis != "G"
    } | {"G": G} == SIZES
    assert product.ends.type.ends is not None


@pytest.mark.parametrize("kind", KNOWN)
def test_the_axes_say_what_is_computed(kind):
    """As an einsum over each group's rows, in small integers."""
    fusion = built(kind)
    (product,) = products(fusion)
    g = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-4, 5, [*map(int, v.type.shape)], generator=g).float()
        for v in fusion.inputs[:2]
    )
    (found,) = fusion.evaluate(a, b, ENDS)
    want, start = torch.zeros_like(found), 0
    for group, end in enumerate(ENDS.tolist()):
        sides = [
            t[start:end] if v in product.ragged else t[group]
            for t, v in zip((a, b), (product.a, product.b), strict=True)
        ]
        axes = [axes.replace("G", "") for axes in product.axes]
        want[group if product.weight is None else slice(start, end)] = torch.einsum(
            f"{axes[0]},{axes[1]}->{axes[2]}", *sides
        )
        start = end
    assert found.equal(want)


def test_training_has_all_three():
    """The derivative of an fprop by its rows is a dgrad, that by its weight a wgrad, over the same
    ends and sizes.
    """
    (forward,) = products(built("grouped_mm"))
    found = products(differentiate(built("grouped_mm"), (0, 1)).backward)
    assert [p.kind for p in found] == ["dgrad", "wgrad"]
    assert [[p.size(axis) for axis in "MNK"] for p in (forward, *found)] == [[M, N, K]] * 3
    assert found[0].ends is found[1].ends
