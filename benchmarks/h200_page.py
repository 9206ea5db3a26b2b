"""Writes what benchmarks/h200_moe.py measured into benchmarks/results/: a summary, the expert MLPs,
and every cell; of cells with FP8, a page of its own. An H200's make docs/h200.svg too. Needs no
GPU:

    python benchmarks/h200_page.py FILE.jsonl [FILE.jsonl ...]

If a cell is in several lines, the last one counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from h200_cells import (
    ALL_MODELS,
    FP8_PEERS,
    MODELS,
    PARTS,
    PEERS,
    ROUTINGS,
    TOKENS,
    is_right,
)
from results import DOCS, RESULTS, plots, table, write

OURS, DENSE = "fusion_moe", "dense"
POLICIES = {OURS: "packed", "fp8": "fp8", "both": "both"}  # contenders: weights= of prepare_
SLOWER = 1.03  # than the best peer: a cell that loses
_RATIOS = (1, 1.5, 2, 3, 5, 10, 20)  # marked in the plot
Row = Mapping[str, Any]


def us(row: Row, name: str) -> float | None:
    """Microseconds of a contender whose result was right."""
    found = row["contenders"].get(name, {})
    return found["us"] if "us" in found and is_right(name, row["part"], found) else None


def best(row: Row, names: Iterable[str] = PEERS) -> float | None:
    """Microseconds of the fastest of these in the same process."""
    return min((t for name in names if (t := us(row, name)) is not None), default=None)


def key(row: Row) -> tuple[Any, ...]:
    """Names a cell, and orders them."""
    return (
        PARTS.index(row["part"]),
        list(ALL_MODELS).index(row["model"]),
        row["routing"],
        row["tokens"],
    )


def in_order(rows: Iterable[Row]) -> tuple[list[Row], str, list[str]]:
    """The last row of each cell; the card; who measured with what."""
    rows = [row for _, row in sorted({key(row): row for row in rows}.items())]
    made = {json.dumps(row["provenance"]): row["provenance"] for row in rows}.values()
    lines = [", ".join(f"{k} {v}" for k, v in one.items() if v) for one in made]
    return rows, rows[0]["provenance"]["card"].removeprefix("NVIDIA ").split()[0], lines


def page(rows: Sequence[Row]) -> Path:
    """Writes the page of a card, and the plot."""
    rows, card, lines = in_order(rows)
    of_mlp = [row for row in rows if row["part"] == "mlp"]
    if card == "H200":
        draw([row for row in of_mlp if row["routing"] == "uniform"], DOCS / "h200.svg")
    return write(
        f"cells_{card.lower()}",
        "benchmarks/h200_page.py",
        *lines,
        summary(rows),
        overview(of_mlp),
        cells(rows),
    )


def fp8_page(rows: Sequence[Row]) -> Path:
    """Writes the page of a card's cells with FP8, and what FP8 costs in perplexity."""
    rows, card, lines = in_order(rows)
    tokens = sorted({row["tokens"] for row in rows})

    def against(name: str) -> str:
        found = {(_titled(r), r["tokens"]): _of(us(r, name), us(r, OURS)) for r in rows}
        titles = dict.fromkeys(title for title, _ in found)
        cells = [[t, *(found.get((t, n), "") for n in tokens)] for t in titles]
        said = f'`weights="{POLICIES[name]}"`: us, and of the time of "packed".'
        return f"{said}\n\n{table(['model', *map(str, tokens)], cells)}"

    lost = [
        f"{_titled(row)} {row['tokens']}"
        for row in rows
        if (peer := best(row, FP8_PEERS)) and (ours := best(row, POLICIES)) and ours > peer
    ]
    compared = sum(best(row, FP8_PEERS) is not None for row in rows)
    names = {**POLICIES, "w8a16": "fp8, rows of 16 bits", **{n: n for n in FP8_PEERS}}
    names["dense fp8"] = "dense, torch._scaled_mm"
    every = table(
        ["model", "tokens", *(f"{title}, us" for title in names.values())],
        [[_titled(row), row["tokens"], *(_us(us(row, name)) for name in names)] for row in rows],
    )
    quality = (RESULTS / "quality_fp8.md").read_text(encoding="utf-8").split("\n\n", 2)[2]
    return write(
        f"fp8_{card.lower()}",
        "benchmarks/h200_page.py",
        *lines,
        against("fp8"),
        against("both"),
        f"{compared} cells with peers; one is faster than all of ours in: "
        f"{'; '.join(lost) or 'none'}.",
        every,
        f"Perplexity, by `benchmarks/quality.py --fp8`:\n\n{quality.strip()}",
    )


