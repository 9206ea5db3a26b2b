"""What calls find again: a dict of as many entries as come soon again. It starts anew when it is full, which costs a call nothing else."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(dict[K, V]):
    """A dict of at most `most` entries: one more, and all others are forgotten."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
