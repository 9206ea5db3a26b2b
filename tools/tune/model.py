"""Fitting the model of products of one group (fusion_moe/backends/cuda/one_group.py) to measured
times. Needs no GPU, but scipy.

What counts is the choice: kernels that are much slower than the fastest count less.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields

from timings import Timings

from fusion_moe.arch import Arch
from fusion_moe.backends.cuda.one_group import (
    CONSTANTS,
    VARIANTS,
    Constants,
    admits,
    constants,
    microseconds,
)
from fusion_moe.backends.cuda.variants import LargeM, Matrices, SmallM

# up to so many times the fastest a time counts so much
_NEAR = ((1.3, 1.0), (2.0, 0.5), (math.inf, 0.2))
_BOUNDS = {"overlap": (0.5, 8.0), "consumer": (0.0, 0.25)} | dict.fromkeys(
    ("few_in_flight", "small_memory", "large_memory"), (0.5, 3.0)
)
_OF_TIMES = (0.0, 1e3)  # the bounds of all others, us
_DIGITS = 4


def fit(found: Iterable[Timings]) -> Constants:
    """The constants that fit times of products of one group best, of any GPUs."""
    from scipy.optimize import least_squares  # the only use of scipy

    times, names = list(_times(found)), [f.name for f in fields(Constants)]
    begin = [getattr(constants(), name) for name in names]

    def residuals(numbers: Iterable[float]) -> list[float]:
        by = Constants(*numbers)
        return [
            weight * math.log(microseconds(v, rows, of, arch, by) / us)
            for v, rows, of, arch, us, weight in times
        ]

    low, high = zip(*(_BOUNDS.get(name, _OF_TIMES) for name in names), strict=True)
    solved = least_squares(
        residuals,
        begin,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        x_scale=[abs(x) + 1e-6 for x in begin],
    )
    return Constants(*(float(f"{x:.{_DIGITS}g}") for x in solved.x))


def write(found: Constants) -> None:
    """Keeps them in the package."""
    CONSTANTS.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def _times(
    found: Iterable[Timings],
) -> Iterator[tuple[SmallM | LargeM, int, Matrices, Arch, float, float]]:
    """Kernels, rows, matrices, GPUs, us, and how much each counts."""
    variants = {v.name: v for v in VARIANTS}
    for timings in found:
        for cell in timings.cells:
            if admits(cell.matrices):
                best = min(cell.us.values())
                for name, us in cell.us.items():
                    if name in variants:
                        weight = next(w for most, w in _NEAR if us <= most * best)
                        yield variants[name], cell.rows, cell.matrices, timings.arch, us, weight
