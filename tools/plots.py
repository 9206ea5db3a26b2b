"""Draws the plots of docs/ that show numbers of a table beside them: horizontal bars. A test finds
plots that are not current.

    python tools/plots.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
Bar = tuple[str, float, float, str]  # label, from where to where it may end, what stands behind it
WIDTH, LABELS, NUMBERS, LINE = 840, 430, 90, 18
STYLE = """text { font: 11px system-ui, sans-serif; fill: #1c2129; } .sure { fill: #1f6feb; }
.most { fill: #1f6feb; opacity: .4; } path { stroke: #5b6573; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) { text { fill: #e4e8ee; } path { stroke: #9aa5b3; } }"""


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, with their heads: cells as text."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [
            [cell.strip(" *") for cell in line.strip("|").split("|")]
            for i, line in enumerate(table.splitlines())
            if i != 1
        ]
        for table in found
    ]


def faster(cell: str) -> list[float]:
    """The numbers before an x: how many times as fast."""
    return [float(number) for number in re.findall(r"([\d.]+)x", cell)]


def training() -> Iterator[Bar]:
    (_, *rows), of = tables("performance/training.md")[0], ""
    for layer, machine, *_, cell in rows:
        of = of if layer == "the same" else layer
        yield f"{of}; {machine}", min(faster(cell)), max(faster(cell)), cell


def serving() -> Iterator[Bar]:
    (_, *heads), *rows = tables("performance/serving.md")[0]
    for name, *cells in rows:
        for head, cell in zip(heads, cells, strict=True) if name != "experts alone" else ():
            (times,) = faster(cell)
            yield f"{name}: {head}", times, times, f"{times:.2f}x"


def scaling() -> Iterator[Bar]:
    head, *rows = tables("scaling.md")[0]
    for row in rows:
        for way, cell in zip(head[3:], row[3:], strict=True):
            (times,) = faster(cell)
            label = f"{row[0]}, {row[1]} tokens, {row[2]}, {way.strip('`')}"
            yield label, times, times, f"{times:.2f}x"


def offloading() -> Iterator[Bar]:
    head, *rows = tables("performance/offload.md")[0]
    for sizes, there, *cells in rows:
        for way, cell in zip(head[2:], cells, strict=True):
            yield f"{sizes}, {there} on the GPU: {way}", float(cell), float(cell), f"{cell} us"


PLOTS: dict[str, tuple[str, float, Callable[[], Iterator[Bar]]]] = {
    "performance/training.svg": ("times as fast as the other way", 1, training),
    "performance/serving.svg": ("a step or prompt, times as fast as vLLM's default", 1, serving),
    "performance/offload.svg": ("a layer's step of 4 tokens, shorter is better", 0, offloading),
    "scaling.svg": ("four GPUs, times as fast as one", 1, scaling),
}


def drawn(title: str, line: float, bars: Sequence[Bar]) -> str:
    """The plot, with a line at this number unless it is 0."""
    scale = (WIDTH - LABELS - NUMBERS) / max(most for _, _, most, _ in bars)
    height = LINE * (len(bars) + 2)
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<text x="{LABELS}" y="{LINE - 5}">{escape(title)}</text>',
    ]
    for i, (label, sure, most, text) in enumerate(bars, 1):
        y, ends = LINE * i, [scale * end for end in (sure, most)]
        made += [
            f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>',
            *(
                f'<rect class="{name}" x="{LABELS}" y="{y + 3}" width="{end:.1f}" height="12"/>'
                for name, end in zip(("most", "sure"), reversed(ends), strict=True)
            ),
            f'<text x="{LABELS + ends[1] + 6:.1f}" y="{y + 13}">{escape(text)}</text>',
        ]
    if line:
        made.append(f'<path d="M{LABELS + scale * line:.1f},{LINE} V{height - LINE + 2}"/>')
    return "\n".join([*made, "</svg>\n"])


def main() -> None:
    for name, (title, line, bars) in PLOTS.items():
        (DOCS / name).write_text(drawn(title, line, list(bars())), encoding="utf-8")


if __name__ == "__main__":
    main()
