"""fusion_moe.diff: what an option, a size or a target changes."""

from __future__ import annotations

from dataclasses import replace

import pages
import pytest

import fusion_moe
from fusion_moe import options
from fusion_moe.report import Measured


@pytest.fixture(scope="module")
def cpu():
    return pages.explained(target="reference")


@pytest.fixture(scope="module")
def hopper():
    return pages.explained(target="sm_90")


@pytest.fixture(scope="module")
def exact():
    with options.override(contract_rounding=False):
        return pages.explained(target="reference")


def test_equal_reports_do_not_differ(cpu):
    difference = fusion_moe.diff(cpu, cpu)
    assert not difference
    assert str(difference) == "fusion_moe.diff: nothing differs"


def test_an_option(cpu, exact, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    difference = fusion_moe.diff(cpu, exact)
    golden(str(difference))
    assert [c.name for c in difference.changes["asked"]] == ["contract_rounding"]
    assert repr(difference) == "<Difference of fusion_moe.diff: asked, fusion0.0>"


def test_a_target(cpu, hopper, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    difference = fusion_moe.diff(cpu, hopper)
    golden(str(difference))
    assert [about for about in difference.changes if "fusion0" in about] == [
        "fusion0.0, before",
        "fusion0.1, before",
        "fusion0.0, after",
    ]


def test_changed_lines_and_no_renumbered_values(cpu):
    (fusion,) = cpu.fusions
    first, *others = fusion.segments
    ir = first.ir.replace("t0", "t99").replace("silu", "sigmoid")
    changed = replace(fusion, segments=(replace(first, ir=ir), *others))
    difference = fusion_moe.diff(cpu, replace(cpu, fusions=(changed,)))
    ((about, (change,)),) = difference.changes.items()
    assert (about, change.name, str(change)) == ("fusion0.0", "IR", "1 lines more, 1 less")
    signs = [line.strip()[0] for line in difference.details().splitlines() if "silu" in line]
    assert signs == ["-"]
    assert "sigmoid" not in str(difference)


def test_reasons_that_come_and_go(cpu):
    (call,) = cpu.not_fused
    calls = replace(call, why="another reason"), replace(call, op="aten.mm.default")
    lines = str(fusion_moe.diff(cpu, replace(cpu, not_fused=calls))).splitlines()
    assert lines[-2:] == [
        "  aten.topk.default     it has no translator (1 time) -> another reason (1 time)",
        "  aten.mm.default       none -> it has no translator (1 time)",
    ]


def test_times_differ_where_their_spreads_do_not_overlap(cpu):
    def timed(*seconds):
        (fusion,) = cpu.fusions
        first, second = fusion.segments
        first = replace(first, measured=Measured(*seconds, 100, 1e-6))
        return replace(cpu, fusions=(replace(fusion, segments=(first, second)),))

    assert not fusion_moe.diff(timed(2e-3, 1e-3, 4e-3), timed(3e-3, 2e-3, 5e-3))
    difference = fusion_moe.diff(timed(2e-3, 1e-3, 4e-3), timed(6e-3, 5e-3, 7e-3))
    (changes,) = difference.changes.values()
    assert [(c.name, c.before, c.after) for c in changes] == [("time", "2 ms", "6 ms")]


@pytest.mark.parametrize("width", [70, 80, 120])
def test_it_fits_the_terminal(cpu, hopper, exact, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for other in (hopper, exact):
        lines = str(fusion_moe.diff(cpu, other)).splitlines()
        assert max(map(len, lines)) <= width
