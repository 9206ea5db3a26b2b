"""Choosing a table from measured times, and how good it is. Needs no GPU.

Products are of few or many groups and weights (SHAPES). For those of a shape the regimes are the
best ones that there are, found by dynamic programming over the averages that were measured: the
least sum of losses, beyond 5 % three times, and of a price for each regime.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from timings import Cell, Timings, way

from fusion_moe.arch import Arch
from fusion_moe.backends.cuda import one_group
from fusion_moe.backends.cuda.heuristics import choose_from
from fusion_moe.backends.cuda.table import (
    ALWAYS,
    KINDS,
    REGIMES,
    Change,
    Regime,
    Some,
    Table,
    kind_of,
)
from fusion_moe.backends.cuda.variants import SETS
from fusion_moe.errors import UnsupportedError

# max_groups, below_weights
SHAPES = (
    (15, None),
    (63, 2**29),
    (63, 2**30),
    (63, None),
    (None, 2**29),
    (None, 2**30),
    (None, None),
)
# groups of which size classes make launches with little work: they win with Zipf what they lose
# with uniform rows
_FEW = 15
_PRICE = 0.3  # of one more regime, in the sum of its cells' logarithms of losses
_HIGH = 1.05  # a loss, or a jump
_NOT_TIMED = math.log(2)  # what a choice counts that nobody measured
# Rows of a group on average up to which large M is for heavy groups alone. No sweep times it: down
# products are of small M then, and the products of a layer that has both take longer than by
# themselves (Llama-4-Scout with 75 tokens: 1.07x).
_SMALL_UP_TO = 5
# of rows that are no product's result, for kernels that read them in fragment order: no sweep times
# it
_REORDERING_US = 1.5


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
        return "    " + json.dumps(said | _bounds(regime))

    def change(found: Change) -> str:
        return "    " + json.dumps({"from_average": found.from_average} | _bounds(found))

    parts = list[str]()
    kinds = {name: map(line, of) for name in REGIMES if (of := getattr(found, name))}
    for name, lines in (kinds | {n: map(change, of) for n, of in found.changes.items()}).items():
        said = ",\n".join(lines)
        parts.append(f'  "{name}": [\n{said}\n  ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _bounds(some: Some) -> dict[str, int]:
    bounds = {field.name: getattr(some, field.name) for field in fields(Some)}
    return {key: bound for key, bound in bounds.items() if bound is not None}


@dataclass(frozen=True)
class Fitted:
    """What a table chooses in a cell, and how long that takes in times of the fastest; None if it
    was not measured.
    """

    cell: Cell
    chosen: str

    @property
    def loss(self) -> float | None:
        """1.0 for the fastest."""
        us = self.cell.us.get(self.chosen)
        return None if us is None else us / self.cell.us[self.cell.best]


def fitted(table: Table, timings: Timings) -> list[Fitted]:
    """What a table chooses in each cell."""
    return [
        Fitted(cell, way(choose_from(table, cell.rows, cell.matrices, timings.arch)))
        for cell in timings.cells
    ]


def mean_loss(table: Table, timings: Timings) -> float:
    """The mean logarithm of losses, which the fit makes small."""
    return fmean(_NOT_TIMED if f.loss is None else math.log(f.loss) for f in fitted(table, timings))


def fit(
    table: Table,
    timings: Timings,
    shapes_: Sequence[tuple[int | None, int | None]] = SHAPES,
    price: float = _PRICE,
) -> Table:
    """The table with the best regimes for the kinds of weights and the shapes that were measured;
    others are as they were. price: of one more regime.
    """
    by_tables = [cell for cell in timings.cells if not one_group.admits(cell.matrices)]
    for kind in dict.fromkeys(kind_of(cell.matrices) for cell in by_tables):
        before: tuple[Regime, ...] = getattr(table, kind)
        left, ways = (
            [cell for cell in by_tables if kind_of(cell.matrices) == kind],
            list(_ways(before)),
        )
        shapes = [
            *shapes_[:-1],
            *(shape for shape in map(_shape, before) if shape != SHAPES[-1]),
            SHAPES[-1],
        ]
        of_shape = {shape: [r for r in before if _shape(r) == shape] for shape in shapes}
        for max_groups, below_weights in shapes_:
            whole = Regime(ALWAYS, (), max_groups=max_groups, below_weights=below_weights)
            mine, left = (
                [c for c in left if whole.admits(c.matrices) == admitted]
                for admitted in (True, False)
            )
            if mine:
                few = max_groups is not None and max_groups <= _FEW
                tried = [
                    replace(w, max_groups=max_groups, below_weights=below_weights)
                    for w in ways
                    if not (few and w.size_classes)
                ]
                of_shape[_shape(whole)] = _regimes(tried, mine, timings.arch, table, price)
                if _shape(whole) == SHAPES[-1]:
                    of_shape[SHAPES[-1]] += _for_others(before)
        table = replace(table, **{kind: tuple(r for regimes in of_shape.values() for r in regimes)})
    return table


def _shape(regime: Regime) -> tuple[int | None, int | None]:
    return regime.max_groups, regime.below_weights


def _ways(regimes: Sequence[Regime]) -> Iterator[Regime]:
    """What a regime may be: sets of kernels that there are, and the size classes, without
    bounds.
    """
    known = {
        v
        for r in regimes
        for variants in (r.variants, *(among for _, among in r.size_classes))
        for v in variants
    }
    yield from (
        Regime(ALWAYS, variants) for variants in SETS.values() if known.issuperset(variants)
    )
    yield from dict.fromkeys(
        Regime(ALWAYS, r.variants, r.size_classes) for r in regimes if r.size_classes
    )


def _for_others(regimes: Sequence[Regime]) -> tuple[Regime, ...]:
    """The regimes after the first that takes all: for GPUs that do not have its kernels."""
    last = next(
        i
        for i, r in enumerate(regimes)
        if (r.max_average, r.max_groups, r.below_weights) == (ALWAYS, None, None)
    )
    return tuple(regimes[last + 1 :])


def _regimes(
    ways: Sequence[Regime], cells: Sequence[Cell], arch: Arch, table: Table, change: float
) -> list[Regime]:
    """The best ones, in order, of some ways, for the cells of one shape."""
    at = defaultdict[float, list[Cell]](list)
    for cell in cells:
        at[cell.average].append(cell)
    averages = sorted(at)
    price = [
        [sum(_price(way, cell, arch, table) for cell in at[average]) for way in ways]
        for average in averages
    ]
    # of the best regimes up to an average whose last one is a way; the way before it
    total, before = price[0], list[list[int]]()
    for of_average in price[1:]:
        best = min(range(len(ways)), key=total.__getitem__)
        stays = [own <= total[best] + change for own in total]
        before.append([w if stays[w] else best for w in range(len(ways))])
        total = [
            of_average[w] + (total[w] if stays[w] else total[best] + change)
            for w in range(len(ways))
        ]
    chosen = [min(range(len(ways)), key=total.__getitem__)]
    for back in reversed(before):
        chosen.append(back[chosen[-1]])
    chosen.reverse()
    ends = [
        (_between(a, b), w)
        for (a, b), w, after in zip(pairwise(averages), chosen, chosen[1:], strict=False)
        if w != after
    ]
    return [replace(ways[w], max_average=end) for end, w in [*ends, (ALWAYS, chosen[-1])]]


def _price(way_: Regime, cell: Cell, arch: Arch, table: Table) -> float:
    """What a way costs in a cell."""
    kind = kind_of(cell.matrices)
    try:
        chosen = choose_from(
            replace(table, **{kind: (replace(way_, max_average=ALWAYS),)}),
            cell.rows,
            cell.matrices,
            arch,
        )
    except UnsupportedError:
        return 3 * _NOT_TIMED
    too_early = cell.average <= _SMALL_UP_TO and all(v.persistent for v in way_.variants)
    if too_early or (us := cell.us.get(way(chosen))) is None:
        return 3 * _NOT_TIMED
    reorders = cell.matrices.block > 1 and all(c.variant.reads_fragment_order for c in chosen)
    loss = math.log((us + reorders * _REORDERING_US) / cell.us[cell.best])
    return loss + 2 * max(0.0, loss - math.log(_HIGH))


def _between(low: float, high: float) -> float:
    """A number with few digits halfway between two averages, at least the lower one."""
    x = math.sqrt(low * high)
    return next(
        (
            r
            for digits in range(4)
            if low <= (r := round(x, digits) if digits else int(x)) < high and r > 0
        ),
        x,
    )


def best_of_counts(timings: Timings) -> list[Fitted]:
    """What one would choose who knows all times, and like a table no routing: for each count the
    same in all of them.
    """
    counts = defaultdict[tuple[str, int], list[Cell]](list)
    for cell in timings.cells:
        counts[cell.product, cell.tokens].append(cell)
    found = []
    for cells in counts.values():
        known = [name for name in cells[0].us if all(name in cell.us for cell in cells)]
        if known:
            best = min(
                known,
                key=lambda name: sum(
                    math.log(cell.us[name] / cell.us[cell.best]) for cell in cells
                ),
            )
            found += [Fitted(cell, best) for cell in cells]
    return found


# For people ---------------------------------------------------------------------------------------


def shown(table: Table, timings: Timings) -> str:
    """Chosen against fastest, a line for each cell; the geometric mean and the worst below."""
    found = fitted(table, timings)
    lines = [
        f"{'product':<22} {'tokens':>6} {'routing':<8} {'rows/group':>10} {'best us':>9} "
        f"{'loss':>6}  chosen (if not best: best)"
    ]
    for f in found:
        cell, loss = f.cell, f"{f.loss:6.3f}" if f.loss else "     ?"
        line = (
            f"{cell.product:<22} {cell.tokens:>6} {cell.routing:<8} {cell.average:>10.2f} "
            f"{cell.us[cell.best]:>9.2f} {loss}  {f.chosen}"
        )
        lines.append(line if f.loss == 1 else f"{line} ({cell.best})")
    return "\n".join([*lines, "", *summary(found)])


def jumps(found: Sequence[Fitted]) -> list[float]:
    """Where the choice changes from one count of tokens to the next that was measured: how far
    apart the times of the two choices are, as a factor, the geometric mean of those in both cells.
    """
    rows = defaultdict[tuple[str, str], list[Fitted]](list)
    for f in found:
        rows[f.cell.product, f.cell.routing].append(f)
    factors = []
    for row in rows.values():
        for a, b in pairwise(sorted(row, key=lambda f: f.cell.tokens)):
            times = [
                cell.us.get(chosen) for cell in (a.cell, b.cell) for chosen in (a.chosen, b.chosen)
            ]
            if a.chosen != b.chosen and all(times):
                first, second, third, fourth = (math.log(us) for us in times if us)
                factors.append(math.exp(abs(second - first + fourth - third) / 2))
    return factors


def summary(found: Sequence[Fitted]) -> list[str]:
    """The geometric mean, the worst and the share of high losses; how many changes of kernels are
    jumps; what was not measured.
    """
    losses = {f.loss: f for f in found if f.loss is not None}
    missing = sum(f.loss is None for f in found)
    lines = [f"{missing} of {len(found)} cells: what is chosen was not measured"] if missing else []
    if losses:
        worst = losses[max(losses)]
        mean = math.exp(fmean(math.log(f.loss) for f in found if f.loss is not None))
        changes, losses_ = jumps(found), [f.loss for f in found if f.loss is not None]
        high = sum(loss > _HIGH for loss in losses_)
        jumping = f"{sum(jump > _HIGH for jump in changes)} of {len(changes)} changes of kernels"
        lines.append(f"{high} of {len(losses_)} cells more than 5 % from the best, {jumping}")
        lines.append(
            f"geometric mean {mean:.4f}, worst {max(losses):.3f} ({worst.cell.product}, "
            f"{worst.cell.tokens} tokens, {worst.cell.routing})"
        )
    return lines


def said(regime: Regime) -> str:
    """A regime, for people."""
    names = {variants: name for name, variants in SETS.items()}
    classes = ", ".join(f"{most or 'any'}: {names[v]}" for most, v in regime.size_classes)
    bounds = {"groups": regime.max_groups, "weights": regime.below_weights}
    bounds["bytes of a tile"] = regime.below_bytes
    of = "".join(f", {what} up to {most}" for what, most in bounds.items() if most is not None)
    return f"up to {regime.max_average:g}{of}: {classes or names[regime.variants]}"


def changes(before: Table, after: Table) -> list[str]:
    """The regimes that are gone, and those that are new, one a line."""
    found = []
    for kind in KINDS:
        old, new = ([*map(said, getattr(table, kind))] for table in (before, after))
        found += [f"{kind}: no longer {line}" for line in old if line not in new]
        found += [f"{kind}: {line}" for line in new if line not in old]
    return found
