"""Arithmetic on group sizes against plain Python."""

import doctest
from functools import partial

import pytest
import torch
from bad_calls import messages
from cover import examples
from hypothesis import given, strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fusion_moe.layouts import groups

EDGES = [0, 1, 7, 15, 17, 127, 128, 129]
SIZES = st.lists(st.sampled_from(EDGES) | st.integers(0, 300), min_size=1, max_size=9)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def ceil(n, align):
    return -(-n // align) * align


def test_doctest():
    assert doctest.testmod(groups).failed == 0


@examples(5)
@given(SIZES, st.sampled_from([1, 16, 128]), st.integers(0, 5))
def test_against_python(sizes, align, spare):
    ends = groups.ends_from_sizes(torch.tensor(sizes, dtype=torch.int32))
    rows = sum(sizes) + spare
    assert ends.tolist() == [sum(sizes[: g + 1]) for g in range(len(sizes))]
    assert groups.starts(ends).tolist() == [sum(sizes[:g]) for g in range(len(sizes))]
    assert groups.sizes(ends).tolist() == sizes
    assert groups.padded_starts(ends, align).tolist() == [
        sum(ceil(n, align) for n in sizes[:g]) for g in range(len(sizes))
    ]
    assert (
        groups.row_groups(ends, rows).tolist()
        == [g for g, n in enumerate(sizes) for _ in range(n)] + [len(sizes)] * spare
    )
    assert (
        sum(ceil(n, align) for n in sizes)
        <= groups.bound(sum(sizes), len(sizes), align)
        <= groups.bound(rows, len(sizes), align)
    )
    assert torch.equal(groups.clamp_ends(ends, rows), ends)
    groups.check_ends(ends, rows)
    made = (
        ends,
        groups.starts(ends),
        groups.sizes(ends),
        groups.padded_starts(ends, align),
        groups.row_groups(ends, rows),
    )
    assert {t.dtype for t in made} == {torch.int32}


@examples(5)
@given(SIZES, st.sampled_from([1, 4, 32]), st.integers(0, 5))
def test_blocks_of_each_run(sizes, block, spare):
    """Each run in blocks of its own, in order, within those that are allocated; rows past the last
    end behind all.
    """
    ends, rows = groups.ends_from_sizes(torch.tensor(sizes, dtype=torch.int32)), sum(sizes) + spare
    slots, count = (
        groups.block_slots(ends, rows, block).tolist(),
        groups.block_count(rows, len(sizes), block),
    )
    assert count == ceil(rows, block) // block + len(sizes)
    before, row = 0, 0
    for n in sizes:
        mine, row = slots[row : row + n], row + n
        if n:
            assert mine == list(range(mine[0], mine[0] + n))
            assert mine[0] % block == 0
            assert mine[0] // block >= before
            before = mine[-1] // block + 1
    assert before <= count
    assert slots[row:] == [count * block] * spare


@examples(10)
@given(st.integers(0, 3000), st.integers(1, 300), st.sampled_from([1, 16, 32, 128]))
def test_bound_is_reached(total, count, align):
    """Nothing less would do: one-row runs, and one run with the rest."""
    ones = min(total, count)
    worst = [1] * (ones - 1) + [total - ones + 1] if total else []
    assert sum(worst) == total
    assert sum(ceil(n, align) for n in worst) == groups.bound(total, count, align)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 256])
def test_many_groups(count):
    sizes = [EDGES[g * 5 % len(EDGES)] for g in range(count)]
    ends = groups.ends_from_sizes(torch.tensor(sizes))
    assert groups.padded_starts(ends, 128).tolist() == [
        sum(ceil(n, 128) for n in sizes[:g]) for g in range(count)
    ]
    assert torch.bincount(groups.row_groups(ends, sum(sizes)), minlength=count).tolist() == sizes


def test_no_groups_and_no_rows():
    none = i32()
    assert groups.row_groups(none, 3).tolist() == [0, 0, 0]
    for made in (
        groups.ends_from_sizes(none),
        groups.starts(none),
        groups.sizes(none),
        groups.padded_starts(none, 128),
        groups.clamp_ends(none, 3),
    ):
        assert made.tolist() == []
    assert groups.row_groups(i32(0, 0), 0).tolist() == []
    assert groups.bound(0, 5, 128) == 0


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.integers(0, 100))
def test_clamped_ends_are_safe(ends, rows):
    safe = groups.clamp_ends(torch.tensor(ends, dtype=torch.int32), rows)
    assert safe.dtype == torch.int32
    groups.check_ends(safe, rows)


def test_clamping_keeps_the_good_groups_before_a_bad_one():
    assert groups.clamp_ends(i32(2, 5, 4, -7, 9, 99), 10).tolist() == [2, 5, 5, 5, 9, 10]


def test_nothing_waits_for_the_device():
    with FakeTensorMode():
        ends = groups.clamp_ends(groups.ends_from_sizes(torch.empty(4, dtype=torch.int32)), 10)
        assert groups.row_groups(ends, 10).shape == (10,)
        assert groups.padded_starts(ends, 128).shape == groups.sizes(ends).shape == (4,)


def test_bound_of_a_symbolic_size():
    """A SymInt stays one: no guard on its value, and the expression is right for other sizes."""
    env = ShapeEnv()
    rows = env.create_symintnode(
        env.create_symbol(50, ConstantSource("m"), DimDynamic.DYNAMIC), hint=50
    )
    bound = groups.bound(rows, 4, 128)
    assert isinstance(bound, torch.SymInt)
    (symbol,) = bound.node.expr.free_symbols
    assert not env.guards
    for total in (3, 4, 130, 5000):
        assert int(bound.node.expr.subs(symbol, total)) == groups.bound(total, 4, 128)


def test_bad_ends(golden):
    """The first bad group is named."""
    groups.check_ends(i32(0, 0, 2), 5)  # the last end may lie before the last row
    bad = {
        "below the one before": i32(3, 5, 4, 12),
        "past the rows": i32(3, 13, 4, 99),
        "negative": i32(-1, 3),
        "negative later": i32(3, -2),
        "int64": i32(1, 2).long(),
        "a matrix": i32(1, 2)[None],
    }
    calls = {what: partial(groups.check_ends, ends, 12) for what, ends in bad.items()}
    named = {"by another name": partial(groups.check_ends, i32(3, -2), 12, "group_ends")}
    golden(messages(calls | named))


def test_bad_ids(golden):
    ids, less = torch.tensor([[0, 7], [3, 1]]), torch.tensor([[0, 7], [-1, 1]])
    for dtype in torch.int32, torch.int64:
        groups.check_ids(ids.to(dtype), 8)
        groups.check_ids(less.to(dtype), 8, least=-1)
    golden(
        messages(
            {
                "past the last": lambda: groups.check_ids(ids, 7),
                "past the last, int32": lambda: groups.check_ids(ids.int(), 7),
                "past the last and negative": lambda: groups.check_ids(less, 7, "experts"),
                "negative": lambda: groups.check_ids(less, 8),
                "past the last beside none": lambda: groups.check_ids(less, 7, least=-1),
                "floats": lambda: groups.check_ids(ids.float(), 8),
            }
        )
    )
