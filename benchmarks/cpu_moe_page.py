"""What benchmarks/cpu_moe.py found, as a part of docs/performance/cpu.md and a chart. Run by it; or
on what it kept:

    python benchmarks/cpu_moe_page.py FILE.json [FILE.json ...]

Of a cell in several files, of one machine, the last is taken. The part stands between two marks
that name the instructions used, so that each kind of CPU keeps its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from page import DOCS, plots, put, save

_READING, _OURS = "reading", "fusion_moe, nvfp4"
_Results = Mapping[tuple[str, int], dict[str, Any]]  # by model and threads


def write(files: Sequence[Mapping[str, Any]]) -> Path:
    """Puts tables and chart into docs/; returns the page. ValueError for files of several
    machines.
    """
    if len(machines := {(file["machine"]["cpu"], file["machine"]["cores"]) for file in files}) > 1:
        raise ValueError(f"files of {len(machines)} machines: {machines}; expected one")
    m, results = files[-1]["machine"], _merged(files)
    repeats = sorted(
        {
            len(times)
            for found in results.values()
            for row in found["rows"].values()
            for times in row["seconds"].values()
        }
    )
    of_peer = {
        file["machine"]["pages_of_peer"]
        for file in files
        if any("kt-kernel" in _peers(result) for result in file["results"])
    }
    peer = f"; kt-kernel's weights on {' and '.join(sorted(of_peer))} pages" if of_peer else ""
    plot = DOCS / "performance" / f"cpu_moe_{m['tier']}.svg"
    drawn = _draw(results, plot, f"{m['cpu']}, one token")
    lines = [
        f"### {m['cpu']}: {m['tier']}",
        "",
        f"{m['date']}, {m['cores']} CPUs, fusion_moe {m['fusion_moe']}, torch {m['torch']}; "
        "medians of"
        f" {' or '.join(map(str, repeats))}{peer}.",
        "",
        *_one_token(results),
        *([f"![One token by threads]({plot.name})", ""] if drawn else []),
    ]
    for (model, threads), found in results.items():
        lines += [*_table(model, threads, found), ""]
    return put(
        f"layers, {m['tier']}", "cpu_moe.py", "\n".join(lines).rstrip(), "performance/cpu.md"
    )


def _merged(files: Sequence[Mapping[str, Any]]) -> _Results:
    """One entry for a model and a number of threads, with all tokens and peers that were measured;
    JSON's keys as numbers again.
    """
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for result in (r for found in files for r in found["results"]):
        entry = merged.setdefault(
            (result["model"], result["threads"]), {**result, "rows": {}, "peers": {}, "missing": []}
        )
        entry["peers"] |= _peers(result)
        entry["missing"] += [name for name in result["missing"] if name not in entry["missing"]]
        for row in result["rows"]:
            seconds = entry["rows"].setdefault(row["name"], {**row, "seconds": {}})["seconds"]
            seconds |= {int(tokens): times for tokens, times in row["seconds"].items()}
    return dict(
        sorted(
            merged.items(),
            key=lambda item: (
                list(dict.fromkeys(m for m, _ in merged)).index(item[0][0]) * 1000 + item[0][1]
            ),
        )
    )


def _peers(result: Mapping[str, Any]) -> dict[str, str]:
    """Versions by package; files of before there were several have one."""
    if "peers" in result:
        return dict(result["peers"])
    return {"kt-kernel": result["kt_kernel"]} if result["kt_kernel"] else {}


def _ms(row: Mapping[str, Any], tokens: int) -> float:
    return float(median(row["seconds"][tokens])) * 1e3


def _one_token(results: _Results) -> list[str]:
    """Of each number of threads: reading the weights, ours, and how both grow with threads."""
    head = (
        "one token",
        "threads",
        "reading, ms",
        "ours, ms",
        "of reading",
        "reading, x 1 thread",
        "ours, x 1 thread",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (model, threads), found in results.items():
        if 1 not in found["rows"][_READING]["seconds"]:
            continue
        read, ours = (_ms(found["rows"][name], 1) for name in (_READING, _OURS))
        one = results.get((model, 1))
        grown = [
            f"{_ms(one['rows'][name], 1) / ms:.1f}" if one else ""
            for name, ms in ((_READING, read), (_OURS, ours))
        ]
        lines.append(
            f"| {model} | {threads} | {read:.3f} | {ours:.3f} | {read / ours:.0%} | "
            f"{' | '.join(grown)} |"
        )
    return [*lines, ""]


def _table(model: str, threads: int, found: Mapping[str, Any]) -> list[str]:
    rows, tokens = found["rows"], sorted(found["rows"][_READING]["seconds"])
    peer = "".join(f"; {name} {version}" for name, version in found["peers"].items())
    note = f" ({found['note']})" if found["note"] else ""
    lines = [f"{model}{note}, {threads} thread{'s' * (threads > 1)}; {found['others']}{peer}:", ""]
    head = ("ms, x ours, (spread)", "error", *(f"{n} token{'s' * (n > 1)}" for n in tokens))
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]

    def cell(row: Mapping[str, Any], n: int) -> str:
        if n not in row["seconds"]:
            return ""
        times, here, base = row["seconds"][n], _ms(row, n), _ms(rows[f"fusion_moe, {row['of']}"], n)
        ratio = "" if row["name"].startswith("fusion_moe") else f" {here / base:.2f}x"
        return f"{here:.3g}{ratio} ({(max(times) - min(times)) * 1e3 / here:.0%})"

    for row in rows.values():
        error = "" if row["error"] is None else f"{row['error']:.2g}"
        lines.append(f"| {row['name']} | {error} | {' | '.join(cell(row, n) for n in tokens)} |")
    return lines + [
        f"| {name} | not built for this CPU, or these sizes {'| ' * len(tokens)}|"
        for name in found["missing"]
        if name not in rows
    ]


def _draw(results: _Results, path: Path, title: str) -> bool:
    """Milliseconds of one token over threads; False without matplotlib, or with one number of
    threads.
    """
    pyplot = plots()
    cells = {
        key: found for key, found in results.items() if 1 in found["rows"][_READING]["seconds"]
    }
    models = [
        m for m in dict.fromkeys(m for m, _ in cells) if sum(key[0] == m for key in cells) > 1
    ]
    if pyplot is None or not models:
        return False
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(4.5 * len(models) + 2, 3.6), squeeze=False
    )
    styles, lines = (
        _styles(name for found in cells.values() for name in found["rows"]),
        dict[str, Any](),
    )
    for at, model in zip(axes[0], models, strict=True):
        own = {threads: found["rows"] for (m, threads), found in cells.items() if m == model}
        for name in styles:
            if points := [
                (threads, _ms(rows[name], 1)) for threads, rows in own.items() if name in rows
            ]:
                (lines[name],) = at.loglog(*zip(*points, strict=True), **styles[name])
        at.set(title=model, xlabel="threads", xticks=list(own))
        at.set_xticklabels([str(threads) for threads in own])
        at.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms")
    axes[0][-1].legend(lines.values(), lines, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save(figure, path)
    return True


def _styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A marker for each package, a colour for each of its kernels."""
    packages: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        packages.setdefault(name.split(",")[0], []).append(name)
    styles = {_READING: {"color": "grey", "linestyle": "--"}}
    for marker, own in zip(
        "os^Dv", (own for package, own in packages.items() if package != _READING), strict=False
    ):
        styles |= {name: {"marker": marker, "color": f"C{i}"} for i, name in enumerate(own)}
    return styles


if __name__ == "__main__":
    print(write([json.loads(Path(file).read_text(encoding="utf-8")) for file in sys.argv[1:]]))
