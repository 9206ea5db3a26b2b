"""The run that users see: its data, and the forms in which it is shown, compared and saved."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ..errors import UnsupportedError, need
from ..messages import check_file, count, duration, ratio
from ..report.output import Document, Shown
from .data import KernelRun, RunData, merged, of_json
from .page import page
from .summary import summary
from .trace_events import trace_events

_NUMBERS = 46  # columns of a comparison beside names
_SAME = 0.01  # rows of a step that differ by less are the same work


class Run(Document):
    """A run that `fusion_moe.record` records. Inside of the block `step()` says where steps begin;
    after it, `data` has what was noted. name: the file that it was loaded from, else "".
    """

    name = ""
    _kind = "a run"
    _forms: ClassVar = {
        ".trace.json": lambda run: json.dumps(trace_events(run.data)),
        ".json": lambda run: run.data.to_json(),
        ".html": lambda run: page(run.data),
        ".txt": lambda run: f"{run.text(120)}\n",
    }

    def __init__(self, step: Callable[[], None] | None = None, data: RunData | None = None):
        self._step, self._data = step, data

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """The run that `save` wrote as JSON. OptionError for another file, and for none."""
        path = Path(path)
        check_file(path, "JSON that run.save wrote", "Run.load")
        run = cls(data=of_json(path.read_bytes(), str(path)))
        run.name = str(path)
        return run

    @classmethod
    def merged(cls, *ranks: Run) -> Run:
        """The runs of several ranks, in their order, as one: what each did, under its rank.
        OptionError for none, for others than runs, and for different numbers of steps.
        """
        for run in ranks:
            need(run, Run, expected="runs", todo="write Run.merged(*runs)", where="Run.merged")
        return cls(data=merged(run.data for run in ranks))

    @property
    def data(self) -> RunData:
        """What was noted. UnsupportedError before the run has ended."""
        if self._data is None:
            raise UnsupportedError(
                "a run that goes on", expected="its report after the block", where="record"
            )
        return self._data

    @data.setter
    def data(self, data: RunData) -> None:
        """Ends the run with what was noted of it."""
        self._step, self._data = None, data

    def step(self) -> None:
        """Says that a step begins: where graphs are replayed, which call no layer, or where steps
        are not calls of the first layer. UnsupportedError after the run.
        """
        if self._step is None:
            raise UnsupportedError("a step of a run that has ended", where="record")
        self._step()

    def compare(self, other: Run) -> Comparison:
        """What another run did differently. Kernels are paired by operations and sizes. OptionError
        for what is no run.
        """
        need(other, Run, expected="a run", todo="Run.load(path) reads one", where="compare")
        return Comparison(self.data, other.data, (self.name, other.name))

    def save(self, path: str | Path) -> None:
        """Writes events for Perfetto or chrome://tracing to a path that ends in .trace.json, else
        JSON to .json, a page to .html, the text to .txt; the file appears whole or not at all.

        OptionError for any other suffix.
        """
        self._save(path)

    def __repr__(self) -> str:
        done = f"{count(self.data.stepped, 'step')}" if self._data else "goes on"
        return f"<Run of fusion_moe.record: {done}>"

    def text(self, width: int) -> str:
        """The run on one screen, in at most `width` columns, 70 or more."""
        return summary(self.data, width)


@dataclass(frozen=True)
class Comparison(Shown):
    """Two runs, A and B, and what changed from one to the other. names: of their files, or ""."""

    before: RunData
    after: RunData
    names: tuple[str, str] = ("", "")

    @cached_property
    def changes(self) -> Sequence[tuple[str, str, str, str]]:
        """(name, before, after, a sentence or "") of what is compared; before or after is "" for
        what only the other run has.
        """
        return tuple(_changes(self.before, self.after))

    def to_json(self) -> str:
        """Schema fusion_moe.compare/1: `changes`, each with name, before, after and a sentence."""
        rows = [
            dict(zip(("name", "before", "after", "said"), c, strict=True)) for c in self.changes
        ]
        return json.dumps({"schema": "fusion_moe.compare/1", "changes": rows}, indent=1)

    def text(self, width: int) -> str:
        """A line for each."""
        lines = ["fusion_moe.record"]
        for letter, name, run in zip("AB", self.names, (self.before, self.after), strict=True):
            text = ", ".join(filter(None, (name, run.of, run.target, run.made, run.where)))
            lines.append(f"  {letter}  {textwrap.shorten(text, width - 5, placeholder=' ...')}")
            if run.void:
                note = f"! times of {letter} are void: {run.void}"
                lines += textwrap.wrap(note, width, subsequent_indent="  ")
        lines.append("")
        room = min(width - _NUMBERS, max(len(name) for name, *_ in self.changes))
        for name, before, after, text in self.changes:
            short = textwrap.shorten(name, room, placeholder=" ...")
            lines.append(f"  {short:<{room}}{before:>10} -> {after:<10}{text}".rstrip())
        return "\n".join(lines)


def _changes(before: RunData, after: RunData) -> Iterator[tuple[str, str, str, str]]:
    void = bool(before.void or after.void)
    rows = before.step_rows, after.step_rows
    other = "for other rows" if max(rows) > (1 + _SAME) * min(rows) else ""
    yield _times("step", before.step, after.step, "times are void" if void else other)
    yield "rows of a step", ratio(rows[0]), ratio(rows[1]), ""
    yield "rows of experts", f"{before.rows:,}", f"{after.rows:,}", ""
    yield "busiest expert over average", _imbalance(before), _imbalance(after), ""
    if before.hit_rate is not None and after.hit_rate is not None:
        yield "slots that hit", f"{before.hit_rate:.1%}", f"{after.hit_rate:.1%}", ""
    if before.window and after.window:
        idle, was = after.idle / after.window, before.idle / before.window
        yield "nothing ran", f"{was:.0%}", f"{idle:.0%}", ""
    if before.stalls or after.stalls:
        yield "compiling", _compiling(before), _compiling(after), ""
    others = defaultdict[str, list[KernelRun]](list)
    for k in after.kernels:
        others[_kernel(k)].append(k)
    alone = list[KernelRun]()
    for k in before.kernels:
        if same := others[_kernel(k)]:
            why = "times are void" if void else ""
            yield _times(_kernel(k), k.seconds, same.pop(0).seconds, why)
        else:
            alone.append(k)
    yield from ((_kernel(k), duration(k.seconds), "", "only in A") for k in alone)
    left = (k for those in others.values() for k in those)
    yield from ((_kernel(k), "", duration(k.seconds), "only in B") for k in left)


def _kernel(k: KernelRun) -> str:
    """Its work: what is equal in two runs."""
    sizes = [f"{name} = {n}" for name, n in k.sizes.items()]
    return f"{', '.join([f'rank {k.rank}', *sizes] if k.rank else sizes)}: {k.ops}"


def _imbalance(run: RunData) -> str:
    return ratio(max((layer.imbalance for layer in run.layers), default=1.0))


def _compiling(run: RunData) -> str:
    return duration(sum(s.seconds for s in run.stalls))


def _times(
    name: str, before: float | None, after: float | None, why: str
) -> tuple[str, str, str, str]:
    """why: they say nothing about each other, or ""."""
    text = f"{ratio(before / after)}x as fast" if before and after else ""
    was, now = (duration(s) if s else "?" for s in (before, after))
    return name, was, now, why or text
