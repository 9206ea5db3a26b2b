"""What the benchmarks found: pages of benchmarks/results/, tables, and plots of docs/."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def write(name: str, by: str, *parts: str) -> Path:
    """Makes a page of these parts; by: the script that measures them, from the root."""
    page = RESULTS / f"{name}.md"
    head = f"# {name}\n\nWritten by `{by}`."
    page.write_text("\n\n".join((head, *parts)) + "\n", encoding="utf-8")
    return page


def plots() -> Any:
    """matplotlib.pyplot for files that the same numbers make the same; None where it is not
    installed.
    """
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install matplotlib")
        return None
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fusion_moe", "svg.fonttype": "none"}
    from matplotlib import pyplot

    return pyplot
