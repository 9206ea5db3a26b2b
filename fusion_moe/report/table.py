"""The report as text: the same for the same model, whatever the machine, the folder and the time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from .data import FusionReport, Report, SegmentReport

WIDTH = 120
_HEAD = ("segment", "kind", "operations", "flops", "read", "written", "avoided")
_OPERATIONS = 52


def table(report: Report) -> str:
    """The whole report."""
    parts = [_title(report)]
    if report.fusions:
        parts += [
            _rows(report),
            _section("where from", _sources(report)),
            _section("types", _types(report)),
            _section("cuts", _cuts(report)),
        ]
        parts += [_section("roundings dropped", _roundings(report)), _section("backends", _backends(report))]
    parts.append(_section("not fused", _left(report)))
    parts.append(_legend() if report.fusions else _nothing())
    return "\n\n".join(p for p in parts if p)


def _title(report: Report) -> str:
    fusions = sum(f.times for f in report.fusions)
    segments = sum(len(f.segments) * f.times for f in report.fusions)
    where = report.target if report.executed else f"{report.target} (emitted, unexecuted)"
    what = f"{_count(report.graphs, 'graph')}, {_count(fusions, 'fusion')} with {_count(segments, 'segment')} for {where}"
    return f"fusion_moe.explain: {what}; {report.fused_calls} of {_count(report.calls, 'call')} in fusions"


def _rows(report: Report) -> str:
    lines = [_line(*_HEAD)]
    for fusion in report.fusions:
        for segment in fusion.segments:
            lines += _row(segment)
        if fusion.times > 1:
            lines.append(f"{fusion.id} stands {fusion.times} times in the model")
    return "\n".join(lines)


def _row(s: SegmentReport) -> Iterator[str]:
    first, *rest = textwrap.wrap(" ".join(s.ops), _OPERATIONS) or [""]
    numbers = (f"{amount(s.flops)}", *(f"{amount(n)}B" for n in (s.bytes_read, s.bytes_written, s.bytes_avoided)))
    yield _line(s.id, s.kind, first, *numbers)
    yield from (f"{'':26}{line}" for line in rest)


def _line(id: str, kind: str, ops: str, *numbers: str) -> str:
    return f"{id:<12}{kind:<14}{ops:<{_OPERATIONS + 2}}{''.join(f'{n:>10}' for n in numbers)}".rstrip()


def _sources(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, source) for s in _segments(report) for source in s.sources)


def _types(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, f"{', '.join(s.inputs)} -> {', '.join(s.outputs)}") for s in _segments(report))


def _cuts(report: Report) -> Iterable[tuple[str, str]]:
    return ((f"{before.id} | {s.id.rsplit('.', 1)[1]}", s.why) for f in report.fusions for before, s in _pairs(f) if s.why)


def _pairs(fusion: FusionReport) -> Iterable[tuple[SegmentReport, SegmentReport]]:
    return zip(fusion.segments, fusion.segments[1:], strict=False)


def _roundings(report: Report) -> Iterable[tuple[str, str]]:
    return ((s.id, ", ".join(s.roundings)) for s in _segments(report) if s.roundings)


def _backends(report: Report) -> Iterable[tuple[str, str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for s in _segments(report):
        found.setdefault((s.backend, s.backend_why), []).append(s.id)
    return ((backend, f"{why} ({_count(len(ids), 'segment')})") for (backend, why), ids in found.items())


def _left(report: Report) -> Iterable[tuple[str, str]]:
    for x in report.left:
        times = f" ({x.times} times)" if x.times > 1 else ""
        yield x.op, f"{x.why}{times}{' at ' + x.source if x.source else ''}"


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = []
    for name, said in rows:
        first, *rest = textwrap.wrap(said, WIDTH - 30, break_long_words=False) or [""]
        lines.append(f"  {name:<26}  {first}" if len(name) <= 26 else f"  {name}\n{'':30}{first}")
        lines += [f"{'':30}{line}" for line in rest]
    return "\n".join([title, *lines]) if lines else ""


def _legend() -> str:
    return textwrap.fill(
        "flops, and bytes read and written, are for one call with these sizes; of grouped weights, at most as many groups are read as "
        "there are rows. avoided: what separate kernels would have written and read between the operations.",
        WIDTH,
    )


def _nothing() -> str:
    return "nothing was fused: no call in these graphs has a translator that makes a grouped product"


def _segments(report: Report) -> Iterator[SegmentReport]:
    for fusion in report.fusions:
        yield from fusion.segments


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def amount(n: int) -> str:
    """1234567 -> "1.23 M"."""
    size = float(n)
    for unit in ("", "k", "M", "G"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit else f"{n} "
        size /= 1000
    return f"{size:.3g} T"
