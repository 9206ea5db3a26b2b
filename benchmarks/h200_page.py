"""Writes what benchmarks/h200_moe.py measured: a summary and a plot into docs/performance/h200.md,
every cell into h200_cells.md there. Needs no GPU:

    python benchmarks/h200_page.py FILE.jsonl [FILE.jsonl ...]

If a cell is in several lines, the last one counts. Each section is between two marks. Next to the
peers of the same process the tables show the best of h200_recorded.json: peers that were measured
separately. What was measured on another card becomes a section of that card's page, as
docs/performance/h100.md, and is compared with the peers of the same process alone: floors and
records are an H200's.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from h200_cells import MODELS, PARTS, PEERS, ROUTINGS, TOKENS, Cell, is_right
from page import DOCS, plots, put, save

HERE = Path(__file__).resolve().parent
OURS, DENSE = "fusion_moe", "dense"
TITLES = {
    "gemm1": "Gate and up, one product",
    "gemm2": "Down",
    "mlp": "The expert MLP, from expert ids to its result",
}
_COPY = 4.2e12  # bytes a second, read and written
_MANY = 2048  # tokens from which on the products' arithmetic is what takes time
_RANGES = ((1, 24), (32, 200), (300, 1100), (2048, 8192))  # tokens, for which there are means
_RATIOS = (1, 1.5, 2, 3, 5, 10, 20)  # marked in the plot
SLOWER = 1.03  # than the best peer: a cell that loses
Row = Mapping[str, Any]


def us(row: Row, name: str) -> float | None:
    """Microseconds of a contender whose result was right."""
    found = row["contenders"].get(name, {})
    return found["us"] if "us" in found and is_right(name, row["part"], found) else None


def best_peer(row: Row) -> tuple[float, str] | None:
    """The fastest in the same process."""
    return min(((t, name) for name in PEERS if (t := us(row, name)) is not None), default=None)


def dense_us(row: Row) -> float | None:
    """The dense products and, in the MLP, what a sum over a token's experts moves."""
    cell = Cell(row["model"], row["part"], row["tokens"], row["routing"])
    combine = (
        (cell.rows + cell.tokens) * cell.model.hidden * 2 / _COPY if row["part"] == "mlp" else 0.0
    )
    t = us(row, DENSE)
    return t and t + combine * 1e6


def recorded() -> dict[tuple[Any, ...], tuple[float, str]]:
    """The fastest of those measured apart, for each cell."""
    cells = json.loads((HERE / "h200_recorded.json").read_text(encoding="utf-8"))["cells"]
    return {key(c): min((t, name) for name, t in c["us"].items()) for c in cells}


def key(row: Row) -> tuple[Any, ...]:
    """Names a cell, and orders them."""
    return PARTS.index(row["part"]), list(MODELS).index(row["model"]), row["routing"], row["tokens"]


def write(rows: Sequence[Row]) -> Path:
    """Puts tables and plot into docs/; returns the page with the summary."""
    rows = [row for _, row in sorted({key(row): row for row in rows}.items())]
    card = rows[0]["provenance"]["card"].removeprefix("NVIDIA ").split()[0]
    of_mlp = [row for row in rows if row["part"] == "mlp"]
    if card != "H200":
        part = [*_provenance(rows)[:1], "", *_summary(rows, {}), *_overview(of_mlp, floor=False)]
        return put(card, "h200_page.py", "\n".join(part), f"performance/{card.lower()}.md")
    plot = DOCS / "h200.svg"  # the README and docs/performance.md show it too
    lines = [*_provenance(rows), *_summary(rows, recorded()), *_overview(of_mlp), *_ranges(of_mlp)]
    if _draw(rows, plot):
        lines += [f"![Time over the floor against tokens](../{plot.name})", ""]
    cells = [
        line
        for part in dict.fromkeys(row["part"] for row in rows)
        for line in _table(part, [r for r in rows if r["part"] == part])
    ]
    put("cells", "h200_page.py", "\n".join([*cells, *_missing(rows)]), "performance/h200_cells.md")
    return put("H200", "h200_page.py", "\n".join(lines), "performance/h200.md")


# Text ---------------------------------------------------------------------------------------------


def _provenance(rows: Sequence[Row]) -> list[str]:
    """Each place and set of versions, and what all have in common."""
    lines = []
    for made in {json.dumps(row["provenance"]): row["provenance"] for row in rows}.values():
        lines.append(
            f"{made['date']}: "
            + ", ".join(f"{k} {v}" for k, v in made.items() if k != "date" and v)
            + "."
        )
    clock, power = (
        [f(row[of][i] for row in rows) for f, i in ((min, 0), (max, 1))] for of in ("MHz", "W")
    )
    return [
        *lines,
        "",
        "CUDA graphs over several layers and routings, contenders interleaved, medians; "
        f"{clock[0]:.0f} to {clock[1]:.0f} MHz,"
        f" {power[0]:.0f} to {power[1]:.0f} W during the runs. Every result was checked against "
        "float32 first. The floor is the longer of"
        " reading the NVFP4 weights of the experts that get a token at 4.55 TB/s, and multiplying "
        "at 780 TFLOP/s. Single products start"
        " from sorted rows, except in Humming's indexed mode, which gathers them. In the MLP "
        "Humming uses this library's operations to sort"
        ' ids and to sum over experts. "Recorded" is the fastest of Marlin (NVFP4), '
        "triton_kernels (MXFP4) and, for the MLP, Humming in"
        " vLLM, measured separately on an H200 (benchmarks/h200_recorded.json says how). "
        '"Dense" is torch\'s dense bf16 product of as'
        " many rows; for the MLP plus the bytes that summing over experts moves, at 4.2 TB/s.",
        "",
    ]


