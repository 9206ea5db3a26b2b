"""Sizes against integers: whatever polynomials say of each other, their values say too."""

import doctest
import operator

from hypothesis import given, strategies as st

from fusion_moe.ir import sizes
from fusion_moe.ir.sizes import Size, ceildiv, exact_div, symbol, value

NAMES = ("a", "b", "c")
ENV = st.fixed_dictionaries({n: st.integers(0, 200) for n in NAMES})


def _node(parts):
    return st.tuples(st.sampled_from(("add", "sub", "mul")), parts, parts) | st.tuples(
        st.just("ceildiv"), parts, st.integers(1, 130)
    )


TREES = st.recursive(st.sampled_from(NAMES) | st.integers(-5, 40), _node, max_leaves=8)


def as_size(tree):
    """The tree as a size."""
    if isinstance(tree, tuple):
        name, a, b = tree
        return (
            ceildiv(as_size(a), b)
            if name == "ceildiv"
            else getattr(operator, name)(as_size(a), as_size(b))
        )
    return symbol(tree) if isinstance(tree, str) else tree


def as_int(tree, env):
    """The tree as Python's integers compute it."""
    if isinstance(tree, tuple):
        name, a, b = tree
        return (
            -(-as_int(a, env) // b)
            if name == "ceildiv"
            else getattr(operator, name)(as_int(a, env), as_int(b, env))
        )
    return env[tree] if isinstance(tree, str) else tree


def test_doctest():
    assert doctest.testmod(sizes).attempted > 0
    assert doctest.testmod(sizes).failed == 0


@given(TREES, ENV)
def test_the_value_of_a_size_is_the_expression_in_integers(tree, env):
    assert value(as_size(tree), env) == as_int(tree, env)


@given(TREES, TREES, TREES)
def test_equal_polynomials_are_equal(x, y, z):
    a, b, c = map(as_size, (x, y, z))
    assert a + b == b + a
    assert a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert (a * b) * c == a * (b * c)
    assert a * (b + c) == a * b + a * c
    assert (a - b) + b == a
    assert a - a == 0
    assert a * 1 == a + 0 == a
    assert hash(a + b) == hash(b + a)
    assert str(a * b + c) == str(c + b * a)


@given(TREES, ENV)
def test_a_size_without_symbols_is_an_int(tree, env):
    size = as_size(tree)
    if isinstance(size, Size):
        assert size.terms
        assert set(size.symbols()) <= set(NAMES)
        assert isinstance(size.value({n: symbol(n) for n in NAMES}), Size)
    assert isinstance(value(size, env), int)


@given(TREES, st.integers(1, 130), ENV)
def test_ceildiv(tree, by, env):
    assert value(ceildiv(as_size(tree), by), env) == -(-as_int(tree, env) // by)


@given(TREES, TREES, ENV)
def test_exact_div_undoes_a_product(x, y, env):
    a, b = as_size(x), as_size(y)
    quotient = exact_div(a, b)
    if quotient is not None:
        assert quotient * b == a
    if isinstance(b, int) and b:  # always found by a number
        assert exact_div(a * b, b) == a


def test_exact_div_by_symbols():
    t, k = symbol("t"), symbol("k")
    assert exact_div(6 * t * k, 2 * t) == 3 * k
    assert exact_div(6 * t * k + 2 * t, 2 * t) == 3 * k + 1
    assert exact_div(t + k, t + k) == 1
    assert exact_div(64 * t * k + -64 * t, t * k + -1 * t) == 64
    assert exact_div(t * t + t * k, t + k) == t
    assert exact_div(2 * t + k, t + k) is None
    assert exact_div(t + 1, 2) is None
    assert exact_div(t, k) is None
    assert exact_div(7, 2) is None
    assert exact_div(4, 0) is None
    assert exact_div(0, t) == 0


def test_values_may_be_sizes():
    t, m = symbol("t"), symbol("m")
    assert value(ceildiv(4 * t + 1, 8), {"t": 2 * m}) == ceildiv(8 * m + 1, 8)
    assert value(2 * t + 1, {"t": m * 3}) == 6 * m + 1
    assert value(ceildiv(t, 8), {"t": 8 * m}) == m
