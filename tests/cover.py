"""Which tests `make test` runs: none with the mark `exhaustive`, and of a grid (a test with several
`parametrize`) a cover: each pair of values is in one of its cells; where the test has the mark
`slow`, each value is. `--all` runs the rest too, which is what `make test-all` does.

The same cells are chosen in each process and on each day: nothing is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import hypothesis
import pytest
from _pytest.mark import ParameterSet


def cover(cells: Sequence[Sequence[Hashable]], together: int) -> list[int]:
    """The places of cells that have all `together` values that any cell has, few of them: the one
    with the most new ones first.
    """
    parts = [set(combinations(enumerate(cell), min(together, len(cell)))) for cell in cells]
    left, chosen = set().union(*parts), []
    while left:
        best = max(range(len(parts)), key=lambda i: len(parts[i] & left))
        left -= parts[best]
        chosen.append(best)
    return sorted(chosen)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that only a run of all has; of those for GPUs, which few have, none."""
    grids, rest = defaultdict[tuple[object, str], list[pytest.Item]](list), []
    for item in items:
        if item.get_closest_marker("exhaustive"):
            rest.append(item)
        elif hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            grids[item.parent, item.originalname].append(item)
    for cells in grids.values():
        together = 1 if cells[0].get_closest_marker("slow") else 2
        chosen = cover([item.callspec._idlist for item in cells], together)
        rest += [item for i, item in enumerate(cells) if i not in set(chosen)]
    return rest


def few(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Values for `parametrize` that are much alike: `make test` takes so many of them, evenly
    spread, and `--all` each.
    """
    values = list(values)
    chosen = {i * len(values) // count for i in range(count)}
    return [v if i in chosen else _exhaustive(v) for i, v in enumerate(values)]


def _exhaustive(value: Any) -> Any:
    mark = pytest.mark.exhaustive
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=mark)


def examples(times: float) -> hypothesis.settings:
    """So many times as many drawn examples as the profile has: 5, with --all 30."""
    count = max(1, round(hypothesis.settings().max_examples * times))
    return hypothesis.settings(max_examples=count)
