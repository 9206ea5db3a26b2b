"""What a run did, as data: frozen, and as JSON.

JSON, schema "fusion_moe.record/1": the fields of the classes below under their names, and `schema`
itself. Times are in seconds; `start` counts from the beginning of the run. `rank` is 0 without
torch.distributed. Nothing in it says what tokens stand for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from ..errors import OptionError
from ..messages import count
from ..report.data import Machine

SCHEMA = "fusion_moe.record/1"


@dataclass(frozen=True)
class LayerRun:
    """The experts of a layer. rows: of each expert, that is, tokens that chose it, over all calls;
    over_time: the same of the last calls, `each` of them together, in order.

    offloaded: the counters of an offloaded layer (`fusion_moe.offload.counters`); else empty.
    """

    name: str
    calls: int
    rows: Sequence[int]
    over_time: Sequence[Sequence[int]] = ()
    each: int = 1
    offloaded: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0

    @property
    def imbalance(self) -> float:
        """Rows of the busiest expert over those of an average one."""
        return max(self.rows) * len(self.rows) / total if (total := sum(self.rows)) else 1.0

    @property
    def hit_rate(self) -> float | None:
        """The share of slots whose expert was on the device, of an offloaded layer."""
        return _hit_rate([self])


def _hit_rate(layers: Sequence[LayerRun]) -> float | None:
    hits, misses = (
        sum(layer.offloaded.get(name, 0) for layer in layers) for name in ("hits", "misses")
    )
    return hits / (hits + misses) if hits + misses else None


@dataclass(frozen=True)
class KernelRun:
    """A kernel in the profiled steps, on calls of equal sizes. seconds: of a call, the median;
    whole: of all calls.

    reading, multiplying, launching: the least time for each on this machine, for the groups that
    had rows; null if unknown. sources: lines of the user's program, of compiled graphs.
    """

    name: str
    ops: str
    sizes: Mapping[str, int]
    layers: Sequence[str]
    calls: int
    seconds: float
    shortest: float
    longest: float
    whole: float
    flops: int
    bytes_read: int
    reading: float
    multiplying: float
    launching: float
    sources: Sequence[str] = ()
    rank: int = 0

    @property
    def floor(self) -> float:
        """The least time of a call."""
        return max(self.reading, self.multiplying, self.launching)

    @property
    def bound(self) -> str:
        """What the floor is of."""
        floors = ("reading", "multiplying", "launching")
        return max(floors, key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Span:
    """Something that took time. track: where it is shown."""

    name: str
    track: str
    start: float
    seconds: float
    rank: int = 0


@dataclass(frozen=True)
class RunData:
    """What `record` noted. stepped: how many steps there were; begun: when the last ones of them
    began; seconds: of the whole run.

    profiled: which steps, as a sentence, or why none; window, idle: how long they took, and of that
    how long nothing ran, on the GPU or, on a CPU, in torch's operations; gaps: the longest such
    times, from what to what; spans: what ran; tiles: of multiprocessors. stalls: what was compiled
    during the run. missed: weights that are no layer's, whose calls were not counted. machine: the
    CPU, and how often it was taken away in the profiled steps; None without them, and on GPUs.
    """

    layers: Sequence[LayerRun]
    kernels: Sequence[KernelRun]
    stalls: Sequence[Span]
    stepped: int
    begun: Sequence[float]
    seconds: float
    profiled: str
    window: float = 0.0
    idle: float = 0.0
    gaps: Sequence[Span] = ()
    spans: Sequence[Span] = ()
    tiles: Sequence[Span] = ()
    missed: int = 0
    made: str = ""
    where: str = ""
    target: str = ""
    version: str = ""
    of: str = ""
    ranks: int = 1
    machine: Machine | None = None

    @property
    def void(self) -> str:
        """Why times mean nothing, as a sentence; "" if they do."""
        return self.machine.busy if self.machine else ""

    @property
    def depth(self) -> int:
        """How many layers there are, on whatever ranks."""
        return len({layer.name for layer in self.layers})

    @property
    def step_rows(self) -> float:
        """Rows of a step: of the median one where a step is a call, else of the average one."""
        return sum(
            median(map(sum, layer.over_time)) / layer.each
            if layer.over_time and layer.calls == self.stepped
            else sum(layer.rows) / (self.stepped or 1)
            for layer in self.layers
        )

    @property
    def rows(self) -> int:
        """Rows of all experts of all layers: tokens times experts of a token, for each layer."""
        return sum(sum(layer.rows) for layer in self.layers)

    @property
    def steps(self) -> list[float]:
        """The time of each step but the last."""
        return [b - a for a, b in pairwise(self.begun)]

    @property
    def step(self) -> float | None:
        """The median time of a step."""
        return median(self.steps) if self.steps else None

    @property
    def hit_rate(self) -> float | None:
        """Of all offloaded layers; None without one."""
        return _hit_rate(self.layers)

    def to_json(self) -> str:
        """The head of this file describes the schema."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})


_PARTS: Mapping[str, Any] = {
    "layers": LayerRun,
    "kernels": KernelRun,
    **dict.fromkeys(("stalls", "gaps", "spans", "tiles"), Span),
}


def of_json(text: str | bytes, where: str) -> RunData:
    """What `to_json` wrote. OptionError for anything else."""
    try:
        loads = json.loads(text)
    except ValueError:
        loads = None
    fields: dict[str, Any] = loads if isinstance(loads, dict) else {}
    schema = "events for Perfetto" if "traceEvents" in fields else fields.pop("schema", "no schema")
    try:
        if schema == SCHEMA:
            parts = {n: tuple(of(**part) for part in fields[n]) for n, of in _PARTS.items()}
            machine = Machine(**fields["machine"]) if fields.get("machine") else None
            return RunData(**{**fields, **parts, "machine": machine})
    except (KeyError, TypeError):
        schema = f"{SCHEMA}, but without its fields"
    raise OptionError(
        f"a file with {schema}",
        expected=f"JSON of {SCHEMA}",
        todo="run.save('run.json') writes it",
        where=where,
    )


def merged(runs: Iterable[RunData]) -> RunData:
    """The runs of several ranks as one: everything of each, under its rank. Steps are those of the
    slowest rank. OptionError for none, and for different numbers of steps.
    """
    results = tuple(runs)
    if len({run.stepped for run in results}) != 1:
        steps = (f"rank {r} with {count(run.stepped, 'step')}" for r, run in enumerate(results))
        raise OptionError(
            ", ".join(steps) or "no run",
            expected="one run, as each rank saw it",
            where="Run.merged",
        )
    ranked: dict[str, Any] = {
        name: tuple(replace(x, rank=r) for r, run in enumerate(results) for x in getattr(run, name))
        for name in _PARTS
    }
    slowest = max(results, key=lambda run: run.step or 0)
    return replace(
        slowest,
        **ranked,
        seconds=max(run.seconds for run in results),
        missed=sum(run.missed for run in results),
        ranks=len(results),
        machine=next((run.machine for run in results if run.void), slowest.machine),
    )
