"""Calls that share memory, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import cuda


class Turns:
    """with turns.next(): launches on the current stream of a device; after those of other
    streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._launching = threading.RLock()
        self._last: torch.cuda.Stream | None = None

    @contextmanager
    def next(self) -> Iterator[None]:
        """A call, which no other thread launches meanwhile."""
        with self._launching:
            # replays of captured calls follow each other as their user has them
            if self.device.type == "cuda" and not cuda.capturing():
                stream = torch.cuda.current_stream(self.device)
                if self._last is not None and self._last != stream:
                    stream.wait_stream(self._last)
                self._last = stream
            yield
