"""What a module's weights in few bits are read as: packed, requantized to FP8
(encodings/requantized.py), or either, by the number of rows.

Parameters stay what was loaded, and state dicts have nothing else; weights in FP8 are buffers that
are not saved. With "fp8" the parameters lie in the host's memory, since only state dicts read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ... import options
from ...encodings import REQUANTIZED
from ...errors import OptionError


@dataclass(frozen=True)
class Reading:
    """What a module's weights are read as: "fp8", or "both", which is FP8 from so many rows. lost:
    by requantizing, as `encodings.requantized.requantize` counts; of: which parameters in which
    versions were requantized.
    """

    weights: str
    rows: int = 0
    lost: tuple[float, ...] = (0, 0, 0, 0)
    of: tuple[tuple[int, int], ...] = ()


def need_free_order() -> None:
    """OptionError if results must not depend on the batch."""
    if options.current().row_order:
        raise OptionError(
            'weights = "both" with order = "row"',
            expected='"packed" or "fp8": with both, numbers depend on how many rows there are',
            where="prepare_",
        )


def requantized_names(projection: str) -> tuple[str, str]:
    """The buffers that hold a requantized weight."""
    return f"{projection}_requantized", f"{projection}_requantized_scale"


def requantizing(modules: Iterable[torch.nn.Module]) -> str:
    """What requantizing did to modules, in a sentence; "" if none is requantized."""
    read: list[Any] = [m for m in modules if getattr(m, "reading", None) is not None]
    if not read:
        return ""
    exact, blocks, error, weight = map(sum, zip(*(m.reading.lost for m in read), strict=True))
    weights = [(m.value_of(p), m.requantized_of(p)) for m in read for p in m.projections]
    packed, requantized = (
        f"{sum(t.nbytes for w in form for t in w.parts) / 2**20:,.1f} MiB"
        for form in zip(*weights, strict=True)
    )
    how = "exactly"
    if exact != blocks:
        some = f"{exact:,.0f} of {blocks:,.0f} blocks exact"
        how = f"rounded once more, by {(error / weight) ** 0.5:.2g} of their norm ({some})"
    if any(m.weights == "both" for m in read):
        how += "; results depend on how many rows are computed together"
    names = " and ".join(dict.fromkeys(m.encoding.name for m in read))
    to = f"{REQUANTIZED.name} ({requantized})"
    return f"{len(read)} x weights in {names} ({packed}) requantized to {to} {how}"
