"""A run as a page."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from ..report.html import rendered
from .data import RunData, Span
from .summary import KERNELS, against, called, facts, notes

_COLUMNS = 600  # of the timeline of multiprocessors
_STEPS = 240  # bars, at most
_HUE = bytes((31, 111, 235))


def page(run: RunData) -> str:
    """The HTML of a recorded run: one file with its style and script, which loads nothing."""
    kernels = sorted(run.kernels, key=lambda k: -k.whole)
    return rendered(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8"),
        f"fusion_moe.record: {run.of}",
        run=run,
        facts=dict(facts(run)),
        notes=[*notes(run)],
        against=against,
        heat=heat,
        transposed=lambda rows: list(zip(*rows, strict=True)),
        kernels=kernels,
        names=called(kernels),
        bars=KERNELS,
        longest=max((max(k.seconds, k.floor) for k in kernels[:KERNELS]), default=1),
        steps=_thinned(run.steps),
        together=_together(run.steps),
        timelines=dict(_timelines(run.tiles)),
    )


def heat(rows: Sequence[Sequence[float]]) -> str:
    """A picture of numbers as a data URI, a pixel for each: from transparent, which is 0, to the
    largest.
    """
    most = max((max(row) for row in rows), default=0) or 1
    lines = b"".join(
        b"\0" + b"".join(_HUE + bytes([round(255 * x / most)]) for x in row) for row in rows
    )
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _thinned(steps: Sequence[float]) -> list[float]:
    """The longest of neighbours, so that not too many are shown."""
    each = _together(steps)
    return [max(steps[i : i + each]) for i in range(0, len(steps), each)]


def _together(steps: Sequence[float]) -> int:
    """How many neighbours are one bar."""
    return -(-len(steps) // _STEPS) or 1


def _timelines(tiles: Sequence[Span]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """By kernel: a picture with a line for each multiprocessor, and how long all of it took."""
    for name in dict.fromkeys(t.name for t in tiles):
        of = [t for t in tiles if t.name == name]
        start, end = min(t.start for t in of), max(t.start + t.seconds for t in of)
        tracks = list(dict.fromkeys(sorted((t.track for t in of), key=lambda s: (len(s), s))))
        rows = [[0.0] * _COLUMNS for _ in tracks]
        scale = (_COLUMNS - 1) / (end - start or 1)
        for t in of:
            first, last = (t.start - start) * scale, (t.start + t.seconds - start) * scale
            for x in range(round(first), round(last) + 1):
                rows[tracks.index(t.track)][x] = 1.0 if x > first else 0.5
        yield name, {"picture": heat(rows), "seconds": end - start, "lines": len(tracks)}
