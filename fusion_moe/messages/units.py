"""Numbers as text, with three digits; and lists, of which not all is shown."""

from __future__ import annotations

from collections.abc import Sequence


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
    """0.00123 -> "1.23 ms"."""
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
