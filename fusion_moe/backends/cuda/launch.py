"""Calling kernels: pointers in, new tensors out. What is the same for all calls is made once for
each device and sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from ... import options
from ...arch import Arch
from ...errors import BuildError, UnsupportedError
from ...ir import Value, storage
from ...messages import warn_once
from ...runtime import background, cuda, dump, native, nvrtc
from ...runtime.faults import Faults
from ...runtime.launch_plan import LaunchPlan, counted
from ...runtime.precompile import Build, builds_of_other_sizes, run_builds
from ...runtime.remembered import Remembered
from ...schedule.product import products
from .block_copies import why_slow
from .choose import Choice, Step, choose
from .dataflow import Parts, one_part
from .heuristics import AUTO
from .source import Boxes, KernelSource, Sizes, Source

KERNELS = Path(__file__).parent / "kernels"
_ALIGN = 16  # bytes: the alignment of vector loads
_REMEMBERED = 1024  # how many devices and sizes of calls are kept
_TITLE = 3  # how many operations a message names
# cubins, by where they were looked for and the keys of their builds
_had: dict[Hashable, Path] = {}


@dataclass(frozen=True)
class _Loaded:
    """The kernels of a part, for known sizes. places: its arrays among those of the call; with each
    launch, the parameters of its own.
    """

    numbers: tuple[int, ...]
    places: tuple[int, ...]
    launches: tuple[tuple[cuda.Launch, ctypes.Array[ctypes.c_int] | None, tuple[Boxes, ...]], ...]

    def run(self, addresses: Sequence[int], stream: int, fault: int) -> None:
        """Runs on the current device; addresses: of all arrays of the call; fault: address of the
        word for faults.
        """
        arrays = [addresses[i] for i in self.places]
        words = (*self.numbers, *arrays, fault)
        params = (ctypes.c_longlong * len(words))(*words)
        alone = ctypes.c_void_p(ctypes.addressof(params))
        for launch, given, boxes in self.launches:
            pointers: ctypes.c_void_p | ctypes.Array[ctypes.c_void_p] = alone
            if given is not None or boxes:
                own = [] if given is None else [ctypes.addressof(given)]
                maps = [cuda.tensor_map(arrays[b.array], b.type, b.sizes, b.box) for b in boxes]
                pointers = (ctypes.c_void_p * (1 + len(own) + len(maps)))(
                    alone.value, *own, *[m.address for m in maps]
                )
            launch(stream, ctypes.addressof(pointers))

    def for_native(self) -> list[int]:
        """The part for C++."""
        numbers = [*counted(self.numbers), *counted(self.places), len(self.launches)]
        for launch, given, boxes in self.launches:
            numbers += [*launch.addresses(), *counted(list(given or ())), len(boxes)]
            for b in boxes:
                lists = cuda.map_numbers(b.type, b.sizes, b.box)
                numbers += [self.places[b.array], *(n for x in lists for n in counted(x))]
        return numbers


@dataclass(frozen=True)
class _Launches:
    """The kernels of all parts on a device."""

    device: torch.device
    faults: Faults
    steps: tuple[_Loaded, ...]

    def readable(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        contiguous = [t.contiguous() for t in tensors]
        return [t if t.data_ptr() % _ALIGN == 0 else t.clone() for t in contiguous]

    def run(self, addresses: Sequence[int]) -> bool:
        index = self.device.index
        with torch.cuda.device(index):
            stream = cuda.stream(self.device)
            fault = self.faults.word(index, stream)
            for step in self.steps:
                step.run(addresses, stream, fault)
        return True

    def numbers(self) -> list[int]:
        numbers = [*native.cuda_functions(), self.faults.table(self.device.index), len(self.steps)]
        for step in self.steps:
            numbers += step.for_native()
        return numbers


class Call:
    """call.plan(device, sizes).run(tensors) -> outputs: the kernels of parts, in order, compiled at
    the first call that needs them.

    A call that compiles also starts, in the background, what calls of other sizes will need (the
    option compile_ahead).

    Under the option background_compile, the first call that is not prepared compiles kernels for
    any size in addition to its own. They serve calls of other sizes while the kernels for these are
    compiled.

    choose(sizes, arch) -> what is launched for sizes on a GPU; its `kernels` are what must be
    compiled.
    """

    def __init__(self, parts: Parts):
        self.parts = parts
        transposed = {part.transposed for part in parts.parts}
        self._swapped = tuple([i for i, v in enumerate(parts.inputs) if v in transposed])
        self._plans = Remembered[tuple[int, tuple[int, ...]], LaunchPlan](_REMEMBERED)
        self._faults = Faults(_title(parts))

    def choose(self, sizes: Sizes, arch: Arch, any_size: bool = False) -> Choice:
        """What is launched; any_size: while that is compiled. UnsupportedError if the option
        cuda_variant names one that does not fit.
        """
        return choose(self.parts, sizes, arch, any_size)

    def builds(self, device: torch.device, sizes: Sizes) -> Iterator[Build]:
        """The kernels for a call of these sizes, and those for any size if they are needed."""
        arch = cuda.arch(cuda.index_of(device))
        yield from _builds(self.choose(sizes, arch))
        if any_size := self._any_size(sizes, arch):
            yield from _builds(any_size)

    def is_loaded(self, device: torch.device, sizes: Sizes) -> bool:
        """Whether a call of these sizes, also a captured one, only launches, and always launches
        the same.
        """
        numbers = tuple([sizes[s] for s in self.parts.symbols])
        plan = self._plans.get((cuda.index_of(device), numbers))
        return plan is not None and plan.until is None

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """Loads the kernels: `is_loaded` is true from then on."""
        self._faults.prepare(cuda.index_of(device))
        self.plan(device, sizes)

    def number(self, v: Value) -> int:
        """Which of a plan's arrays a value is."""
        return self.parts.arrays.numbers[v]

    def plan(self, device: torch.device, sizes: Sizes) -> LaunchPlan:
        """What a call launches. Compiles what is not compiled yet."""
        numbers, index = tuple([sizes[s] for s in self.parts.symbols]), cuda.index_of(device)
        plan = self._plans.get((index, numbers))
        done = plan and plan.until and plan.until.done
        if plan is None or (done and not cuda.capturing()):  # during a capture nothing is loaded
            if plan and plan.until:
                plan.until.check()
            with torch.cuda.device(index):
                sizes = dict(zip(self.parts.symbols, numbers, strict=True))
                plan = self._plans[index, numbers] = self._prepare(
                    torch.device("cuda", index), sizes
                )
        return plan

    def _prepare(self, device: torch.device, sizes: Sizes) -> LaunchPlan:
        if cuda.capturing():
            raise BuildError(
                "a kernel is not compiled yet, and a CUDA graph is being captured",
                expected="a call of the same sizes before",
                todo="call the model once with these sizes before torch.cuda.graph, or use "
                "fusion_moe.preparing()",
                where="cuda",
            )
        arch = cuda.arch(device.index)
        choice, any_size = self.choose(sizes, arch), self._any_size(sizes, arch)
        if why := why_slow([part.source.fusion for part in self.parts.parts], sizes):
            warn_once(why, about="an FP8 recipe with few rows")
        options.log("choice", "%s", choice)
        missing = _missing(choice)
        if missing and options.current().compile_ahead:
            background.ahead(partial(builds_of_other_sizes, self, device, sizes))
        if any_size and missing:
            if not _missing(any_size):
                return self._loaded(any_size, device, sizes, background.start(missing))
            run_builds([*missing, *_missing(any_size)])
        return self._loaded(choice, device, sizes)

    def _any_size(self, sizes: Sizes, arch: Arch) -> Choice | None:
        """The choice that calls of any sizes can run, if that is needed; None if there is none."""
        if options.current().background_compile:
            with suppress(UnsupportedError):
                return self.choose(sizes, arch, any_size=True)
        return None

    def _loaded(
        self,
        choice: Choice,
        device: torch.device,
        sizes: Sizes,
        until: background.Started | None = None,
    ) -> LaunchPlan:
        parts, cubins = self.parts, _cubins(choice)
        of_parts = zip(parts.parts, parts.arrays.places, choice.steps, strict=True)
        steps = (
            _Loaded(
                tuple(sizes[s] for s in part.source.fusion.symbols),
                tuple(places[i] for i in part.source.arrays_of(step.chosen)),
                _loaded(step, cubins, device.index),
            )
            for part, places, step in of_parts
        )
        arrays = (*parts.inputs, *parts.made)
        return LaunchPlan(
            device,
            self._swapped,
            tuple([storage(v.type, sizes) for v in parts.made]),
            tuple([arrays.index(v) for v in parts.outputs]),
            choice.workspace,
            _Launches(device, self._faults, tuple(steps)),
            until,
        )


