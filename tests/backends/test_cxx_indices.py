"""Indices as expressions: equal where they are built alike, folded, and worth what Python
computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given, strategies as st

from fusion_moe.backends.cxx.indices import (
    ONE,
    Call,
    Index,
    Number,
    Variable,
    bounds,
    flat,
    is_index,
    progression,
    reshaped,
    size,
    unflat,
)
from fusion_moe.ir.sizes import ceildiv, symbol

J, K = Variable("j"), Variable("k")
Meaning = Callable[[int, int], int]


@st.composite
def indices(draw: st.DrawFn, depth: int = 4) -> tuple[Index, Meaning]:
    """An index of j and k, and the same in Python; never negative."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        n = draw(st.integers(0, 9))
        return draw(
            st.sampled_from([(J, lambda j, k: j), (K, lambda j, k: k), (Number(n), lambda j, k: n)])
        )
    (a, left), n = draw(indices(depth - 1)), draw(st.integers(1, 9))
    operator = draw(st.sampled_from("+*/%"))
    if operator == "/":
        return a // Number(n), lambda j, k: left(j, k) // n
    if operator == "%":
        return a % Number(n), lambda j, k: left(j, k) % n
    b, right = draw(indices(depth - 1))
    return (
        (a + b, lambda j, k: left(j, k) + right(j, k))
        if operator == "+"
        else (a * b, lambda j, k: left(j, k) * right(j, k))
    )


@given(indices(), st.integers(0, 99), st.integers(0, 99))
def test_an_index_is_worth_what_python_computes(drawn, j, k):
    """So is its text, where / divides whole numbers."""
    index, meaning = drawn
    assert index.evaluate({"j": j, "k": k}) == meaning(j, k)
    assert eval(str(index).replace("/", "//"), {"j": j, "k": k}) == meaning(j, k)


@given(indices(), st.integers(1, 40))
def test_bounds_hold(drawn, below):
    index = drawn[0].replaced("k", J)
    values, found = [index.evaluate({"j": j}) for j in range(below)], bounds(index, below)
    assert found is None or (found[0] <= min(values) and max(values) <= found[1])


@given(indices(), st.integers(1, 16))
def test_a_progression_is_one(drawn, count):
    index = drawn[0].replaced("k", J)
    found = progression(index, count)
    for first in range(0, 8 * count, count) if found else ():
        start, *others = [index.evaluate({"j": first + v}) for v in range(count)]
        assert others == [start + found[0] * v for v in range(1, count)]
        assert start % found[1] == 0 if found[1] else start == 0


RUNS = J // Number(32) * Number(64) + J % Number(32)  # of 32 columns each, every other one


@pytest.mark.parametrize(
    ("index", "count", "progress", "bounded"),
    [
        (J, 8, (1, 8), (0, 2**40 - 1)),
        (J + Number(768), 512, (1, 256), (768, 2**40 + 767)),
        (J % Number(768), 8, (1, 8), (0, 767)),
        (J // Number(768), 8, (0, 1), (0, (2**40 - 1) // 768)),
        (J * Number(2) + ONE, 8, (2, 1), (1, 2**41 - 1)),
        (RUNS + Number(32), 8, (1, 8), (32, 2**41 - 1)),
        (RUNS, 32, (1, 32), (0, 2**41 - 33)),
        (RUNS, 64, None, (0, 2**41 - 33)),
        (J % Number(12), 8, None, (0, 11)),
        (Call("f", (J,)), 8, None, None),
    ],
)
def test_nothing_counts_through_columns(index, count, progress, bounded):
    """There may be 2^40 of them."""
    assert progression(index, count) == progress
    assert bounds(index, 2**40) == bounded


@given(indices())
def test_an_index_depends_on_its_variables_alone(drawn):
    index, _ = drawn
    index.evaluate(dict.fromkeys(index.reads, 1))
    for name in index.reads:
        with pytest.raises(KeyError, match=name):
            index.evaluate(dict.fromkeys(index.reads - {name}, 1))


@given(indices(), indices())
def test_equal_indices_have_one_text_and_hash(first, second):
    (a, _), (b, _) = first, second
    assert (a == b) == (str(a) == str(b))
    assert len({a, b}) == (1 if a == b else 2)


def test_numbers_are_folded():
    zero, one, eight = Number(0), Number(1), Number(8)
    assert Number(3) + Number(4) * eight == Number(35)
    assert J + zero == zero + J == J * one == one * J == J // one == J
    assert J * zero == zero * J == zero // eight == zero % eight == J % one == zero
    assert J // eight * eight + J % eight == J
    assert J // eight * Number(16) + J % eight != J
    assert str(J // eight * Number(16) + Number(-1)) == "(((j / 8) * 16) + (-1))"


def test_a_call_reads_its_arguments():
    call = Call("clamp_index", (Variable("e0"), size(symbol("m") * 2)))
    assert str(call) == "clamp_index(e0, (2 * n_m))"
    assert (call + J).reads == {"e0", "n_m", "j"}
    with pytest.raises(TypeError, match="clamp_index"):
        call.evaluate({"e0": 0, "n_m": 1})


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_size_is_worth_what_its_symbols_are(a, b):
    s = 3 * symbol("a") * symbol("b") + ceildiv(symbol("a"), 128) + 5
    assert size(s).evaluate({"n_a": a, "n_b": b}) == 3 * a * b + -(-a // 128) + 5


@given(st.data())
def test_reshaped_indices_are_those_of_torch(data):
    """Each element of a tensor of random shape, seen in another."""
    old = data.draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    new = data.draw(st.permutations(old) | st.just([prod(old)]) | st.just([1, prod(old), 1]))
    names = [Variable(f"i{d}") for d in range(len(new))]
    found, of = reshaped(names, new, old), torch.arange(prod(old)).reshape(old)
    back = flat(unflat(Variable("at"), new), new)
    for i, element in zip(itertools.product(*map(range, new)), of.flatten().tolist(), strict=True):
        at = dict(zip((n.name for n in names), i, strict=True))
        assert of[tuple(x.evaluate(at) for x in found)] == element
        assert back.evaluate({"at": element}) == flat(names, new).evaluate(at) == element


def test_the_own_index_of_a_dimension():
    assert is_index(J, Variable("j"), 5)
    assert not is_index(K, J, 5)
    assert is_index(Number(0), J, 1)
    assert not is_index(Number(0), J, 2)
