"""fusion_moe.diff: what an option, a size or a target changes, as text and as a page."""

from __future__ import annotations

from dataclasses import replace

import pages
import pytest
from test_html import Read

import fusion_moe
from fusion_moe import options
from fusion_moe.errors import OptionError
from fusion_moe.report import Measured
from fusion_moe.report.html import diff_page


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
    found = fusion_moe.diff(cpu, cpu)
    assert not found
    assert found.unchanged == 2
    assert str(found) == "fusion_moe.diff: nothing differs"
    assert "Nothing differs" in diff_page(found)


def test_an_option(cpu, exact, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = fusion_moe.diff(cpu, exact)
    golden(str(found))
    assert [c.name for c in found.asked] == ["contract_rounding"]
    (changed,) = found.segments
    assert (changed.before, changed.after, found.unchanged) == ("fusion0.0", "fusion0.0", 1)
    assert repr(found) == "<Difference of fusion_moe.diff: 1 segment changed, 1 not>"


def test_a_target(cpu, hopper, golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = fusion_moe.diff(cpu, hopper)
    golden(str(found))
    assert {(s.before, s.after) for s in found.segments} == {
        ("fusion0.0", ""),
        ("fusion0.1", ""),
        ("", "fusion0.0"),
    }


def test_reasons_that_come_and_go(cpu):
    (call,) = cpu.not_fused
    other = replace(
        cpu, not_fused=(replace(call, why="another reason"), replace(call, op="aten.mm.default"))
    )
    lines = str(fusion_moe.diff(cpu, other)).splitlines()
    assert lines[-3:] == [
        "- aten.topk.default: it has no translator (1 time)",
        "+ aten.topk.default: another reason (1 time)",
        "+ aten.mm.default: it has no translator (1 time)",
    ]


def test_times_differ_where_their_spreads_do_not_overlap(cpu):
    def timed(*seconds):
        (fusion,) = cpu.fusions
        first, second = fusion.segments
        return replace(
            cpu,
            fusions=(
                replace(
                    fusion,
                    segments=(replace(first, measured=Measured(*seconds, 100, 1e-6)), second),
                ),
            ),
        )

    assert not fusion_moe.diff(timed(2e-3, 1e-3, 4e-3), timed(3e-3, 2e-3, 5e-3))
    (changed,) = fusion_moe.diff(timed(2e-3, 1e-3, 4e-3), timed(6e-3, 5e-3, 7e-3)).segments
    assert [(c.name, c.before, c.after) for c in changed.changes] == [("time", "2 ms", "6 ms")]


@pytest.mark.parametrize("width", [70, 80, 120])
def test_it_fits_the_terminal(cpu, hopper, exact, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for other in (hopper, exact):
        lines = str(fusion_moe.diff(cpu, other)).splitlines()
        assert max(map(len, lines)) <= width


def test_the_page(cpu, hopper, exact):
    for other in (hopper, exact, pages.harmful(cpu)):
        page = diff_page(fusion_moe.diff(cpu, other))
        read = Read(page)
        assert (read.open, read.unbalanced) == ([], [])
        assert not read.all("img")
        assert len(read.all("script")) == 1


def test_saved(cpu, exact, tmp_path):
    found = fusion_moe.diff(cpu, exact)
    found.save(tmp_path / "d.txt")
    found.save(tmp_path / "d.html")
    assert "contract_rounding" in (tmp_path / "d.txt").read_text()
    assert (tmp_path / "d.html").read_text(encoding="utf-8") == diff_page(found)
    assert "contract_rounding" in found._repr_html_()
    with pytest.raises(OptionError, match=r"a difference as \.pdf; expected \.html or \.txt"):
        found.save(tmp_path / "d.pdf")
