"""Shared by the scripts that write into docs/: a section between two marks, and matplotlib where it
is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from small_svg import small

DOCS = Path(__file__).resolve().parents[1] / "docs"


def put(name: str, by: str, part: str, file: str) -> Path:
    """Puts a section between the marks that carry its name, or at the end; returns the page, a new
    one where there is none.

    by: the script that writes it; file: the page, within docs/.
    """
    page, begin, end = (
        DOCS / file,
        f"<!-- {name}: written by benchmarks/{by} -->",
        f"<!-- {name}: end -->",
    )
    whole, text = (
        f"{begin}\n{part}\n{end}",
        page.read_text(encoding="utf-8") if page.exists() else f"# {name}\n",
    )
    old = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
    page.write_text(
        text.replace(old[0], whole) if old else f"{text.rstrip()}\n\n{whole}\n", encoding="utf-8"
    )
    return page


def plots() -> Any:
    """matplotlib.pyplot for files that the same numbers make the same; None where it is not
    installed.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return None
    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "fusion_moe",
        "svg.fonttype": "none",
        "font.family": ["DejaVu Sans", "sans-serif"],
    }
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Writes a figure as a small SVG."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(small(path.read_text(encoding="utf-8")), encoding="utf-8")
