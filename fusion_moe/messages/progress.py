"""One line on stderr for work that takes longer than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
QUIET_SECONDS = 2.0


def progress(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yields the items. Every two seconds, shows how many of `total` are done: in place on a
    terminal, otherwise on a new line.
    """
    start = said = time.monotonic()
    end = "\r" if sys.stderr.isatty() else "\n"
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - said > QUIET_SECONDS:
            print(
                f"{what}: {done} of {total}, {now - start:.0f} s",
                end=end,
                file=sys.stderr,
                flush=True,
            )
            said = now
        yield item
    if said != start:
        print(
            f"{what}: {total} of {total}, {time.monotonic() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on a terminal that work without countable parts is running, once it takes long.
    Elsewhere it says nothing.
    """
    said = f"{what}..."
    timer = threading.Timer(QUIET_SECONDS, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