class Launch(Call):
    """launch(*inputs, sizes=...) -> outputs: the kernels of a segment. variant: the option
    cuda_variant.
    """

    def __init__(self, source: Source, variant: str = AUTO):
        super().__init__(one_part(source, variant))
        self.source = source

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The outputs of the segment for its inputs, as `Call` computes them."""
        device = inputs[0].device if inputs else torch.device("cuda")
        return tuple(self.plan(device, sizes).run(inputs) or ())


def _title(parts: Parts) -> str:
    """A description of a call for messages: its first operations, and the weights of its
    products.
    """
    fusions = [part.source.fusion for part in parts.parts]
    names = list(dict.fromkeys(op.kind.name for f in fusions for op in f.ops if not op.kind.view))
    weights = dict.fromkeys(str(p.b.type) for f in fusions for p in products(f))
    shown = " ".join(names[:_TITLE]) + " ..." * (len(names) > _TITLE)
    return f"`{shown}`" + (f" by {', '.join(weights)}" if weights else "")


def build(kernel: KernelSource, arch: Arch) -> Path:
    """The cubin of a kernel."""
    return nvrtc.build(
        kernel.text, name=kernel.name, arch=arch.nvrtc, headers=headers(*kernel.folders)
    )


def _builds(choice: Choice) -> Iterator[Build]:
    """The builds of a choice's kernels, keyed by architecture and text."""
    return (_build_of(kernel, choice.arch) for kernel in choice.kernels)


