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


def check_skip(skip: Sequence[str], names: Sequence[str] | None, where: str) -> None:
    """OptionError unless skip is a list, each pattern of which fits one of the names, if they are
    known.
    """
    known = () if names is None else names
    unknown = [p for p in skip if known and not any(fits(name, [p]) for name in known)]
    if isinstance(skip, str) or unknown:
        raise OptionError(
            f"skip = {skip!r}" if isinstance(skip, str) else f"skip: {unknown[0]!r} fits no module",
            expected="a list of names of modules, in which * stands for any text",
            todo=did_you_mean(unknown[0], known) if unknown else "",
            where=where,
        )


def skipping(name: str) -> str:
    """The advice of an error about one module of a model: the argument `skip` that leaves it as it
    is.
    """
    return f"skip=[{name!r}] leaves it as it is"
