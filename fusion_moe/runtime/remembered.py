"""A cache for values that calls look up again: a dict that is emptied when it is full, which
otherwise costs a call nothing.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(dict[K, V]):
    """A dict of at most `most` entries: adding one more drops all others."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
