"""The report as data: frozen, printable, and as JSON.

JSON, schema "fusion_moe.explain/12": the fields of the classes below under their names, with lists
for tuples, and `schema` itself. Sizes are in bytes,
flops in operations, times in seconds, all for one call with the sizes of the example; null if a
size is known only to the device. `times` says how often the model has a fusion, or a call that was
not fused. `measured` and `machine` are null, and `loads` is empty, if they were not requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from ..errors import OptionError

SCHEMA = "fusion_moe.explain/12"
_ALONE = 0.7  # a share of a machine's bandwidth: below it, something else is reading memory too


@dataclass(frozen=True)
class Measured:
    """The time of a kernel or a program on the arguments of the call. seconds: the median of
    several runs; shortest, longest: the extremes.

    bytes_read: the bytes of its inputs, of weights only those of groups that have rows; floor: the
    time that the machine takes to read them.
    """

    seconds: float
    shortest: float
    longest: float
    bytes_read: int
    floor: float


@dataclass(frozen=True)
class Machine:
    """The machine that was measured. isa_level: the CPU instructions that C++ kernels use; ""
    without such kernels.

    bytes_per_second: the speed of reading memory with this many threads, measured once on
    this machine; now: the same, measured for this report; read_by: what did the reading, and where
    the value is from. Floors use the faster of the two. repeats: runs of each kernel; preemptions:
    how often it was preempted meanwhile. weight_bytes: of the weights that the programs read, and
    how many of them lie on large pages. gpu: the GPU's name if CUDA events measured the times; then
    bandwidths are as specified. "": the times are the CPU's.
    """

    cpu: str
    cpus: int
    threads: int
    repeats: int
    preemptions: int
    bytes_per_second: float
    now: float
    read_by: str
    isa_level: str = ""
    weight_bytes: int = 0
    weight_bytes_on_large_pages: int = 0
    gpu: str = ""

    @property
    def busy(self) -> str:
        """Why the times mean nothing, as a sentence; "" if other programs left the machine
        alone.
        """
        reasons = []
        if self.preemptions >= self.repeats:
            reasons.append(f"other programs took the CPU away {self.preemptions} times")
        if self.now < _ALONE * self.bytes_per_second:
            speed = self.now / self.bytes_per_second
            reasons.append(f"memory was read at {speed:.0%} of this machine's speed")
        if not reasons:
            return ""
        return (
            f"this machine was busy: {', and '.join(reasons)}; measure again when nothing else runs"
        )


@dataclass(frozen=True)
class Load:
    """The rows of each group (expert) in one run of a program. partition: the name that the
    program's types have for it.
    """

    partition: str
    rows: tuple[int, ...]

    @property
    def empty(self) -> int:
        """How many groups have no rows."""
        return self.rows.count(0)


@dataclass(frozen=True)
class SegmentReport:
    """One kernel. ir: its program; source: its code. after: the segments that it reads from;
    boundary: why it is not one with them; roundings: the casts that are left out.

    layouts: of weights that are not in the target's layout, and what `prepare_` does about it.
    launched: CUDA's kernels for these sizes, in order, and the segments with which they are
    chained.
    """

    id: str
    kind: str
    ops: tuple[str, ...]
    sources: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int | None
    bytes_read: int | None
    bytes_written: int | None
    bytes_avoided: int | None
    roundings: tuple[str, ...]
    schedule: str
    backend: str
    backend_why: str
    after: tuple[str, ...]
    boundary: str
    ir: str
    source: str
    layouts: tuple[tuple[str, str], ...] = ()
    launched: str = ""
    measured: Measured | None = None

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each byte read or written."""
        moved = total((self.bytes_read, self.bytes_written))
        return None if self.flops is None or moved is None else self.flops / max(moved, 1)


