"""cover.py and `--all`: which tests run without it, and with which drawn examples."""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path

import pytest
from cover import cover, few
from hypothesis import given, settings, strategies as st

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (4, 3, 5), (2, 2, 2, 2), (7, 1, 3)])
@pytest.mark.parametrize("together", [1, 2])
def test_a_cover_has_every_value_and_every_pair(sizes, together):
    cells = list(product(*map(range, sizes)))
    chosen = [cells[i] for i in cover(cells, together)]
    assert len(chosen) < len(cells) or len(sizes) <= together or min(sizes) == 1
    for axis, size in enumerate(sizes):
        assert {cell[axis] for cell in chosen} == set(range(size))
    if together == 2:
        for a, b in product(range(len(sizes)), repeat=2):
            assert {(c[a], c[b]) for c in chosen} == {(c[a], c[b]) for c in cells}


def test_a_cover_of_a_grid_with_holes_has_only_its_cells():
    cells = [(a, b) for a, b in product(range(4), repeat=2) if a != b]
    assert cover(cells, 1) == [0, 3, 8, 11]
    assert cover(cells, 2) == list(range(len(cells)))


def test_few_are_spread():
    marked = [hasattr(v, "marks") for v in few(range(10), 3)]
    assert [i for i, mark in enumerate(marked) if not mark] == [0, 3, 6]
    (one, other) = few([(1, 2), pytest.param(3, 4, id="x", marks=pytest.mark.slow)])
    assert one == (1, 2)
    assert (other.values, other.id, len(other.marks)) == ((3, 4), "x", 2)


def test_examples_are_the_same_whatever_was_imported(monkeypatch, tmp_path):
    def drawn():
        values = []
        settings(max_examples=100)(given(st.integers())(lambda value: values.append(value)))()
        return values

    before = drawn()
    (tmp_path / "of_numbers.py").write_text(f"NUMBERS = {list(range(1000, 2000))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("of_numbers")
    assert drawn() == before


TESTS = """
import pytest
from cover import few

@pytest.mark.slow
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
def test_slow(a, b): pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
def test_pairs(a, b): pass

@pytest.mark.parametrize("a", few(range(9), 2))
def test_few(a): pass

@pytest.mark.exhaustive
def test_long(): pass
"""


@pytest.mark.parametrize(
    ("asked", "passed"),
    [((), 3 + 6 + 2), (("--all",), 6 + 6 + 9 + 1), (("tests/test_inside.py::test_long",), 1)],
)
def test_what_runs(pytester, asked, passed):
    for name in ("conftest", "precompiled", "cover"):
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        path = pytester.path / "tests" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    pytester.makeini("[pytest]\ntestpaths = tests\nmarkers =\n    exhaustive\n    slow")
    (pytester.path / "tests" / "test_inside.py").write_text(TESTS, encoding="utf-8")
    pytester.runpytest_inprocess(*asked).assert_outcomes(
        passed=passed, deselected=22 - passed if "::" not in "".join(asked) else 0
    )
