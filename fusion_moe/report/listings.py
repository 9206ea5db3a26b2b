"""The functions of the user's program whose lines a report names."""

from __future__ import annotations

import linecache
from collections.abc import Collection, Iterable
from pathlib import Path

from torch.fx import Node

from ..definitions.nodes import frame_of, function_around, source_of
from .data import Listing


def listings(nodes: Iterable[Node], sources: Collection[str]) -> tuple[Listing, ...]:
    """The functions that nodes come from, in the order of their lines, for the nodes whose source
    lines are among `sources`.
    """
    frames = [frame for n in nodes if source_of(n) in sources and (frame := frame_of(n))]
    places = sorted({_place(frame["file"], int(frame["line"])) for frame in frames})
    listed = [
        Listing(Path(file).name, first, "".join(linecache.getlines(file)[first - 1 : last]))
        for file, first, last in places
    ]
    return tuple(listing for listing in listed if listing.text)


def _place(file: str, line: int) -> tuple[str, int, int]:
    """File, first and last line of the innermost function around a line; else just the line."""
    function = function_around(file, line)
    return (file, function.lineno, function.end_lineno or line) if function else (file, line, line)