@dataclass(frozen=True)
class FusionReport:
    """One region of the model that became one program. programs: the translated program, and what
    each pass makes of it.

    sizes: those that the program leaves open, from the call. measured: all of its kernels in one
    call, at the first place where the program ran; unfused: the same with a kernel for each
    operation; bf16: torch's products of the same rows by the weights in bf16, and nothing else;
    loads: in the order of the runs. gpu: the GPU
    for which CUDA's kernels are chosen; choice: what is launched there; workspace: bytes that a
    call allocates for it in addition to its results. Without such kernels these are "" and null.
    made_by: the segment of each output.

    For a backward pass, made_again: the operations that read no gradient, that is, values that the
    forward computed but did not save, and factors of derivatives; rewritten: derivatives that are
    not the operations' own and round elsewhere.
    """

    id: str
    times: int
    sizes: Mapping[str, int]
    segments: tuple[SegmentReport, ...]
    programs: Mapping[str, str]
    measured: Measured | None = None
    unfused: Measured | None = None
    bf16: Measured | None = None
    loads: tuple[Load, ...] = ()
    gpu: str = ""
    choice: str = ""
    workspace: int | None = None
    made_by: tuple[str, ...] = ()
    backward: bool = False
    made_again: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()

    @property
    def stages(self) -> Mapping[str, str]:
        """By name, from the translated program to the kernels' sources."""
        chosen = {"choice": self.choice} if self.choice else {}
        return {
            **self.programs,
            "segments": "\n\n".join(f"# {s.id}: {s.kind}\n{s.ir}" for s in self.segments),
            "schedules": "\n".join(f"{s.id}: {s.schedule}" for s in self.segments),
            **chosen,
            "source": "\n\n".join(f"# {s.id}: {s.backend}\n{s.source}" for s in self.segments),
        }


@dataclass(frozen=True)
class NotFusedReport:
    """A call that was not fused. broken: its translator is at fault."""

    op: str
    source: str
    why: str
    times: int
    broken: bool = False


@dataclass(frozen=True)
class TensorReport:
    """A tensor that the forward pass keeps for the backward, or the gradient of an input.

    made_by: a segment or an operation; "" for an input, which is not copied, and for a gradient of
    the results itself.
    """

    name: str
    type: str
    bytes: int | None
    made_by: str


@dataclass(frozen=True)
class Listing:
    """A function of the user's program: its file name, the number of its first line, its text."""

    file: str
    first_line: int
    text: str


@dataclass(frozen=True)
class Share:
    """How much of a cost is in fusions, and how much in calls outside of them; None if a size is
    known only on the device.
    """

    fused: int | None
    unfused: int | None

    @property
    def total(self) -> int | None:
        """The sum of both shares."""
        return total((self.fused, self.unfused))

    def __str__(self) -> str:
        """Percent; "100%" and "0%" are exact."""
        if not self.total:
            return "?"
        percent = 100 * (self.fused or 0) / self.total
        return f"{percent if percent in (0, 100) else min(max(percent, 0.1), 99.9):.3g}%"


