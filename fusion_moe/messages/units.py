"""Numbers as text, with three digits, and sizes from text; lists, of which not all is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import OptionError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"^\s*(\d+\.?\d*)\s*([KMGT]?)(i?)B\s*$", re.IGNORECASE)


def count(n: int, what: str) -> str:
    """2, "call" -> "2 calls"; 1,234 has a comma."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first of some names, and how many more there are: "a, b and 7 more"."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def ratio(x: float | None) -> str:
    """1.234 -> "1.23", 12345.6 -> "12,346"; None, an unknown number, -> "?"."""
    if x is None:
        return "?"
    return f"{x:.3g}" if x < 999.5 else f"{x:,.0f}"


def duration(seconds: float) -> str:
    """Seconds for people: 0.00123 -> "1.23 ms"."""
    unit, size = next(
        (u, s)
        for u, s in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
        if seconds >= 0.9995 * s or u == "ns"
    )
    return f"{seconds / size:.3g} {unit}"


def amount(n: float | None, unit: str = "") -> str:
    """1234567 -> "1.23 M"; None, an unknown number, -> "?"."""
    if n is None:
        return "?"
    size, prefixes = float(n), iter(("", "k", "M", "G", "T"))
    prefix = next(prefixes)
    while size >= 999.5 and prefix != "T":
        size, prefix = size / 1000, next(prefixes)
    return f"{size:.3g} {prefix}{unit}".rstrip()


def bytes_of(size: int | str, name: str = "max_memory") -> int:
    """20, "20GiB" or "20GB" as bytes. OptionError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None:
        raise OptionError(
            f"{name} = {size!r}", expected="a number of bytes, or a text such as '20GiB'"
        )
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _UNITS[match[2].upper()])