def _cubins(choice: Choice) -> dict[Hashable, Path]:
    """The cubins of a choice's kernels, by the keys of their builds. Those that this process has
    had are not looked for again.
    """
    where, builds = _where(), dict(_builds(choice))
    if new := [(key, build) for key, build in builds.items() if (where, key) not in _had]:
        _had.update(((where, key), path) for key, path in run_builds(new).items())
    for kernel in choice.kernels:
        dump.binary(_had[where, (choice.arch.nvrtc, kernel.text)], kernel.text, ".cu")
    return {key: _had[where, key] for key in builds}


def _where() -> Hashable:
    """What cubins depend on beside the keys of their builds."""
    now = options.current()
    return now.cache_dir, now.cuda_debug, headers().key


def _build_of(kernel: KernelSource, arch: Arch) -> Build:
    return (arch.nvrtc, kernel.text), partial(build, kernel, arch)


def _missing(choice: Choice) -> list[Build]:
    """The builds of a choice's kernels that are not compiled yet."""
    arch, where = choice.arch.nvrtc, _where()
    return [
        _build_of(kernel, choice.arch)
        for kernel in choice.kernels
        if (where, (arch, kernel.text)) not in _had
        and not nvrtc.is_built(
            kernel.text, name=kernel.name, arch=arch, headers=headers(*kernel.folders)
        )
    ]


@cache
def headers(*folders: Path) -> nvrtc.Headers:
    """Those of kernels/, and of other folders."""
    return nvrtc.headers(KERNELS, *folders)


def _loaded(
    step: Step, cubins: Mapping[Hashable, Path], index: int
) -> tuple[tuple[cuda.Launch, ctypes.Array[ctypes.c_int] | None, tuple[Boxes, ...]], ...]:
    arch, kernels = cuda.arch(index).nvrtc, zip(step.kernels, step.overlaps, strict=True)
    return tuple(
        (
            _load(kernel, cubins[arch, kernel.text], index, overlap),
            None
            if kernel.size_class is None
            else (ctypes.c_int * len(kernel.size_class))(*kernel.size_class),
            kernel.boxes,
        )
        for kernel, overlap in kernels
    )


def _load(kernel: KernelSource, cubin: Path, index: int, overlap: bool) -> cuda.Launch:
    arch = cuda.arch(index)
    function = cuda.load(cubin, kernel.name, kernel.shared)
    cuda.place(function, index)
    cuda.check_room(function, index, kernel.name, kernel.threads, kernel.shared, kernel.min_blocks)
    carveout = (
        cuda.carveout(function, index, kernel.carveout_blocks, kernel.shared)
        if kernel.carveout_blocks
        else None
    )
    return cuda.Launch(
        function,
        kernel.grid(arch),
        kernel.threads,
        kernel.shared,
        overlap and arch.programmatic_launch,
        carveout,
    )
