"""What benchmarks/cpu_products.py found, as a part of docs/performance/cpu_products.md and a plot.
Run by it; or on what it kept:

    python benchmarks/cpu_products_page.py FILE.json

The part stands between two marks that name the instructions used, so that each kind of CPU keeps
its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page import DOCS, plots, put, save

_PEERS = {
    "bf16": "torch bf16",
    "int4pack": "torch int4pack",
    "onnxruntime": "onnxruntime, int8",
    "ggml": "ggml NVFP4, int8",
}


def write(found: Mapping[str, Any]) -> Path:
    """Puts tables and plot into docs/; returns the page."""
    tier = found["machine"]["tier"]
    plot = DOCS / "performance" / f"cpu_{tier}.svg"
    drawn = found["products"] and _draw(
        found["products"], plot, f"{found['machine']['cpu']}, {tier}, one thread"
    )
    part = "\n".join([*_machine(found), *_products(found["products"], plot.name if drawn else "")])
    return put(tier, "cpu_products.py", part, "performance/cpu_products.md")


def _machine(found: Mapping[str, Any]) -> list[str]:
    m = found["machine"]
    return [
        f"### {m['cpu']}: {m['tier']}",
        "",
        f"{m['date']}, {m['cores']} cores, fusion_moe {m['fusion_moe']}, torch {m['torch']}, "
        f"{m['compiler']}; medians of {m['repeats']};"
        f" {m['pages']}.",
        "",
    ]


def _products(rows: Sequence[Mapping[str, float]], plot: str) -> list[str]:
    if not rows:
        return []
    lines, peers = [], [name for name in _PEERS if f"x {name}" in rows[0]]
    columns = (
        "n x k, rows",
        "GB/s",
        "GFLOP/s",
        *(f"x {_PEERS[name]}" for name in peers),
        "of read",
        "spread",
    )
    for threads in dict.fromkeys(r["threads"] for r in rows):
        lines += [
            f"Products, {threads:.0f} thread{'s' * (threads > 1)}:",
            "",
            f"| {' | '.join(columns)} |",
            f"|{'---|' * len(columns)}",
        ]
        for r in rows:
            if r["threads"] == threads:
                shape = f"{r['n']:.0f} x {r['k']:.0f}, {r['rows']:.0f}"
                ratios = " | ".join(
                    [*(f"{r[f'x {name}']:.2f}" for name in peers), f"{r['of read']:.0%}"]
                )
                lines.append(
                    f"| {shape} | {r['ours GB/s']:.2f} | {r['GFLOP/s']:.0f} | {ratios} | "
                    f"{r['spread']:.0%} |"
                )
        lines.append("")
    return lines + (
        [f"![GB/s of NVFP4 bytes over the rows of each expert]({plot})", ""] if plot else []
    )


def _draw(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> bool:
    """Bytes a second over rows of each expert, with reading as the limit; False without
    matplotlib.
    """
    pyplot = plots()
    if pyplot is None:
        return False
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(9, 3.6), sharey=True, squeeze=False)
    for at, (n, k) in zip(axes[0], shapes, strict=True):
        cell = [r for r in rows if (r["n"], r["k"]) == (n, k) and r["threads"] == 1]
        for name, label in {"ours": "fusion_moe", **_PEERS}.items():
            if f"{name} GB/s" not in cell[0]:
                continue
            at.loglog(
                [r["rows"] for r in cell],
                [r[f"{name} GB/s"] for r in cell],
                marker="o",
                label=label,
            )
        at.axhline(max(r["read GB/s"] for r in cell), color="grey", linestyle="--", label="read")
        at.set(
            title=f"{n:.0f} x {k:.0f}",
            xlabel="rows of each expert",
            xticks=[r["rows"] for r in cell],
        )
        at.set_xticklabels([f"{r['rows']:.0f}" for r in cell])
        at.grid(alpha=0.3)
    axes[0][0].set_ylabel("GB/s of NVFP4 weights")
    axes[0][0].legend()
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save(figure, path)
    return True


if __name__ == "__main__":
    print(write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
