"""What is remembered from call to call, in tests that must not find what others left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fusion_moe.bodies import stored


@contextmanager
def forgetting(*cached: Any) -> Iterator[None]:
    """Nothing is remembered of other tests, nor by them. cached: functions under
    functools.cache.
    """
    for each in cached:
        each.cache_clear()
    try:
        yield
    finally:
        for each in cached:
            each.cache_clear()


def kept_bytes() -> int:
    """The memory of all weights that are kept for eager calls."""
    parts = (t for entry in stored._kept.values() for t in entry.parts)
    return sum(t.nbytes for t in parts if isinstance(t, Tensor))
