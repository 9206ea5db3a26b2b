"""record: notes what a run does while it goes on, and reports it at its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch._dynamo.callback import callback_handler
from torch.profiler import ProfilerActivity, profile as Profiler

from .. import __version__, plugins
from ..errors import OptionError, UnsupportedError, need
from ..messages import count
from ..nn.local import local
from ..report.measure import ends_of, preemptions, this_cpu
from ..runtime import cuda, native, recording
from ..runtime.host_memory import bandwidth
from ..runtime.program import Program
from . import counts, tiles
from .counts import COUNTED, IGNORED, OF_PYTHON, Counted, Counts
from .data import LayerRun, RunData, Span
from .profiled import NOTHING, Launched, Profile
from .result import Run

_BUCKETS = 64  # of the rows of a layer over time
_GAPS = 8
_FIRST = range(2, 4)
_Sizes = Mapping[str, int]


@contextmanager
def record(model: nn.Module, *, profile: Sequence[int] = _FIRST) -> Iterator[Run]:
    """Records what a model does inside the block: `generate`, steps of training, a server.

    Rows of each expert are counted by the launches themselves, also by those of CUDA graphs that
    are captured inside the block. Nothing waits for the GPU until the end. A graph that was
    captured before is not seen.

    Args:
        model: whose layers to record, compiled or not: their experts' weights are parameters or
            buffers of three dimensions. Only calls of its programs count.
        profile: the steps, from 0 on, that torch's profiler watches, for the times of kernels and
            what is between them; an empty one: none. These take longer. A step begins with a call
            of the first layer, or where `run.step()` says.

    Yields:
        The run, whose report is complete after the block.

    Raises:
        UnsupportedError: for a model without such weights, and inside of another `record`.
        OptionError: for what is no module, and for steps that do not follow each other.
    """
    steps = _in_a_row(profile)
    need(model, nn.Module, expected="a model, that is, an nn.Module", where="record")
    if recording.active is not None:
        raise UnsupportedError("a record inside of a record", expected="one", where="record")
    recorder = _Recorder(model, steps)
    run = Run(recorder.step)
    with recorder.watching():
        yield run
    run.data = recorder.data()


def _in_a_row(profile: Sequence[int]) -> list[int]:
    with suppress(TypeError):
        steps = [index(step) for step in profile]
        first = steps[0] if steps else 0
        if first >= 0 and steps == [*range(first, first + len(steps))]:
            return steps
    raise OptionError(
        f"profile = {profile!r}", expected="steps in a row, such as range(2, 4)", where="record"
    )


class _Recorder:
    """What `record` sets as the recorder of all launches.

    layers: the name of a module by the address of its first weight, and "" by those of all others;
    counts: by these names, but those in `before`, which something else counts. first: the address
    with which a step begins.
    """

    def __init__(self, model: nn.Module, steps: Sequence[int]):
        self.model, self.steps = model, steps
        self.layers: dict[int, str] = {}
        self.counts: dict[str, Counts] = {}
        self.watches = bool(steps)  # whether steps to be profiled are still to come
        self.first: int | None = None
        self.last: int | None = None
        self.marks, self.marked, self.missed = list[float](), False, 0
        self.stalls: list[Span] = []
        self.noted = list[Launched]()  # while the profiler runs
        self.captured = list[Launched]()
        self.profiler: Profiler | None = None
        self.profile, self.preempted, self.why_none = NOTHING, 0, ""
        self._lock = threading.RLock()
        self.before = self._counted_elsewhere()
        why = _why_not(model)
        if not why:
            self._find_layers()
            why = "" if any(self.layers.values()) else "no weights of experts"
        if why:
            raise UnsupportedError(
                f"a {type(model).__name__} with {why}",
                expected="experts as parameters or buffers [experts, ...] that stay where they are",
                where="record",
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, launches and compilers tell this recorder what they do."""
        compiling = list[float]()
        begun: Callable[..., None] = lambda _: compiling.append(time.time())  # noqa: E731

        def ended(args: Any) -> None:
            if compiling:
                began = compiling.pop()
                name = f"torch.compile: {args.callback_trigger.name.lower()}"
                self.compiled(name, began, time.time() - began)

        callback_handler.register_start_callback(begun)
        callback_handler.register_end_callback(ended)
        self.start, recording.active = time.time(), self
        self._publish()
        try:
            yield
        finally:
            recording.active = None
            native.record(None)
            callback_handler.remove_start_callback(begun)
            callback_handler.remove_end_callback(ended)
            self._stop()
            self.seconds = time.time() - self.start

    # While it runs --------------------------------------------------------------------------------

    def compiled(self, name: str, start: float, seconds: float) -> None:
        """As of a Recorder."""
        self.stalls.append(Span(name, "compiling", start - self.start, seconds))

    def step(self) -> None:
        """A step begins here."""
        if not self.marked:
            self.marks, self.marked = [], True
        self._begin_step()

    def launched(
        self, program: Program, tensors: Sequence[Tensor], sizes: _Sizes, ends: Tensor | None
    ) -> None:
        """As of a Recorder."""
        with self._lock:
            address = tensors[program.weight].data_ptr() if program.weight >= 0 else 0
            name = self._name_of(address)
            # a backward may compute the forward again
            if address and torch._C._current_graph_task_id() == -1:
                # offloaded experts are called several times in a step
                again, self.last = bool(self.before) and address == self.last, address
                if name and name not in self.before:
                    result = _ends(program, tensors, sizes) if ends is None else ends
                    self._counts_of(name, result).add(result)
                if self.first is None:
                    self.first = address
                    self._publish()
                if address == self.first and not (self.marked or again or _capturing()):
                    self._begin_step()
            self._note(name, program, sizes)

    def _name_of(self, address: int) -> str:
        """ "" for weights of no layer, and for none."""
        if address and address not in self.layers:  # put into another order, or loaded
            self._find_layers()
            if address not in self.layers:
                self.layers[address] = ""
                self.missed += not self.before
            self._publish()
        return self.layers.get(address, "")

    def _counts_of(self, name: str, ends: Tensor) -> Counts:
        if name not in self.counts:
            self.counts[name] = Counts(len(ends), ends.device)
            self._publish()
        return self.counts[name]

    def _note(self, name: str, program: Program, sizes: _Sizes) -> None:
        if _capturing():
            self.captured.append(Launched(name, program, sizes))
        elif self.profiler:
            self.noted.append(Launched(name, program, sizes))

    def _begin_step(self) -> None:
        self.marks.append(time.time())
        if self.steps and len(self.marks) - 1 == self.steps[0]:
            self._profile()
        elif self.steps and len(self.marks) - 1 == self.steps[-1] + 1:
            self._stop()
            self.watches = False
            self._publish()

    def _profile(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:  # two would end each other
            self.why_none = "another profiler ran"
            return
        there = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            there.append(ProfilerActivity.CUDA)
        # of all threads, or none but the one in which it starts could stop it
        how = _ExperimentalConfig(profile_all_threads=True)
        self.profiler = Profiler(activities=there, acc_events=True, experimental_config=how)
        self.profiler.start()
        self.preempted = preemptions()
        tiles.clear()

    def _stop(self) -> None:
        if self.profiler:
            profiler, self.profiler = self.profiler, None
            self.preempted = preemptions() - self.preempted
            try:
                profiler.stop()
            except RuntimeError:  # before torch 2.11: another one began and ended meanwhile
                self.why_none = "another profiler ran"
                return
            self.profile = Profile.of(profiler, self.start, tiles.read())

    def _find_layers(self) -> None:
        """The first weight of each module is that of its first product."""
        for name, module in self.model.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            weights = [local(t) for t in own if t.dim() > 2]
            for i, t in enumerate(weights):
                known = "" if i else name.replace("_orig_mod.", "")
                self.layers.setdefault(t.data_ptr(), known)

    def _publish(self) -> None:
        def how(address: int, name: str) -> int:
            counts = self.counts.get(name)
            # Python sees where steps begin, and what graphs capture, while some may be profiled
            seen = address == self.first or (counts and counts.device.type == "cuda")
            if self.before or (self.watches and seen):  # before: slots of offloaded experts
                return OF_PYTHON
            return (COUNTED if counts else OF_PYTHON) if name else IGNORED

        layers = self.layers.items()
        counts.count({a: (how(a, name), self.counts.get(name)) for a, name in layers})

    def _counted_elsewhere(self) -> dict[str, Mapping[str, Any]]:
        return {name: of for ask in plugins.recorded for name, of in ask(self.model).items()}

    # At its end -----------------------------------------------------------------------------------

    def data(self) -> RunData:
        """All that was noted."""
        counted = {name: counts.read() for name, counts in self.counts.items()}
        layers = [_layer(name, of) for name, of in counted.items()]
        after = self._counted_elsewhere()
        layers += [_elsewhere(name, self.before[name], of) for name, of in after.items()]
        device = next((c.device for c in self.counts.values()), torch.device("cpu"))
        window, gaps = self.profile.window(device)
        kernels = self.profile.kernels(device, self.noted, self.captured, counted)
        first = next(iter(counted.values()), None)
        stepped = len(self.marks) if self.marked or first is None else first.calls
        return RunData(
            layers=layers,
            kernels=kernels,
            stalls=self.stalls,
            begun=self._begun(first),
            stepped=stepped,
            seconds=self.seconds,
            profiled=self._profiled(stepped),
            window=window,
            idle=sum(gap.seconds for gap in gaps),
            gaps=sorted(gaps, key=lambda gap: -gap.seconds)[:_GAPS],
            spans=self.profile.spans(device),
            tiles=self.profile.tile_spans(device),
            missed=self.missed,
            made=f"{datetime.now():%Y-%m-%d %H:%M}",
            where=torch.cuda.get_device_name() if device.type == "cuda" else bandwidth.cpu(),
            target=device.type,
            version=__version__,
            of=type(getattr(self.model, "_orig_mod", self.model)).__name__,
            machine=(
                this_cpu(max(k.calls for k in kernels), self.preempted)
                if kernels and device.type == "cpu"
                else None
            ),
        )

    def _begun(self, first: Counted | None) -> list[float]:
        """When steps began: where it was said, else by the last calls of the first layer. A GPU's
        clock is another one: the first of them begins with the run.
        """
        if self.marked or first is None or not first.calls:
            return [mark - self.start for mark in self.marks]
        zero = int(first.times[0]) if first.of_gpu else round(self.start * 1e9)
        return ((first.times - zero).double() / 1e9).tolist()

    def _profiled(self, stepped: int) -> str:
        if not self.steps:
            return "none was asked for"
        first, last = self.steps[0], self.steps[-1]
        asked = f"steps {first} to {last}" if first < last else f"step {first}"
        if self.profile.events:
            return asked
        of = f"of a run of {count(stepped, 'step')}"
        return f"none: {self.why_none or f'asked for {asked}, from 0 on, {of}'}"


def _why_not(model: nn.Module) -> str:
    """Weights that move between calls, but are known by their addresses here; "" if none do."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it was imported
    wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    if any(isinstance(module, wrappers) for module in model.modules()):
        return "weights that FSDP gathers for each call"
    loaded = any(p.is_meta and p.dim() > 2 for p in model.parameters())
    return "weights that are loaded for each call" if loaded else ""


def _ends(program: Program, tensors: Sequence[Tensor], sizes: _Sizes) -> Tensor:
    """i32[G]: computed again, where no array has them."""
    assert program.product is not None
    groups = program.product.values[2].type.ends
    assert groups is not None
    return ends_of(program.fusion, tensors, sizes)[groups.name]


def _layer(name: str, of: Counted) -> LayerRun:
    each = -(-len(of.rows) // _BUCKETS) or 1
    over_time = [rows.sum(0).tolist() for rows in of.rows.split(each)]
    return LayerRun(name, of.calls, of.totals.tolist(), over_time, each)


def _elsewhere(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> LayerRun:
    rows = (after["rows"] - before["rows"]).tolist()
    numbers = {k: after[k] - before[k] for k in after if k != "rows"}
    return LayerRun(name, numbers.get("steps", 0), rows, offloaded=numbers)


def _capturing() -> bool:
    return torch.cuda.is_available() and cuda.capturing()
