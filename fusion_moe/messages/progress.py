"""One line on stderr for work that takes longer than a moment."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from .units import amount

T = TypeVar("T")
QUIET_SECONDS = 2.0
MUCH = 10**9  # bytes, work on which takes long enough to be told before it begins


def progress(items: Iterable[T], what: str, total: int, sizes: Sequence[int] = ()) -> Iterator[T]:
    """Yields the items. Every two seconds, shows how many of `total` are done, and how long the
    others will take: in place on a terminal, otherwise on a new line. sizes: bytes of each; their
    speed is shown too, and much work is told at once. Of several ranks only the first shows it.
    """
    if not _is_first_rank():
        yield from items
        return
    start = text = time.monotonic()
    at_once = sum(sizes) >= MUCH
    if at_once:
        _say(f"{what}: {total}, {amount(sum(sizes), 'B')}")
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - text > QUIET_SECONDS:
            _say(_line(what, done, total, now - start, sizes))
            text = now
        yield item
    if at_once or text != start:
        _say(_line(what, total, total, time.monotonic() - start, sizes), last=True)


def _is_first_rank() -> bool:
    dist: Any = sys.modules.get("torch.distributed")  # wheels are built without torch
    if dist and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"  # torchrun's


def _line(what: str, done: int, total: int, seconds: float, sizes: Sequence[int]) -> str:
    text = f"{what}: {done} of {total}, {seconds:.0f} s"
    if sizes and seconds:
        text += f", {amount(sum(sizes[:done]) / seconds, 'B')}/s"
    share = sum(sizes[:done]) / sum(sizes) if sum(sizes) else done / total
    return f"{text}, about {seconds / share - seconds:.0f} s left" if 0 < share < 1 else text


def _say(line: str, last: bool = False) -> None:
    """On a terminal over what was said before."""
    on_terminal = sys.stderr.isatty()
    end = "\r" if on_terminal and not last else "\n"
    print(f"\x1b[K{line}" if on_terminal else line, end=end, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Says on a terminal that work without countable parts is running, once it takes long. Yields a
    function that says something else instead, at once. Elsewhere nothing is said.
    """
    on_terminal = sys.stderr.isatty()
    timer = threading.Timer(QUIET_SECONDS, phase, (what,))
    timer.daemon = True
    if on_terminal:
        timer.start()

    def at_once(instead: str) -> None:
        timer.cancel()
        if on_terminal:
            phase(instead)

    try:
        yield at_once
    finally:
        timer.cancel()


def phase(what: str) -> None:
    """Says that work which may take long begins."""
    print(f"{what}...", file=sys.stderr, flush=True)
