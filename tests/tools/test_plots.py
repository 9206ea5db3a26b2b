"""Plots of docs/ show the numbers of the tables beside them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "plots.py"))


@pytest.mark.once
@pytest.mark.parametrize("name", TOOL["PLOTS"])
def test_they_are_current(name):
    title, line, bars = TOOL["PLOTS"][name]
    made = TOOL["drawn"](title, line, list(bars()))
    assert (TOOL["DOCS"] / name).read_text(encoding="utf-8") == made, "python tools/plots.py"
    page = (TOOL["DOCS"] / name).with_suffix(".md").read_text(encoding="utf-8")
    assert f"({Path(name).name})" in page


@pytest.mark.once
def test_bars():
    svg = TOOL["drawn"]("<t>", 1.0, [("a & b", 1.0, 2.0, "1x to 2x"), ("c", 0.5, 0.5, "0.5x")])
    assert "<title>&lt;t&gt;</title>" in svg
    assert "a &amp; b</text>" in svg
    widths = [part.split('"')[0] for part in svg.split('width="')[2:]]
    assert widths == ["320.0", "160.0", "80.0", "80.0"]