def summary(rows: Sequence[Row]) -> str:
    """How many times as fast as the peers of the same process, and where it is slower."""
    ratios = {key(row): b / a for row in rows if (a := us(row, OURS)) and (b := best(row))}
    if not ratios:
        return "Nothing to compare with was measured."
    lost = [
        f"{_title(row)} {row['part']} {row['tokens']}"
        for row in rows
        if ratios.get(key(row), SLOWER) < 1 / SLOWER
    ]
    return (
        f"{len(ratios)} cells: {OURS} is {statistics.geometric_mean(ratios.values()):.2f}x as fast "
        "as the best peer in the same process (geometric mean); slower by more than "
        f"{SLOWER - 1:.0%}: {'; '.join(lost) or 'none'}."
    )


def overview(rows: Sequence[Row]) -> str:
    """A line for each model and routing, a column for each of the usual numbers of tokens."""
    tokens = [t for t in TOKENS if any(row["tokens"] == t for row in rows)]
    found = {(_title(row), row["tokens"]): _against(us(row, OURS), best(row)) for row in rows}
    titles = dict.fromkeys(title for title, _ in found)
    lines = [[title, *(found.get((title, t), "") for t in tokens)] for title in titles]
    return "The expert MLP: us, and how many times as fast as the best peer.\n\n" + table(
        ["model", *map(str, tokens)], lines
    )


def cells(rows: Iterable[Row]) -> str:
    """All of them, with every contender."""
    names = (OURS, *PEERS, DENSE)
    head = ["model", "part", "tokens", "floor, us", *(f"{name}, us" for name in names)]
    return table(
        head,
        [
            [_title(row), row["part"], row["tokens"], f"{row['floor_us']:.1f}"]
            + [_us(us(row, name)) for name in names]
            for row in rows
        ],
    )


def _title(row: Row) -> str:
    title = ALL_MODELS[row["model"]].title
    return title if row["routing"] == ROUTINGS[0] else f"{title} ({row['routing']})"


def _titled(row: Row) -> str:
    return _title(row) + ("" if row["part"] == "mlp" else f", {row['part']}")


def _us(t: float | None) -> str:
    return "" if t is None else f"{t:.1f}" if t < 1000 else f"{t:.0f}"


def _of(t: float | None, base: float | None) -> str:
    return f"{_us(t)}, {t / base:.2f}" if t and base else _us(t)


def _against(ours: float | None, peer: float | None) -> str:
    return f"{_us(ours)}, {peer / ours:.2f}x" if ours and peer else _us(ours)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time over the floor, a line for each contender; nothing without matplotlib."""
    pyplot = plots()
    models = [name for name in MODELS if any(row["model"] == name for row in rows)]
    if pyplot is None or not models:
        return
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(3 * len(models), 3.2), sharey=True, squeeze=False
    )
    for name, at in zip(models, axes[0], strict=True):
        of_model = [row for row in rows if row["model"] == name]
        for contender in (OURS, *PEERS):
            found = [
                (row["tokens"], t / row["floor_us"])
                for row in of_model
                if (t := us(row, contender)) is not None
            ]
            at.loglog(*zip(*found, strict=True), marker="o", markersize=3, label=contender)
        at.axhline(1, color="black", linewidth=0.8)
        at.set(title=MODELS[name].title, xlabel="tokens")
        at.set_xticks(TOKENS, map(str, TOKENS), fontsize=7)
        at.set_yticks(_RATIOS, map(str, _RATIOS))
        at.minorticks_off()
        at.grid(alpha=0.3)
    axes[0][0].set_ylabel("time over floor")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(PEERS) + 1)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    of_fp8 = [row for row in found if "fp8" in row["contenders"]]
    for write_page, rows in (fp8_page, of_fp8), (page, [row for row in found if row not in of_fp8]):
        if rows:
            print(write_page(rows))
