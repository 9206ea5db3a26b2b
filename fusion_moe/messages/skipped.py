"""Names of modules that are left as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ..errors import OptionError, did_you_mean


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is this name or that of a module around it; `*` stands for any
    text.
    """
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns)


def check_skip(skip: Sequence[str], names: Sequence[str], where: str) -> None:
    """OptionError unless each pattern fits one of the names."""
    unknown = [p for p in skip if not any(fits(name, [p]) for name in names)]
    if isinstance(skip, str) or unknown:
        raise OptionError(
            f"skip = {skip!r}",
            expected="a list of names of modules, in which * stands for any text",
            todo=did_you_mean(unknown[0], names) if unknown else "",
            where=where,
        )