def _summary(rows: Sequence[Row], apart: Mapping[tuple[Any, ...], tuple[float, str]]) -> list[str]:
    """How many cells are won and lost: against peers of the same process and, without one, against
    what was recorded apart.
    """
    ours = [row for row in rows if us(row, OURS) is not None]
    if not ours:
        return [f"{OURS} was not measured in any of these cells.", ""]
    beside = {key(row): peer for row in ours if (peer := best_peer(row))}
    alone = {
        key(row): apart[key(row)] for row in ours if key(row) not in beside and key(row) in apart
    }
    errors = {
        p: max((r["contenders"][OURS]["error"] for r in ours if r["part"] == p), default=None)
        for p in PARTS
    }
    largest = ", ".join(f"{p} {e:.1e}" for p, e in errors.items() if e is not None)
    return [
        *_won_and_lost(ours, beside, "the time of the best peer in the same process"),
        *_won_and_lost(ours, alone, "the recorded time, where no peer ran in the same process"),
        f"Largest relative error: {largest}.",
        "",
    ]


def _won_and_lost(
    rows: Sequence[Row], others: Mapping[tuple[Any, ...], tuple[float, str]], what: str
) -> list[str]:
    compared = [
        (row, (us(row, OURS) or 0.0) / others[key(row)][0]) for row in rows if key(row) in others
    ]
    if not compared:
        return []
    lost = [
        f"{MODELS[r['model']].title} {r['part']} {r['tokens']} {r['routing']} ({x:.2f}x)"
        for r, x in compared
        if x > SLOWER
    ]
    mean = statistics.geometric_mean(x for _, x in compared)
    return [
        f"{len(compared)} cells: {OURS} takes {mean:.2f}x of {what} (geometric mean); slower by "
        f"more than {SLOWER - 1:.0%}:"
        f" {'; '.join(lost) or 'none'}."
    ]


def _overview(rows: Sequence[Row], floor: bool = True) -> list[str]:
    """One line for each model and routing, one column for each of the usual numbers of tokens;
    others are on the page of every cell.
    """
    tokens, lines = (
        sorted({row["tokens"] for row in rows if row["tokens"] in TOKENS}),
        dict[str, dict[int, str]](),
    )
    for row in rows:
        ours = us(row, OURS)
        shown = (
            _shown(row, OURS),
            _ratio(ours, row["floor_us"]) if floor else "",
            _against(ours, best_peer(row)),
        )
        lines.setdefault(_title(row), {})[row["tokens"]] = ", ".join(text for text in shown if text)
    if not rows:
        return []
    return [
        "The expert MLP, from expert ids to its result; columns are tokens. Each cell: us"
        f"{', times the floor' if floor else ''}, times the best peer's time.",
        "",
        f"| model | {' | '.join(map(str, tokens))} |",
        f"|{'---|' * (len(tokens) + 1)}",
        *(
            f"| {title} | {' | '.join(found.get(t, '') for t in tokens)} |"
            for title, found in lines.items()
        ),
        "",
    ]


def _ranges(rows: Sequence[Row]) -> list[str]:
    """Geometric means over models, of all numbers of tokens within a range."""

    def mean(part: Sequence[Row], of: Callable[[Row], float | None]) -> str:
        found = [ours / other for row in part if (ours := us(row, OURS)) and (other := of(row))]
        return f"{statistics.geometric_mean(found):.2f}x" if found else ""

    lines = []
    for low, high in _RANGES:
        within = [row for row in rows if low <= row["tokens"] <= high]
        by_routing = [[row for row in within if row["routing"] == routing] for routing in ROUTINGS]
        floors, peers = ([mean(part, of) for part in by_routing] for of in (_floor, _peer))
        if within:
            lines.append(f"| {low:,} to {high:,} | {' | '.join((*floors, *peers))} |")
    if not lines:
        return []
    counts = ", ".join(f"{t:,}" for t in sorted({row["tokens"] for row in rows}))
    heads = [
        f"{what}, {routing}"
        for what in ("of the floor", "of the best peer")
        for routing in ROUTINGS
    ]
    return [
        f"Geometric means of the {len({row['model'] for row in rows})} models, with "
        f"{counts} tokens:",
        "",
        f"| tokens | {' | '.join(heads)} |",
        f"|{'---|' * (len(heads) + 1)}",
        *lines,
        "",
    ]


