"""Choosing a table from measured times, and how good it is. Needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from timings import Cell, Timings, way

from fusion_moe.emit.cuda.choice import choose_from
from fusion_moe.emit.cuda.table import ALWAYS, KINDS, Regime, Table, kind_of
from fusion_moe.emit.cuda.variants import SETS

_GAIN = 5e-4  # in the mean of logarithms: below that a table stays as it is
_NOT_TIMED = math.log(2)  # what a choice counts that nobody measured
_ROUNDS = 20
_WEIGHTS = tuple(2**n for n in range(24, 35))


@dataclass(frozen=True)
class Fitted:
    """What a table chooses in a cell, and how long that takes in times of the fastest; None if it was not measured."""

    cell: Cell
    chosen: str

    @property
    def loss(self) -> float | None:
        """1.0 for the fastest."""
        us = self.cell.us.get(self.chosen)
        return None if us is None else us / self.cell.us[self.cell.best]


def fitted(table: Table, timings: Timings) -> list[Fitted]:
    """What a table chooses in each cell."""
    return [Fitted(cell, way(choose_from(table, cell.rows, cell.matrices, timings.arch))) for cell in timings.cells]


def mean_loss(table: Table, timings: Timings) -> float:
    """The mean logarithm of losses, which the fit makes small."""
    return fmean(_NOT_TIMED if f.loss is None else math.log(f.loss) for f in fitted(table, timings))


def fit(table: Table, timings: Timings) -> Table:
    """The table after all single changes that pay: bounds, sets and size classes of regimes, one after the other, until none does."""
    kinds = dict.fromkeys(kind_of(cell.matrices) for cell in timings.cells)
    best = mean_loss(table, timings)
    for _ in range(_ROUNDS):
        before = best
        for name in kinds:
            for i in range(len(getattr(table, name))):
                tried = [(mean_loss(changed, timings), changed) for changed in _changes(table, name, i, timings.cells)]
                loss, changed = min(tried, key=lambda pair: pair[0], default=(math.inf, table))
                if loss < best - _GAIN:
                    best, table = loss, changed
        if best == before:
            break
    return table


def _changes(table: Table, name: str, i: int, cells: Sequence[Cell]) -> Iterator[Table]:
    """The table with one regime changed in one way."""
    regimes: tuple[Regime, ...] = getattr(table, name)
    regime = regimes[i]
    for changed in (*_bounds(regimes, i, cells), *_sets(regimes, regime), *_classes(regime)):
        if changed != regime:
            yield replace(table, **{name: (*regimes[:i], changed, *regimes[i + 1 :])})


def _bounds(regimes: Sequence[Regime], i: int, cells: Sequence[Cell]) -> Iterator[Regime]:
    """Other ends: halfway between averages that were measured, between those of its neighbours."""
    if regimes[i].max_average == ALWAYS:
        return
    before = regimes[i - 1].max_average if i and regimes[i - 1].max_average < regimes[i].max_average else 0
    averages = sorted({cell.average for cell in cells})
    for low, high in pairwise(averages):
        between = _plain(math.sqrt(low * high), low, high)
        if before < between < regimes[i + 1].max_average:
            yield replace(regimes[i], max_average=between)


def _plain(x: float, low: float, high: float) -> float:
    """A number with few digits near x, at least `low` and below `high`."""
    return next((r for digits in range(4) if low <= (r := round(x, digits) if digits else int(x)) < high and r > 0), x)


def _sets(regimes: Sequence[Regime], regime: Regime) -> Iterator[Regime]:
    """Other sets that regimes of this kind have."""
    for variants in dict.fromkeys(r.variants for r in regimes):
        yield replace(regime, variants=variants)


def _classes(regime: Regime) -> Iterator[Regime]:
    """Without size classes; with them in products of other sizes."""
    if regime.size_classes:
        yield replace(regime, size_classes=(), min_weights=0)
        for weights in _WEIGHTS:
            yield replace(regime, min_weights=weights)


# For people -----------------------------------------------------------------------------------------------------------


def shown(table: Table, timings: Timings) -> str:
    """Chosen against fastest, a line for each cell; the geometric mean and the worst below."""
    found = fitted(table, timings)
    lines = [f"{'product':<22} {'tokens':>6} {'routing':<8} {'rows/group':>10} {'best us':>9} {'loss':>6}  chosen (if not best: best)"]
    for f in found:
        cell, loss = f.cell, f"{f.loss:6.3f}" if f.loss else "     ?"
        line = f"{cell.product:<22} {cell.tokens:>6} {cell.routing:<8} {cell.average:>10.2f} {cell.us[cell.best]:>9.2f} {loss}  {f.chosen}"
        lines.append(line if f.loss == 1 else f"{line} ({cell.best})")
    return "\n".join([*lines, "", *summary(found)])


def summary(found: Sequence[Fitted]) -> list[str]:
    """The geometric mean and the worst of losses; how many cells have a choice that was not measured."""
    losses = {f.loss: f for f in found if f.loss is not None}
    missing = sum(f.loss is None for f in found)
    lines = [f"{missing} of {len(found)} cells: what is chosen was not measured"] if missing else []
    if losses:
        worst = losses[max(losses)]
        mean = math.exp(fmean(math.log(f.loss) for f in found if f.loss is not None))
        lines.append(
            f"geometric mean {mean:.4f}, worst {max(losses):.3f} ({worst.cell.product}, {worst.cell.tokens} tokens, {worst.cell.routing})"
        )
    return lines


def changes(before: Table, after: Table) -> list[str]:
    """What became of regimes, one a line."""
    names = {variants: name for name, variants in SETS.items()}

    def said(regime: Regime) -> str:
        classes = ", ".join(f"{most or 'any'}: {names[v]}" for most, v in regime.size_classes)
        text = f"up to {regime.max_average:g}: {names[regime.variants]}"
        return f"{text} ({classes} from {regime.min_weights} weights)" if classes else text

    found = []
    for kind in KINDS:
        pairs = zip(getattr(before, kind), getattr(after, kind), strict=True)
        found += [f"{kind}: {said(a)} -> {said(b)}" for a, b in pairs if a != b]
    return found
