"""Which kernels are candidates for how many rows of a group, and from how many on products are
computed in another way: a table for each GPU that was tuned, tables/<name>.json.

tools/tune writes the tables from measured times. Sets of kernels have names (variants.SETS); the
costs in variants.py choose one of a set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...arch import H200, Arch, nearest
from .variants import SETS, Matrices, Variant

TABLES = Path(__file__).parent / "tables"
ALWAYS = float("inf")
KINDS = ("tiled", "linear", "wide_tiled", "wide_linear")  # kinds of weights: fields of a table
REGIMES = (*KINDS, "row_order")  # fields of a table that are regimes
CHANGES = ("gemm", "codes", "folded", "reordered")


@dataclass(frozen=True, kw_only=True)
class Some:
    """Some products: those with at most max_groups groups, fewer weights than below_weights, tiles
    of fewer bytes than below_bytes, and from_tiles tiles of 16 columns in all groups; None: any
    number.
    """

    max_groups: int | None = None
    below_weights: int | None = None
    below_bytes: int | None = None
    from_tiles: int | None = None

    def admits(self, of: Matrices) -> bool:
        """Whether a product of such matrices is one of them."""
        return (
            (self.max_groups is None or of.groups <= self.max_groups)
            and (self.below_weights is None or of.weights < self.below_weights)
            and (self.below_bytes is None or of.tile_bytes < self.below_bytes)
            and of.groups * of.tiles >= (self.from_tiles or 0)
        )


@dataclass(frozen=True)
class Change(Some):
    """from_average: the average number of rows per group from which a product is computed in
    another way.
    """

    from_average: float


@dataclass(frozen=True)
class Regime(Some):
    """max_average: up to this average number of rows per group, one of the variants is chosen: the
    one with the least cost.

    size_classes: used instead if all of them fit; the same for groups of up to this many rows each
    (None: any), computed by kernels that run concurrently. If rows choose groups evenly, one of
    them has nearly all of the work. With many groups, some can be so much heavier than others that
    size classes pay off; with many weights, further launches are short; and few groups leave
    multiprocessors idle.
    """

    max_average: float
    variants: tuple[Variant, ...]
    size_classes: tuple[tuple[int | None, tuple[Variant, ...]], ...] = ()


@dataclass(frozen=True)
class Table:
    """Regimes in the order in which they are tried, for weights stored as tiles or not; `wide`:
    weights of more than 8 bits. row_order: what is tried before `tiled` in row order.

    changes: by what happens from there on. "gemm": 16-bit matrices are multiplied by
    kernels/product.cuh; "codes": e4m3 codes by kernels/fp8.cuh; "folded": of weights in few bits
    that are there in FP8 too, those are read; "reordered": weights that do not lie in tiles become
    tiles first. The first that admits a product counts; the last admits all.
    """

    tiled: tuple[Regime, ...]
    linear: tuple[Regime, ...]
    wide_tiled: tuple[Regime, ...]
    wide_linear: tuple[Regime, ...]
    row_order: tuple[Regime, ...]
    changes: Mapping[str, tuple[Change, ...]]

    def regimes(self, of: Matrices) -> Iterator[Regime]:
        """The regimes for such matrices."""
        first = self.row_order if of.row_order and kind_of(of) == "tiled" else ()
        return (r for r in (*first, *getattr(self, kind_of(of))) if r.admits(of))

    def change(self, what: str, of: Matrices) -> float:
        """The average number of rows from which something of `changes` happens."""
        return next(c.from_average for c in self.changes[what] if c.admits(of))

    def many(self, what: str, rows: int, of: Matrices) -> bool:
        """Whether it happens for so many rows."""
        return rows >= self.change(what, of) * of.groups


def kind_of(of: Matrices) -> str:
    """The field of a Table that has the regimes for such matrices."""
    return ("wide_" if of.wide else "") + ("tiled" if of.tiled else "linear")


@cache
def table_of(arch: Arch) -> Table:
    """The table of a GPU; that of the nearest known one for others."""
    paths = map(path_of, (arch, nearest(arch.capability), H200))
    return parse(next(path for path in paths if path.exists()).read_text(encoding="utf-8"))


def path_of(arch: Arch) -> Path:
    """The path of a GPU's table, if it has one."""
    return TABLES / f"{arch.name.lower().replace(' ', '_')}.json"


def parse(text: str) -> Table:
    """The table in a text that tools/tune has written."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(text)
    return Table(
        **{kind: tuple(_regime(**row) for row in rows.get(kind, ())) for kind in REGIMES},
        changes={what: tuple(Change(**row) for row in rows[what]) for what in CHANGES},
    )


def _regime(
    max_average: float | None,
    variants: str,
    size_classes: Sequence[tuple[int | None, str]] = (),
    **bounds: int,
) -> Regime:
    classes = tuple((most, SETS[name]) for most, name in size_classes)
    average = ALWAYS if max_average is None else max_average
    return Regime(average, SETS[variants], classes, **bounds)