def _floor(row: Row) -> float:
    return float(row["floor_us"])


def _peer(row: Row) -> float | None:
    peer = best_peer(row)
    return peer[0] if peer else None


_HEAD = (
    "model",
    "tokens",
    "experts",
    "floor, us",
    "ours, us",
    "of floor",
    "spread",
    "best peer, us",
    "ours / best peer",
    "recorded, us",
    "ours / recorded",
    *(f"{p}, us" for p in PEERS),
    "dense, us",
    "ours / dense",
)


def _table(part: str, rows: Sequence[Row]) -> list[str]:
    apart = recorded()
    lines = [f"### {TITLES[part]}", "", f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    for row in rows:
        ours, peer, other = us(row, OURS), best_peer(row), apart.get(key(row))
        cells = [
            _title(row),
            str(row["tokens"]),
            f"{row['touched']:.0f}",
            _us(row["floor_us"]),
            _shown(row, OURS),
            _ratio(ours, row["floor_us"]),
            f"{row['contenders'][OURS]['spread']:.0%}" if ours else "",
            f"{_us(peer[0])} {peer[1]}" if peer else "",
            _against(ours, peer),
            f"{_us(other[0])} {other[1]}" if other else "",
            _against(ours, other),
            *(_shown(row, name) for name in PEERS),
            _us(dense) if (dense := dense_us(row)) else "",
            _ratio(ours, dense) if row["tokens"] >= _MANY else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _title(row: Row) -> str:
    """Of its model, with the routing unless it is uniform."""
    return MODELS[row["model"]].title + (
        "" if row["routing"] == "uniform" else f" ({row['routing']})"
    )


def _us(t: float) -> str:
    return f"{t:.1f}" if t < 1000 else f"{t:.0f}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}x" if a and b else ""


def _against(ours: float | None, other: tuple[float, str] | None) -> str:
    """A cell that loses stands out."""
    text = _ratio(ours, other and other[0])
    return f"**{text} slower**" if ours and other and ours > SLOWER * other[0] else text


def _shown(row: Row, name: str) -> str:
    """Its time; what went wrong if it has none."""
    found = row["contenders"].get(name)
    if found is None:
        return ""
    if (t := us(row, name)) is not None:
        return _us(t)
    return "missing" if "missing" in found else "wrong"


def _missing(rows: Sequence[Row]) -> list[str]:
    """Why a contender has no time, each reason once."""
    why = {
        f"{name}: {found['missing']}"
        for row in rows
        for name, found in row["contenders"].items()
        if "missing" in found
    }
    return ["Missing:", "", *(f"- {text}" for text in sorted(why)), ""] if why else []


# Plot ---------------------------------------------------------------------------------------------


def _draw(rows: Sequence[Row], path: Path) -> bool:
    """Time over the floor, one line for each contender; False without matplotlib."""
    pyplot = plots()
    if pyplot is None:
        return False
    rows = [row for row in rows if row["routing"] == "uniform"]
    apart = recorded()
    parts, models = (
        [x for x in order if any(row[what] == x for row in rows)]
        for what, order in (("part", PARTS), ("model", MODELS))
    )
    if not rows:
        return False
    figure, axes = pyplot.subplots(
        len(parts),
        len(models),
        figsize=(3 * len(models), 2.6 * len(parts) + 0.6),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for part, line in zip(parts, axes, strict=True):
        for model, at in zip(models, line, strict=True):
            cells = [row for row in rows if (row["part"], row["model"]) == (part, model)]
            for name in (OURS, *PEERS):
                found = [
                    (row["tokens"], t / row["floor_us"])
                    for row in cells
                    if (t := us(row, name)) is not None
                ]
                at.plot(
                    *zip(*found, strict=True) if found else ([], []),
                    marker="o",
                    markersize=3,
                    label=name,
                )
            found = [
                (row["tokens"], apart[key(row)][0] / row["floor_us"])
                for row in cells
                if key(row) in apart
            ]
            at.plot(
                *zip(*found, strict=True) if found else ([], []),
                linestyle=":",
                color="grey",
                label="recorded",
            )
            at.axhline(1, color="black", linewidth=0.8)
            at.set(xscale="log", yscale="log", title=f"{MODELS[model].title}, {part}")
            at.set_xticks(TOKENS, map(str, TOKENS), fontsize=7)
            at.set_yticks(_RATIOS, map(str, _RATIOS))
            at.minorticks_off()
            at.tick_params(length=0)
            at.grid(alpha=0.3)
    for at in axes[-1]:
        at.set_xlabel("tokens")
    axes[0][0].set_ylabel("time over floor")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="lower center",
        ncols=len(PEERS) + 2,
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    save(figure, path)
    pyplot.close(figure)
    return True


if __name__ == "__main__":
    print(
        write(
            [
                json.loads(line)
                for name in sys.argv[1:]
                for line in Path(name).read_text(encoding="utf-8").splitlines()
            ]
        )
    )
