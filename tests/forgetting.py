"""Functions that remember their results, in tests that must not find what others left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
