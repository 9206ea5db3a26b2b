"""Which kernels are candidates for how many rows of a group: a table for each GPU that was tuned,
tables/<name>.json.

tools/tune writes the tables from measured times. Sets of kernels have names (variants.SETS); the
costs in variants.py choose one of a set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...arch import H200, Arch
from ...errors import ParseError
from .variants import SETS, Matrices, Variant

TABLES = Path(__file__).parent / "tables"
ALWAYS = float("inf")
KINDS = ("tiled", "linear", "wide_tiled", "wide_linear")  # kinds of weights: the fields of a table
_KEYS = ("max_average", "variants", "size_classes", "max_groups", "below_weights")


@dataclass(frozen=True)
class Regime:
    """max_average: up to this average number of rows per group, one of the variants is chosen: the
    one with the least cost.

    size_classes: used instead if all of them fit; the same for groups of up to this many rows each
    (None: any), computed by kernels that run concurrently. If rows choose groups evenly, one of
    them has nearly all of the work. max_groups, below_weights: for products with at most this many
    groups and fewer weights; None: for all. With many groups, some can be so much heavier than
    others that size classes pay off; with many weights, further launches are short; and few groups
    leave multiprocessors idle.
    """

    max_average: float
    variants: tuple[Variant, ...]
    size_classes: tuple[tuple[int | None, tuple[Variant, ...]], ...] = ()
    max_groups: int | None = None
    below_weights: int | None = None

    def admits(self, of: Matrices) -> bool:
        """Whether it applies to a product of such matrices."""
        few = self.max_groups is None or of.groups <= self.max_groups
        return few and (self.below_weights is None or of.weights < self.below_weights)


@dataclass(frozen=True)
class Table:
    """Regimes in the order in which they are tried, for weights stored as tiles or not; `wide`:
    weights of more than 8 bits.
    """

    tiled: tuple[Regime, ...]
    linear: tuple[Regime, ...]
    wide_tiled: tuple[Regime, ...]
    wide_linear: tuple[Regime, ...]

    def regimes(self, of: Matrices) -> tuple[Regime, ...]:
        """The regimes for such matrices."""
        found: tuple[Regime, ...] = getattr(self, kind_of(of))
        return tuple(regime for regime in found if regime.admits(of))


def kind_of(of: Matrices) -> str:
    """The field of a Table that has the regimes for such matrices."""
    return ("wide_" if of.wide else "") + ("tiled" if of.tiled else "linear")


@cache
def table_of(arch: Arch) -> Table:
    """The table of a GPU; the H200's for a GPU that was not tuned. ParseError if the file is not a
    table.
    """
    path = path_of(arch)
    path = path if path.exists() else path_of(H200)
    return parse(path.read_text(encoding="utf-8"), path.name)


def path_of(arch: Arch) -> Path:
    """The path of a GPU's table, if it has one."""
    return TABLES / f"{arch.name.lower().replace(' ', '_')}.json"


# Text ---------------------------------------------------------------------------------------------


def text(found: Table) -> str:
    """A table as JSON, with a line for each regime."""
    names = {variants: name for name, variants in SETS.items()}

    def line(regime: Regime) -> str:
        said: dict[str, Any] = {
            "max_average": None if regime.max_average == ALWAYS else regime.max_average
        }
        said["variants"] = names[regime.variants]
        if regime.size_classes:
            said["size_classes"] = [
                [most, names[variants]] for most, variants in regime.size_classes
            ]
        said |= {key: bound for key in _KEYS[3:] if (bound := getattr(regime, key)) is not None}
        return "    " + json.dumps(said)

    parts = list[str]()
    for name in KINDS:
        lines = ",\n".join(map(line, getattr(found, name)))
        parts.append(f'  "{name}": [\n{lines}\n  ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse(text: str, where: str) -> Table:
    """The table in a text. ParseError if it is invalid: an unknown set or key, or bounds that do
    not increase.
    """
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ParseError(
            f"no JSON: {error}", expected="a table of tools/tune", where=where
        ) from None
    if not isinstance(said, Mapping) or set(said) != set(KINDS):
        raise ParseError(
            f"keys {', '.join(said)}" if isinstance(said, Mapping) else "no object",
            expected=", ".join(KINDS),
            where=where,
        )
    return Table(**{name: _rows(said[name], f"{where}: {name}") for name in KINDS})


def _rows(said: Any, where: str) -> tuple[Regime, ...]:
    if not isinstance(said, list) or not said:
        raise ParseError(f"{said!r}", expected="regimes", where=where)
    found = tuple(_regime(row, f"{where}[{i}]") for i, row in enumerate(said))
    if (found[-1].max_average, found[-1].max_groups, found[-1].below_weights) != (
        ALWAYS,
        None,
        None,
    ):
        raise ParseError(
            "the last regime has bounds",
            expected="max_average: null, of any groups and weights",
            where=where,
        )
    return found


def _regime(said: Any, where: str) -> Regime:
    if not isinstance(said, Mapping) or not set(_KEYS[:2]) <= set(said) <= set(_KEYS):
        raise ParseError(
            f"{said!r}",
            expected=f"an object with {', '.join(_KEYS[:2])} and perhaps {', '.join(_KEYS[2:])}",
            where=where,
        )
    average = said["max_average"]
    if average is not None and (
        isinstance(average, bool)
        or not isinstance(average, int | float)
        or not 0 < average < ALWAYS
    ):
        raise ParseError(
            f"max_average {average!r}", expected="a number above 0, or null", where=where
        )
    classes = _classes(said.get("size_classes", []), where)
    bounds = {key: _count(said[key], f"{where}: {key}") for key in _KEYS[3:] if key in said}
    return Regime(
        ALWAYS if average is None else average, _set(said["variants"], where), classes, **bounds
    )


def _classes(said: Any, where: str) -> tuple[tuple[int | None, tuple[Variant, ...]], ...]:
    if not isinstance(said, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in said
    ):
        raise ParseError(f"size_classes {said!r}", expected="pairs of rows and a set", where=where)
    bounds = [most for most, _ in said]
    whole = [_count(most, f"{where}: size_classes") for most in bounds[:-1]]
    if said and (bounds[-1] is not None or len(said) < 2 or not _rises([0, *whole])):
        raise ParseError(
            f"size_classes up to {bounds} rows",
            expected="at least two, of more and more rows, the last null",
            where=where,
        )
    return tuple((most, _set(name, where)) for most, name in said)


def _rises(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def _count(said: Any, where: str) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise ParseError(f"{said!r}", expected="a whole number, 0 or more", where=where)
    return said


def _set(name: Any, where: str) -> tuple[Variant, ...]:
    if not isinstance(name, str) or name not in SETS:
        raise ParseError(f"the set {name!r}", expected=f"one of {', '.join(SETS)}", where=where)
    return SETS[name]
