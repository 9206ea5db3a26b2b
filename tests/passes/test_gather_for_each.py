"""Rows that several products read are gathered by each."""

from __future__ import annotations

import torch

from fusion_moe.backends import TARGETS
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.text import parse, text
from fusion_moe.passes import gather_for_each

T, G, N, K = 6, 3, 5, 4


def gathers(fusion: Fusion) -> int:
    return sum(op.kind.name == "index_select" for op in fusion.ops)


def routed(products: int) -> Fusion:
    """Sorted rows of x that so many products read."""
    fd = FusionDefinition()
    x, ids = (
        fd.define_tensor(shape=[T, K], dtype="f32"),
        fd.define_tensor(shape=[T, 1], dtype="i64"),
    )
    w = fd.define_tensor(shape=[G, N, K], dtype="f32")
    ends, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", G))
    rows = fd.ops.index_select(x, row_of, dim=0)
    makers = (
        lambda: fd.ops.grouped_mm(rows, w, ends),
        lambda: fd.ops.grouped_outer(rows, rows, ends),
        lambda: fd.ops.grouped_mm(rows, w, ends),
    )
    for make in makers[:products]:
        fd.add_output(make())
    return fd.fusion()


def test_each_product_has_its_own():
    found = {n: gathers(gather_for_each(routed(n), TARGETS["cuda"])) for n in (1, 2, 3)}
    assert found == {1: 1, 2: 3, 3: 4}  # of the outer product both operands


def test_each_product_sees_an_input_in_its_own_way():
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[T, K], dtype="f32"),
        fd.define_tensor(shape=[G, N, K], dtype="f32"),
    )
    ends = fd.ops.ends(
        fd.define_tensor(shape=[G], dtype="i32"), rows=T, groups=fd.define_groups("g", G)
    )
    rows = fd.ops.partition(x, ends)
    fd.add_output(fd.ops.grouped_mm(rows, w, ends))
    fd.add_output(fd.ops.grouped_outer(rows, rows, ends))
    made = gather_for_each(fd.fusion(), TARGETS["cuda"])
    assert [op.kind.name for op in made.ops].count("partition") == 3
    assert [op.kind.name for op in made.ops].count("ends") == 1


def test_each_product_has_its_own_number_where_its_one_group_ends():
    fd = FusionDefinition()
    x, w = (
        fd.define_tensor(shape=[T, K], dtype="f32"),
        fd.define_tensor(shape=[1, N, K], dtype="f32"),
    )
    last = fd.ops.full(shape=[1], fill_value=T, dtype="i32")
    for group in "ab":
        ends = fd.ops.ends(last, rows=T, groups=fd.define_groups(group, 1))
        fd.add_output(fd.ops.grouped_mm(fd.ops.partition(x, ends), w, ends))
    made = gather_for_each(fd.fusion(), TARGETS["cuda"])
    assert [op.kind.name for op in made.ops].count("full") == 2


def test_one_product_leaves_all_as_it_is():
    fusion = routed(1)
    assert gather_for_each(fusion, TARGETS["cuda"]) is fusion


def test_meaning_and_text_stay():
    fusion = routed(3)
    made = gather_for_each(fusion, TARGETS["cuda"])
    given = (torch.randn(T, K), torch.tensor([[2], [0], [0], [1], [2], [2]]), torch.randn(G, N, K))
    assert all(map(torch.equal, made.evaluate(*given), fusion.evaluate(*given)))
    assert text(parse(text(made))) == text(made)
