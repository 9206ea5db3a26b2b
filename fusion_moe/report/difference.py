"""The differences between two reports: with another option, size, target or version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from .data import FusionReport, Report, SegmentReport
from .lines import blocks_of, changed_lines, differences
from .output import Shown, save
from .units import amount, count, duration


@dataclass(frozen=True)
class Change:
    """A fact that differs between the two reports; "" if one of them does not have it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class SegmentChange:
    """A segment that changed. before, after: its names in the two reports, "" in a report without
    it; ops: its operations.

    ir, source: the changed lines, prefixed with "+", "-" or " ".
    """

    before: str
    after: str
    ops: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    ir: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """The result of `diff`. asked: what was explained and how; fused: how much; segments: the
    changed ones; unchanged: how many are not.

    not_fused: calls that only one report has, with their reasons.
    """

    asked: tuple[Change, ...]
    fused: tuple[Change, ...]
    segments: tuple[SegmentChange, ...]
    unchanged: int
    not_fused: tuple[Change, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.asked or self.fused or self.segments or self.not_fused)

    def save(self, path: str | Path) -> None:
        """Writes a page to a path that ends in .html, text to .txt; OptionError for others. The
        file appears whole or not at all.
        """
        save(path, "a difference", {".html": self._page, ".txt": lambda: f"{self._text(120)}\n"})

    def __repr__(self) -> str:
        return (
            f"<Difference of fusion_moe.diff: {count(len(self.segments), 'segment')} changed, "
            f"{self.unchanged} not>"
        )

    def _text(self, width: int) -> str:
        from .diff_text import text

        return text(self, width)

    def _page(self) -> str:
        from .html import diff_page

        return diff_page(self)


def diff(report: Report, other: Report) -> Difference:
    """What changed from one report of `explain` to another: what was asked, how much is fused,
    segments, reasons.

    Segments are paired by their operations, in order. Times differ between any two measurements:
    they are shown only for pairs that differ by more than their spreads, and only if no busy
    machine makes them meaningless.
    """
    pairs, timed = list(_paired(_blocks(report), _blocks(other))), not (report.void or other.void)
    changed = [change for pair in pairs if (change := _segment(*pair, timed))]
    return Difference(
        asked=_changes(_asked(report), _asked(other)),
        fused=_changes(_fused(report), _fused(other)),
        segments=tuple(changed),
        unchanged=len(pairs) - len(changed),
        not_fused=_changes(_not_fused(report), _not_fused(other)),
    )


@dataclass(frozen=True)
class _Block:
    """A segment with its texts, and how often it occurs in the model."""

    segment: SegmentReport
    times: int
    ir: str
    source: str


def _blocks(report: Report) -> list[_Block]:
    return [block for fusion in report.fusions for block in _blocks_of(fusion)]


def _blocks_of(fusion: FusionReport) -> Iterator[_Block]:
    texts = (dict(blocks_of(fusion, stage)) for stage in ("segments", "source"))
    ir, source = ({id: text.partition("\n")[2] for id, text in blocks.items()} for blocks in texts)
    return (_Block(s, fusion.times, ir[s.id], source[s.id]) for s in fusion.segments)


def _paired(
    before: Sequence[_Block], after: Sequence[_Block]
) -> Iterator[tuple[_Block | None, _Block | None]]:
    matcher = SequenceMatcher(
        a=[b.segment.ops for b in before], b=[b.segment.ops for b in after], autojunk=False
    )
    for _, i, i1, j, j1 in matcher.get_opcodes():
        if i1 - i == j1 - j:
            yield from zip(before[i:i1], after[j:j1], strict=True)
        else:
            yield from ((b, None) for b in before[i:i1])
            yield from ((None, b) for b in after[j:j1])


def _segment(before: _Block | None, after: _Block | None, timed: bool) -> SegmentChange | None:
    """The change of a segment; None if it did not change."""
    if before is None or after is None:
        only = before or after
        assert only is not None
        return SegmentChange(
            before.segment.id if before else "", after.segment.id if after else "", only.segment.ops
        )
    ir, source = (
        tuple(differences(before.ir, after.ir)),
        tuple(differences(before.source, after.source)),
    )
    lines = Change("IR", "", changed_lines(ir)), Change("source", "", changed_lines(source))
    changes = (
        *_changes(_facts(before), _facts(after)),
        *(_times(before, after) if timed else ()),
        *(c for c in lines if c.after),
    )
    return (
        SegmentChange(before.segment.id, after.segment.id, after.segment.ops, changes, ir, source)
        if changes
        else None
    )


def _facts(block: _Block) -> Iterator[tuple[str, str]]:
    s = block.segment
    yield "occurs", count(block.times, "time")
    yield "kind", s.kind
    yield "operations", " ".join(s.ops)
    yield "inputs", ", ".join(s.inputs)
    yield "outputs", ", ".join(s.outputs)
    yield "flops", amount(s.flops)
    for name, n in (
        ("read", s.bytes_read),
        ("written", s.bytes_written),
        ("avoided", s.bytes_avoided),
    ):
        yield name, amount(n, "B")
    yield "begins because", s.boundary
    yield "roundings dropped", ", ".join(s.roundings)
    yield "backend", f"{s.backend}: {s.backend_why}"
    yield "schedule", s.schedule
    yield "launched", s.launched


def _times(before: _Block, after: _Block) -> Iterator[Change]:
    a, b = before.segment.measured, after.segment.measured
    if a and b and (a.longest < b.shortest or b.longest < a.shortest):
        yield Change("time", duration(a.seconds), duration(b.seconds))


def _asked(report: Report) -> Iterator[tuple[str, str]]:
    yield "fusion_moe", report.version
    yield "target", report.target
    yield "runs here", "yes" if report.executed else "no"
    yield from report.options
    yield "graphs", str(report.graphs)
    yield "calls", str(report.calls)


def _fused(report: Report) -> Iterator[tuple[str, str]]:
    yield "flops", f"{report.flops}, {amount(report.flops.fused)} of {amount(report.flops.total)}"
    yield (
        "bytes",
        f"{report.bytes}, {amount(report.bytes.fused, 'B')} of {amount(report.bytes.total, 'B')}",
    )
    yield "calls", str(report.fused_calls)
    yield "fusions", str(sum(f.times for f in report.fusions))


def _not_fused(report: Report) -> Iterator[tuple[str, str]]:
    times: dict[tuple[str, str], int] = {}
    for x in report.not_fused:
        times[x.op, x.why] = times.get((x.op, x.why), 0) + x.times
    for (op, why), n in times.items():
        yield f"{op}: {why}", count(n, "time")


def _changes(
    before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]]
) -> tuple[Change, ...]:
    old, new = dict(before), dict(after)
    changes = (
        Change(name, old.get(name, ""), new.get(name, "")) for name in dict.fromkeys([*old, *new])
    )
    return tuple(change for change in changes if change.before != change.after)
