"""Measured times of products, as a JSON file for each GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fusion_moe.arch import KNOWN, Arch
from fusion_moe.backends.cuda.heuristics import SizeClass
from fusion_moe.backends.cuda.variants import Matrices


@dataclass(frozen=True)
class Cell:
    """A product for one number of tokens under one kind of routing. us: microseconds of a call, by
    the kernels that compute it (`way`).
    """

    product: str
    matrices: Matrices
    tokens: int
    rows: int
    routing: str
    us: Mapping[str, float]

    @property
    def key(self) -> tuple[str, int, str]:
        """What was measured."""
        return self.product, self.tokens, self.routing

    @property
    def average(self) -> float:
        """Rows of a group."""
        return self.rows / self.matrices.groups

    @property
    def best(self) -> str:
        """The fastest way."""
        return min(self.us, key=self.us.__getitem__)


@dataclass(frozen=True)
class Timings:
    """arch: the GPU; about: where and with what, for people."""

    arch: Arch
    about: Mapping[str, str]
    cells: tuple[Cell, ...] = ()


def way(classes: Sequence[SizeClass]) -> str:
    """Names the kernels of a product: one, or several for groups of some sizes each."""
    return " + ".join(map(str, classes))


def save(timings: Timings, path: Path) -> None:
    """Writes a file: matrices of products, names of ways, and one cell a line, whose ways are
    numbers of these.
    """
    products = {cell.product: asdict(cell.matrices) for cell in timings.cells}
    ways = {
        name: str(i)
        for i, name in enumerate(dict.fromkeys(name for cell in timings.cells for name in cell.us))
    }
    head = {
        "arch": asdict(timings.arch),
        "about": dict(timings.about),
        "products": products,
        "ways": list(ways),
    }
    cells = (
        [
            c.product,
            c.tokens,
            c.rows,
            c.routing,
            {ways[name]: float(f"{us:.4g}") for name, us in c.us.items()},
        ]
        for c in timings.cells
    )
    lines = ",\n".join("  " + json.dumps(cell, separators=(",", ":")) for cell in cells)
    text = json.dumps(head, indent=1)[:-2] + f',\n "cells": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> Timings:
    """Reads one. What is known of a GPU now counts, not what was known when it was measured."""
    said = json.loads(path.read_text(encoding="utf-8"))
    read, ways = _arch(said["arch"]), said["ways"]
    arch = next((known for known in KNOWN.values() if known.name == read.name), read)
    products = {name: Matrices(**matrices) for name, matrices in said["products"].items()}
    cells = (
        Cell(
            product,
            products[product],
            tokens,
            rows,
            routing,
            {ways[int(i)]: us for i, us in times.items()},
        )
        for product, tokens, rows, routing, times in said["cells"]
    )
    return Timings(arch, said["about"], tuple(cells))


def _arch(said: Mapping[str, Any]) -> Arch:
    known = {f.name: said[f.name] for f in fields(Arch) if f.name in said}
    return Arch(**{**known, "capability": tuple(said["capability"])})


def load_all(paths: Sequence[Path]) -> Timings:
    """Several files of one GPU. ValueError if they are of several."""
    found = [load(path) for path in paths]
    if len({timings.arch for timings in found}) > 1:
        raise ValueError(
            f"timings of {', '.join(timings.arch.name for timings in found)}: expected one GPU"
        )
    return Timings(
        found[0].arch, found[0].about, tuple(cell for timings in found for cell in timings.cells)
    )