@dataclass(frozen=True)
class ReportData:
    """What `explain` found. calls: operations in the graphs; fused_calls: how many of them are
    in fusions.

    unfused_flops, unfused_bytes: of the other calls, as if each were a kernel of its own; null if a
    size is known only on the device. chosen_by_sizes: those of them for which torch chooses among
    kernels by sizes, so that a row's bits may depend on its batch.

    executed: whether programs for the target can run on the device of the call's tensors;
    custom_ops: operations in the graphs that are neither torch's nor translated; machine: where
    times were measured, if they were; saved, gradients: for a training step; float_experts: the
    names of expert weights that operations other than ours compute with in floating point;
    requantized: what requantizing experts to FP8 rounded, and what packages say of the modules, or
    ""; version, options: of fusion_moe, those that change what is compiled; listings: the functions
    of `sources`; of: what was called with which tensors; advice: what to do next, sentences; made,
    where: when, and the processor or GPU of this machine.
    """

    target: str
    executed: bool
    graphs: int
    calls: int
    fused_calls: int
    fusions: tuple[FusionReport, ...]
    not_fused: tuple[NotFusedReport, ...]
    custom_ops: tuple[str, ...] = ()
    machine: Machine | None = None
    saved: tuple[TensorReport, ...] = ()
    gradients: tuple[TensorReport, ...] = ()
    float_experts: tuple[str, ...] = ()
    requantized: str = ""
    unfused_flops: int | None = None
    unfused_bytes: int | None = None
    chosen_by_sizes: tuple[str, ...] = ()
    version: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    listings: tuple[Listing, ...] = ()
    of: str = field(default="", compare=False)
    advice: tuple[str, ...] = field(default=(), compare=False)
    made: str = field(default="", compare=False)
    where: str = field(default="", compare=False)

    @property
    def call_seconds(self) -> Mapping[str, float]:
        """How long the programs of a call take: "here"; and "unfused" and "bf16", explained at
        FusionReport, if these were measured for all programs. Empty if times are void or not
        measured.
        """
        ways = (
            ("here", [f.measured for f in self.fusions]),
            ("unfused", [f.unfused for f in self.fusions]),
            ("bf16", [f.bf16 for f in self.fusions]),
        )
        return {
            way: sum(m.seconds * f.times for m, f in zip(result, self.fusions, strict=True) if m)
            for way, result in ways
            if result and all(result) and not self.void
        }

    @property
    def time_shares(self) -> Mapping[str, float]:
        """By segment: the share of its kernel, wherever it runs, of the time of all kernels."""
        seconds = {
            s.id: s.measured.seconds * f.times
            for f in self.fusions
            for s in f.segments
            if s.measured and not self.void
        }
        whole = sum(seconds.values())
        return {id: one / whole for id, one in seconds.items()} if whole else {}

    @property
    def void(self) -> str:
        """Why the report's times mean nothing, as a sentence; "" if they are valid or nothing was
        measured.
        """
        return self.machine.busy if self.machine else ""

    @property
    def segments(self) -> tuple[SegmentReport, ...]:
        """The segments of all fusions, each once."""
        return tuple(s for f in self.fusions for s in f.segments)

    @property
    def flops(self) -> Share:
        """The floating-point operations of all segments."""
        return Share(self._sum(lambda s: s.flops), self.unfused_flops)

    @property
    def bytes(self) -> Share:
        """Bytes that are read and written if each call is a kernel of its own. Bytes that fusing
        avoids count as fused.
        """
        moved = self._sum(lambda s: total((s.bytes_read, s.bytes_written, s.bytes_avoided)))
        return Share(moved, self.unfused_bytes)

    def _sum(self, cost: Callable[[SegmentReport], int | None]) -> int | None:
        return total(cost(s) for f in self.fusions for s in f.segments for _ in range(f.times))

    @property
    def stages(self) -> tuple[str, ...]:
        """The stage names that `stage` takes."""
        return tuple(self.fusions[0].stages) if self.fusions else ()

    def fusion(self, id: str) -> FusionReport:
        """The report of the fusion with an id."""
        fusions = {f.id: f for f in self.fusions}
        if id not in fusions:
            known = ", ".join(fusions) or "none: nothing was fused"
            raise OptionError(f"no fusion named {id!r}", expected=f"one of {known}")
        return fusions[id]

    def stage(self, name: str, fusion: str = "fusion0") -> str:
        """The text of one stage of a fusion."""
        texts = self.fusion(fusion).stages
        if name not in texts:
            raise OptionError(f"no stage named {name!r}", expected=f"one of {', '.join(texts)}")
        return texts[name]

    def to_json(self) -> str:
        """The report as JSON; the head of this file describes the schema."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @property
    def why_nothing(self) -> str:
        """Why there are no fusions, if there are none."""
        if not self.graphs:
            no_call = "" if self.not_fused else ", which calls no operation of torch"
            return f"no graph was captured from this call{no_call}"
        names = ", ".join(self.custom_ops)
        without = f" (without a translator: {names})" if names else ""
        return f"no call makes a grouped product that can join others{without}"


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if a number is None."""
    known = list(numbers)
    return None if None in known else sum(n or 0 for n in known)
