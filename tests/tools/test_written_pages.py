"""Sections of docs/ that scripts of benchmarks/ write: where they stand, and where the scripts put
them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import cpu_moe_page
import cpu_products_page
import h200_page
import page

REAL = page.DOCS
BENCHMARKS = Path(page.__file__).parent
BEGIN = re.compile(
    r"^<!-- (?P<name>[^:\n]+): written by benchmarks/(?P<by>\w+\.py) -->$", re.MULTILINE
)
WRITERS = (h200_page, cpu_products_page, cpu_moe_page)


@pytest.fixture
def docs(monkeypatch, tmp_path):
    """docs/ with nothing in it but the pages of performance; instead of plots there are empty
    pictures.
    """
    (tmp_path / "performance").mkdir()
    for file in (REAL / "performance").glob("*.md"):
        (tmp_path / "performance" / file.name).write_text(
            file.read_text(encoding="utf-8"), encoding="utf-8"
        )
    for module in (page, *WRITERS):
        monkeypatch.setattr(module, "DOCS", tmp_path)
    for module in WRITERS:
        monkeypatch.setattr(
            module, "_draw", lambda what, path, *title: path.write_text("<svg/>") > 0
        )
    return tmp_path


def changed(docs: Path) -> set[str]:
    """The pages that are not as they were."""
    pages = (docs / "performance").glob("*.md")
    return {
        p.name
        for p in pages
        if not (old := REAL / "performance" / p.name).exists() or p.read_bytes() != old.read_bytes()
    }


def section(text: str, name: str) -> str:
    """What is between the two marks of a name."""
    (begin,) = (found for found in BEGIN.finditer(text) if found["name"] == name)
    end = f"<!-- {name}: end -->"
    assert text.count(end) == 1
    return text[begin.end() : text.index(end)]


def shows(file: Path, plot: Path) -> bool:
    """Whether a page has a picture, and there is one."""
    return plot.exists() and plot.resolve() in {
        (file.parent / link).resolve()
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", file.read_text())
    }


def cell(card: str, us: float = 5.0) -> dict[str, Any]:
    ours = {"us": us, "error": 1e-3, "spread": 0.01}
    made = {"date": "D", "card": f"NVIDIA {card} of some kind"}
    return {
        "model": "qwen3",
        "part": "mlp",
        "tokens": 1,
        "routing": "uniform",
        "touched": 8.0,
        "floor_us": 4.0,
        "provenance": made,
        "contenders": {"fusion_moe": ours, "torch": {"us": 10.0, "error": 1e-3, "spread": 0.01}},
        "MHz": [1, 2],
        "W": [3, 4],
    }


def test_every_section_names_its_script_and_ends():
    for file in REAL.rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        for found in BEGIN.finditer(text):
            assert (BENCHMARKS / found["by"]).exists(), file
            assert section(text, found["name"]).strip(), file


def test_cells_of_an_h200_go_into_its_pages(docs):
    file = h200_page.write([cell("H200")])
    assert file == docs / "performance" / "h200.md"
    assert changed(docs) == {"h200.md", "h200_cells.md"}
    assert "| Qwen3-30B-A3B | 5.0, 1.25x, 0.50x |" in section(file.read_text(), "H200")
    assert "| Qwen3-30B-A3B | 1 | 8 | 4.0 | 5.0 |" in section(
        (file.parent / "h200_cells.md").read_text(), "cells"
    )
    assert shows(file, docs / "h200.svg")


def test_means_of_ranges_have_cells_that_the_overview_leaves_out(docs):
    cells = [
        cell("H200"),
        {**cell("H200", us=20.0), "tokens": 3},
        {**cell("H200"), "tokens": 2048, "routing": "zipf"},
    ]
    text = section(h200_page.write(cells).read_text(), "H200")
    assert "| model | 1 | 2048 |" in text
    assert "Geometric means of the 1 models, with 1, 3, 2,048 tokens:" in text
    assert "| 1 to 24 | 2.50x |  | 1.00x |  |" in text
    assert "| 2,048 to 8,192 |  | 1.25x |  | 0.50x |" in text
    assert "| 3 |" in (docs / "performance" / "h200_cells.md").read_text()


def test_each_other_card_has_its_page(docs):
    file = h200_page.write([cell("H100")])
    assert changed(docs) == {file.name} == {"h100.md"}
    assert "| Qwen3-30B-A3B | 5.0, 0.50x |" in section(file.read_text(), "H100")
    new = h200_page.write([cell("B200")])
    assert new.name == "b200.md"
    assert new.read_text().startswith(
        "# B200\n\n<!-- B200: written by benchmarks/h200_page.py -->\n"
    )
    h200_page.write([cell("B200", us=7.0)])
    assert "| Qwen3-30B-A3B | 7.0, 0.70x |" in section(new.read_text(), "B200")


def test_products_on_a_cpu_go_into_their_page(docs):
    machine = {
        "cpu": "C",
        "tier": "amx",
        "date": "D",
        "cores": 2,
        "fusion_moe": "0",
        "torch": "0",
        "compiler": "g",
        "repeats": 3,
        "pages": "P",
    }
    row = {
        "n": 64,
        "k": 32,
        "rows": 1,
        "threads": 1,
        "ours GB/s": 2.0,
        "GFLOP/s": 3.0,
        "x bf16": 4.0,
        "of read": 0.5,
        "spread": 0.1,
    }
    file = cpu_products_page.write({"machine": machine, "products": [row]})
    assert changed(docs) == {file.name} == {"cpu_products.md"}
    assert "| 64 x 32, 1 | 2.00 | 3 | 4.00 | 50% | 10% |" in section(file.read_text(), "amx")
    assert shows(file, docs / "performance" / "cpu_amx.svg")


def test_layers_on_a_cpu_go_into_their_page(docs):
    machine = {
        "cpu": "C",
        "cores": 2,
        "tier": "amx",
        "date": "D",
        "fusion_moe": "0",
        "torch": "0",
        "pages_of_peer": "large",
    }
    rows = [
        {"name": name, "of": "nvfp4", "error": 0.01, "seconds": {"1": [1e-3] * 3}}
        for name in ("reading", "fusion_moe, nvfp4")
    ]
    result = {
        "model": "small",
        "note": "",
        "threads": 1,
        "others": "none",
        "missing": [],
        "peers": {},
        "rows": rows,
    }
    file = cpu_moe_page.write([{"machine": machine, "results": [result]}])
    assert changed(docs) == {file.name} == {"cpu.md"}
    assert section(file.read_text(), "layers, amx").startswith("\n### C: amx\n")
    assert shows(file, docs / "performance" / "cpu_moe_amx.svg")
