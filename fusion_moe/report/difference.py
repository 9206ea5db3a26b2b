"""The differences between two reports: with another option, size, target or version."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from ..errors import need
from ..messages import amount, count, duration
from .data import FusionReport, ReportData, SegmentReport
from .output import Shown

Facts = dict[str, str]


def differences(before: str, now: str) -> list[str]:
    """Lines that start with "+", "-" or " ", and "..." for lines left out. Values that differ only
    in their number count as the same.
    """
    old, new = before.splitlines(), now.splitlines()
    matcher = SequenceMatcher(None, _unnumbered(old), _unnumbered(new), autojunk=False)
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(2):
        lines.append("...")
        for tag, i, i1, j, j1 in group:
            if tag == "equal":
                lines += [f"  {line}" for line in new[j:j1]]
            else:
                lines += [f"- {line}" for line in old[i:i1]] + [f"+ {line}" for line in new[j:j1]]
    return lines[1:]


def _unnumbered(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"\b[tie]\d+\b", "_", line) for line in lines]


def changed_lines(lines: Sequence[str]) -> str:
    """A summary of the result of `differences`, as "3 lines more, 2 less"; "" if there is no
    change.
    """
    more, less = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return f"{more} lines more, {less} less" if lines else ""


@dataclass(frozen=True)
class Change:
    """A fact that differs between the two reports; "" if one of them does not have it."""

    name: str
    before: str
    after: str

    @property
    def lines(self) -> list[str]:
        """The changed lines of a text of several, prefixed with "+", "-" or " "."""
        return differences(self.before, self.after) if "\n" in self.before + self.after else []

    def __str__(self) -> str:
        """A sentence."""
        if lines := self.lines:
            return changed_lines(lines)
        return f"{self.before or 'none'} -> {self.after or 'none'}"


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """The result of `diff`. changes: by what they are about: "asked", "fused", "not fused", and the
    names of segments in the two reports.
    """

    changes: dict[str, list[Change]]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.changes)

    def __repr__(self) -> str:
        return f"<Difference of fusion_moe.diff: {', '.join(self.changes) or 'nothing'}>"

    def text(self, width: int, lines: bool = False) -> str:
        """Text of at most `width` columns, 70 or more. lines: with the changed lines of IR and
        source, which may be longer.
        """
        shown = ["fusion_moe.diff" if self else "fusion_moe.diff: nothing differs"]
        for about, changes in self.changes.items():
            shown += ["", about]
            for change in changes:
                shown += textwrap.wrap(
                    str(change),
                    width,
                    initial_indent=f"  {change.name:<20}  ",
                    subsequent_indent=f"{'':24}",
                    break_long_words=False,
                )
                shown += [f"    {line}" for line in change.lines if lines]
        return "\n".join(shown)

    def details(self) -> str:
        """`text`, 120 columns wide, with the changed lines of IR and source."""
        return self.text(120, lines=True)


def diff(report: ReportData, other: ReportData) -> Difference:
    """What changed from one report of `explain` to another: what was asked, how much is fused,
    segments, reasons.

    Segments are paired by their operations, in order. Times differ between any two measurements:
    they are shown only for pairs that differ by more than their spreads, and only if no busy
    machine makes them meaningless. OptionError for what is no report.
    """
    for one in (report, other):
        need(
            one,
            ReportData,
            expected="a report of explain",
            todo="run.compare(other) compares runs of record",
            where="diff",
        )
    pairs = {
        "asked": (_asked(report), _asked(other)),
        "fused": (_fused(report), _fused(other)),
        **dict(_segments(report, other)),
        "not fused": (_not_fused(report), _not_fused(other)),
    }
    changes = {about: list(_changes(*pair)) for about, pair in pairs.items()}
    return Difference({about: those for about, those in changes.items() if those})


def _changes(before: Facts, after: Facts) -> Iterator[Change]:
    for name in {**before, **after}:
        change = Change(name, before.get(name, ""), after.get(name, ""))
        # in texts of several lines, values that differ only in their number are the same
        if change.before != change.after and (change.lines or "\n" not in change.before):
            yield change


def _segments(report: ReportData, other: ReportData) -> Iterator[tuple[str, tuple[Facts, Facts]]]:
    """The facts of segments that both reports have, and of those that one has, by their names."""
    timed = not (report.void or other.void)
    before, after = ([(f, s) for f in r.fusions for s in f.segments] for r in (report, other))
    ops, others = ([s.ops for _, s in those] for those in (before, after))
    matcher = SequenceMatcher(a=ops, b=others, autojunk=False)
    for _, i, i1, j, j1 in matcher.get_opcodes():
        if i1 - i == j1 - j:
            for (f, a), (g, b) in zip(before[i:i1], after[j:j1], strict=True):
                facts = _facts(f, a), _facts(g, b)
                m, n = a.measured, b.measured
                if timed and m and n and (m.longest < n.shortest or n.longest < m.shortest):
                    facts[0]["time"], facts[1]["time"] = duration(m.seconds), duration(n.seconds)
                yield a.id if a.id == b.id else f"{a.id} -> {b.id}", facts
        else:
            yield from ((f"{s.id}, before", (_only(s), {})) for _, s in before[i:i1])
            yield from ((f"{s.id}, after", ({}, _only(s))) for _, s in after[j:j1])


def _only(s: SegmentReport) -> Facts:
    return {"operations": " ".join(s.ops)}


def _facts(fusion: FusionReport, s: SegmentReport) -> Facts:
    return {
        "occurs": count(fusion.times, "time"),
        "kind": s.kind,
        **_only(s),
        "inputs": ", ".join(s.inputs),
        "outputs": ", ".join(s.outputs),
        "flops": amount(s.flops),
        "read": amount(s.bytes_read, "B"),
        "written": amount(s.bytes_written, "B"),
        "avoided": amount(s.bytes_avoided, "B"),
        "begins because": s.boundary,
        "roundings dropped": ", ".join(s.roundings),
        "backend": f"{s.backend}: {s.backend_why}",
        "schedule": s.schedule,
        "launched": s.launched,
        "IR": s.ir,
        "source": s.source,
    }


def _asked(report: ReportData) -> Facts:
    return {
        "fusion_moe": report.version,
        "target": report.target,
        "runs here": "yes" if report.executed else "no",
        **report.options,
        "graphs": str(report.graphs),
        "calls": str(report.calls),
    }


def _fused(report: ReportData) -> Facts:
    shares = (("flops", report.flops, ""), ("bytes", report.bytes, "B"))
    return {
        **{
            name: f"{share}, {amount(share.fused, unit)} of {amount(share.total, unit)}"
            for name, share, unit in shares
        },
        "calls": str(report.fused_calls),
        "fusions": str(sum(f.times for f in report.fusions)),
    }


def _not_fused(report: ReportData) -> Facts:
    """The reasons of each operation."""
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for x in report.not_fused:
        reasons[x.op].append(f"{x.why} ({count(x.times, 'time')})")
    return {op: "; ".join(sorted(those)) for op, those in reasons.items()}
