"""A program: kernels in order, and the values that are passed between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import profiler

from .. import options
from ..definitions.run import empty_outputs
from ..definitions.tensor_lists import need_memory
from ..errors import DeviceError, ShapeError
from ..ir import Fusion, Op, Value, needed, storage
from ..schedule.segment import Segment
from ..target import Target
from . import check, dump, handles, native, recording
from .kernel import Kernel
from .launch_plan import LaunchPlan, counted
from .precompile import Compiled, Noted, compile_all, note
from .remembered import Remembered

_REMEMBERED = 256  # how many sizes of calls are kept
# may return their inputs' memory
_MOVES = ("reshape", "slice", "permute", "broadcast_in_dim", "cast", "partition", "ends", "unpack")


class Joined(Protocol):
    """All kernels of a program in one call."""

    def plan(self, device: torch.device, sizes: Mapping[str, int]) -> LaunchPlan:
        """What such a call launches. Compiles what is not compiled yet."""

    def number(self, v: Value) -> int:
        """Which of a plan's arrays a value is."""


@dataclass(frozen=True)
class Program:
    """A compiled Fusion. stages: the Fusion after each pass, by name; segments: as `split` returned
    them; kernels: in launch order.

    checked: whether each call also evaluates every stage and the segments, compares them bit for
    bit, and kernels with their segments (the option `check`). joined: all kernels in one call, if
    the backend supports it; under a profiler they run one by one. dumped: the folder to which the
    program was written, and to which what its calls compile is written.
    """

    stages: tuple[tuple[str, Fusion], ...]
    segments: tuple[Segment, ...]
    kernels: tuple[Kernel, ...]
    target: Target
    checked: bool = False
    joined: Joined | None = None
    dumped: Path | None = None

    @cached_property
    def fusion(self) -> Fusion:
        """The Fusion that the kernels implement."""
        return self.stages[-1][1]

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph can capture a call, and replay it with other group sizes."""
        return not self.checked and all(kernel.graph_safe for kernel in self.kernels)

    def __call__(
        self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int] | None = None
    ) -> list[torch.Tensor]:
        """The outputs for these inputs: new, contiguous tensors that share no memory with the
        inputs.
        """
        return self.run(tensors, self.sizes(tensors, sizes or {}))

    def run(self, tensors: Sequence[torch.Tensor], env: Mapping[str, int]) -> list[torch.Tensor]:
        """A call on inputs whose shapes, dtypes and device are those for which `sizes` returned
        env: they are not checked again.
        """
        need_memory(tensors)
        if note(self._compiled, device_of(tensors), env):
            native.use()
            return [t.zero_() for t in empty_outputs(self.fusion, env, device_of(tensors))]
        tensors = self.taken(tensors, env)
        if self.checked:
            check.refuse_capture(device_of(tensors))
            check.check_stages(self.stages, self.segments, tensors, env)
        if self.dumped:
            with dump.into(self.dumped):
                return list(self._launched(tensors, env))
        return list(self._launched(tensors, env))

    def taken(
        self, tensors: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """What kernels get for these inputs (handles.py)."""
        return handles.tables(tensors, self._handles, env) if self._handles else tensors

    def plan_for_native(
        self, tensors: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> list[int] | None:
        """The launch plan of such a call of `run` for C++; None if Python must launch it."""
        by_python = self.checked or self.dumped is not None or "launch" in options.words("log")
        if by_python or self.joined is None:
            return None
        plan = self.joined.plan(device_of(tensors), env)
        numbers, inputs = plan.numbers(tensors), counted(handles.numbers(self._handles))
        return numbers and [plan.device.type == "cuda", *numbers, *self._counted, *inputs]

    def prepare(self, device: torch.device | str = "cpu", **sizes: int) -> None:
        """Compiles, in parallel, what a call of these sizes needs: `program.prepare("cuda",
        s0=64)`. ShapeError unless all are given.
        """
        if set(sizes) != set(self.fusion.symbols):
            actual = ", ".join(sizes) or "no sizes"
            raise ShapeError(
                actual,
                expected=", ".join(self.fusion.symbols) or "none: this program has no symbols",
                where="prepare",
            )
        compile_all([Noted(self._compiled, torch.device(device), tuple(sizes.items()))])

    @cached_property
    def _compiled(self) -> tuple[Compiled, ...]:
        """Those launches of a call that have to be compiled."""
        launches: list[Any] = (
            [self.joined] if self.joined else [kernel.launch for kernel in self.kernels]
        )
        return tuple(launch for launch in launches if isinstance(launch, Compiled))

    def sizes(
        self, tensors: Sequence[torch.Tensor], symbols: Mapping[str, int]
    ) -> Mapping[str, int]:
        """The values of the symbols, from the inputs' shapes and the given ones; raises if inputs
        do not fit their types.

        Cached by everything that they depend on: decoding asks for the same sizes again and again.
        """
        key = (tuple([(t.shape, t.dtype, t.device) for t in tensors]), tuple(symbols.items()))
        entry = self._remembered.get(key)
        if entry is None:
            _need_one_device(tensors)
            entry = self._remembered[key] = self.stages[0][1].bind(tensors, symbols)
        return entry

    @cached_property
    def _remembered(self) -> Remembered[Any, Mapping[str, int]]:
        return Remembered(_REMEMBERED)

    def _launched(
        self, tensors: Sequence[torch.Tensor], env: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        options.log("launch", "%d segments, %s", len(self.segments), dict(env))
        if (recorder := recording.active) is None:
            return self._outputs(tensors, env)
        outputs = self._outputs(tensors, env, self._inner_ends)
        arrays: dict[Value | None, torch.Tensor] = dict(
            zip(self._arrays, (*tensors, *outputs), strict=True)
        )
        recorder.launched(self, tensors, env, arrays.get(self.ends))
        return outputs[: len(self.fusion.outputs)]

    @cached_property
    def ends(self) -> Value | None:
        """The ends of the groups of the first product, in memory; None without a product."""
        return None if self.product is None else self._root(self.product.values[2])

    @cached_property
    def weight(self) -> int:
        """Which input is the weight of the first product, or its first part; -1 without one."""
        if self.product is None:
            return -1
        read = needed(self.fusion.ops, [self.product.values[1]])
        return next((i for i, v in enumerate(self.fusion.inputs) if v in read), -1)

    @cached_property
    def product(self) -> Op | None:
        """The first product over groups."""
        return next((op for op in self.fusion.ops if op.kind.role == "grouped"), None)

    @property
    def _counted(self) -> tuple[int, int]:
        """What C++ reads to count rows: which input is the weight, which array the ends."""
        assert self.joined is not None
        return self.weight, self.joined.number(self.ends) if self.ends in self._arrays else -1

    @cached_property
    def _handles(self) -> tuple[handles.Handle, ...]:
        """Its inputs that stand for memory."""
        return handles.handles_of(self.fusion)

    @cached_property
    def _arrays(self) -> tuple[Value, ...]:
        """What lies in memory after a call, of which the ends may be: inputs, outputs, and what
        `_inner_ends` adds to these.
        """
        return (*self.fusion.inputs, *self.fusion.outputs, *self._inner_ends)

    @cached_property
    def _inner_ends(self) -> tuple[Value, ...]:
        """These, if they are passed from one kernel to another, and are no output."""
        passed = {v for kernel in self.kernels for v in kernel.segment.fusion.inputs}
        known = (*self.fusion.inputs, *self.fusion.outputs)
        return tuple(v for v in (self.ends,) if v in passed and v not in known and v.type.ends)

    def _outputs(
        self,
        tensors: Sequence[torch.Tensor],
        env: Mapping[str, int],
        also: Sequence[Value] = (),
    ) -> Sequence[torch.Tensor]:
        alone = self._one_by_one(tensors, env, also) if self.checked else None
        joined = None
        if self.joined and not profiler._is_profiler_enabled:
            inner = [(self.joined.number(v), *storage(v.type, env)) for v in also]
            joined = self.joined.plan(device_of(tensors), env).run(tensors, inner)
        if joined is None:
            return self._one_by_one(tensors, env, also) if alone is None else alone
        if alone is not None:
            count = len(self.fusion.outputs)
            check.check_joined(
                self.fusion, tensors, joined[:count], alone[:count], self.kernels[0].backend
            )
        return joined

    def _one_by_one(
        self,
        tensors: Sequence[torch.Tensor],
        env: Mapping[str, int],
        also: Sequence[Value] = (),
    ) -> list[torch.Tensor]:
        results: dict[Value, Any] = dict(zip(self.fusion.inputs, tensors, strict=True))
        for i, kernel in enumerate(self.kernels):
            with (
                nullcontext()
                if kernel.segment.fusion.inputs
                else _making_tensors_on(device_of(tensors))
            ):
                self._launch(i, kernel, results, env, also)
        outputs = [
            results[v].clone(memory_format=torch.contiguous_format)
            if copy
            else results[v].contiguous()
            for v, copy in zip(self.fusion.outputs, self._copied, strict=True)
        ]
        return outputs + [results[v] for v in also]

    def _launch(
        self,
        i: int,
        kernel: Kernel,
        values: dict[Value, Any],
        env: Mapping[str, int],
        kept: Sequence[Value],
    ) -> None:
        inputs = [values[v] for v in kernel.segment.fusion.inputs]
        options.log("launch", "segment %d [%s, %s]", i, kernel.segment.kind, kernel.backend)
        if self.checked:
            outputs = check.checked(i, kernel, inputs, env, self.dumped)
        else:
            name = f"fusion_moe::{i}[{kernel.segment.kind}, {kernel.backend}]"
            profiled = profiler._is_profiler_enabled
            with profiler.record_function(name) if profiled else nullcontext():
                outputs = kernel(inputs, env)
        values.update(zip(kernel.segment.fusion.outputs, outputs, strict=True))
        for v in kernel.segment.fusion.inputs:
            if self._last_reader[v] == i and v not in (*self.fusion.outputs, *kept):
                del values[v]

    @cached_property
    def _last_reader(self) -> Mapping[Value, int]:
        return {v: i for i, kernel in enumerate(self.kernels) for v in kernel.segment.fusion.inputs}

    @cached_property
    def _copied(self) -> tuple[bool, ...]:
        """For each output, whether it may share memory with an input or an earlier output."""
        taken, copied = set(self.fusion.inputs), []
        for v in self.fusion.outputs:
            root = self._root(v)
            copied.append(root in taken)
            taken.add(root)
        return tuple(copied)

    def _root(self, v: Value) -> Value:
        op = self.fusion.producers.get(v)
        return self._root(op.values[0]) if op is not None and op.kind.name in _MOVES else v


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of a call's tensors; the CPU if there are none."""
    return tensors[0].device if tensors else torch.device("cpu")


@contextmanager
def _making_tensors_on(device: torch.device) -> Iterator[None]:
    """For a segment without inputs, such as constants: inside, new tensors and kernels are on this
    device.
    """
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), device:
        yield


def _need_one_device(tensors: Sequence[torch.Tensor]) -> None:
    devices = dict.fromkeys(str(t.device) for t in tensors)
    if len(devices) > 1:
        raise DeviceError(
            f"inputs on {' and '.join(devices)}",
            expected="one device",
            todo="move them with .to(device)",
            where="fusion",
        )
