"""The summary of a run: text for a terminal, and sentences that its page has too."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from ..messages import amount, count, duration, ratio
from .data import KernelRun, RunData

KERNELS, _GAPS = 12, 4  # that are shown


def summary(run: RunData, width: int) -> str:
    """Text of at most `width` columns."""
    title = f"fusion_moe.record: {run.of} on {run.target}"
    parts = [
        [title, f"  {', '.join(filter(None, (run.made, run.where)))}"],
        ["run", *(f"  {name:<16}{text}" for name, text in facts(run))],
        [
            line
            for message in notes(run)
            for line in textwrap.wrap(message, width, initial_indent="! ")
        ],
        list(_kernels(run, width)),
        list(_gaps(run, width)),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def facts(run: RunData) -> Iterator[tuple[str, str]]:
    """(name, sentence) of what is true of the run as a whole."""
    ranks = f" on {run.ranks} ranks" if run.ranks > 1 else ""
    yield "time", f"{duration(run.seconds)}{ranks}"
    if run.step:
        spread = f"{duration(min(run.steps))} to {duration(max(run.steps))}"
        median = "" if run.void else f", the median takes {duration(run.step)}"
        yield "steps", f"{run.stepped:,}{median}; {spread}"
    yield "counted", f"{count(run.depth, 'layer')}, {count(run.rows, 'row')} of experts"
    if run.layers:
        worst = max(run.layers, key=lambda layer: layer.imbalance)
        where = f"{worst.name}, rank {worst.rank}" if ranks else worst.name
        yield "busiest expert", f"{ratio(worst.imbalance)} times the average, in {where}"
    if run.hit_rate is not None:
        copied = sum(layer.offloaded.get("bytes_copied", 0) for layer in run.layers)
        yield "offloaded", f"{run.hit_rate:.0%} of slots hit, {amount(copied, 'B')} copied"
    if run.stalls:
        seconds = sum(s.seconds for s in run.stalls)
        yield "compiling", f"{count(len(run.stalls), 'time')}, {duration(seconds)} in all"


def notes(run: RunData) -> Iterator[str]:
    """What to know before the rest."""
    if run.void:
        yield f"times are void: {run.void}"
    if not (run.layers or run.missed):
        yield "no layer of this model was called inside the block: was it another object that ran?"
    if run.missed:
        yield (
            f"calls of {count(run.missed, 'weight')} that the model does not have, or copied, "
            "were not counted"
        )


def _kernels(run: RunData, width: int) -> Iterator[str]:
    yield f"kernels: {run.profiled}"
    whole = sum(k.whole for k in run.kernels)
    kernels = sorted(run.kernels, key=lambda k: -k.whole)
    names = called(kernels)[:KERNELS]
    across = max(map(len, [*names, "program0.0  "]))
    for k, name in zip(kernels, names, strict=False):
        text = f"{k.whole / whole:>5.0%}{duration(k.seconds):>10}  {against(k, run):<21}"
        head = f"  {name:<{across}}  "
        room = max(width - len(head) - len(text), 12)
        ops = textwrap.shorten(k.ops, room - 1, placeholder=" ...")
        yield f"{head}{ops:<{room}}{text}".rstrip()


def called(kernels: Sequence[KernelRun]) -> list[str]:
    """A label for each kernel: its name, with the values of size symbols behind it ("name, s0 = 8")
    if the same kernel ran at several sizes.
    """
    times = Counter((k.name, k.rank) for k in kernels)
    return [
        ", ".join([k.name, *(f"{n} = {size}" for n, size in k.sizes.items())])
        if times[k.name, k.rank] > 1
        else k.name
        for k in kernels
    ]


def against(kernel: KernelRun, run: RunData) -> str:
    """A kernel's time over its floor, and what that is of; of void times, their spread."""
    if run.void:
        return f"{duration(kernel.shortest)} to {duration(kernel.longest)}"
    return f"{ratio(kernel.seconds / kernel.floor)} x {kernel.bound}"


def _gaps(run: RunData, width: int) -> Iterator[str]:
    if run.window:
        yield f"nothing ran for {run.idle / run.window:.0%} of {duration(run.window)}; the longest"
    for gap in run.gaps[:_GAPS]:
        text = textwrap.shorten(gap.name, width - 14, placeholder=" ...")
        yield f"  {duration(gap.seconds):<10}{text}"
