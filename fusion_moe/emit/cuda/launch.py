"""Calling kernels: pointers in, new tensors out. What does not change from call to call is made once for each device and sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from ...arch import H200, Arch
from ...errors import BuildError
from ...groups import ceil_to
from ...ir.core import Value, storage_shape
from ...ir.types import DTYPES
from ...runtime import cuda, nvrtc
from ...runtime.kernel import Chosen
from .source import Array, KernelSource, Sizes, Source

KERNELS = Path(__file__).parent / "kernels"
_ALIGN = 16  # bytes that vectors are loaded by
ALIGNMENT = 256  # bytes: what a call makes for itself begins at multiples of it, in one piece of memory
_REMEMBERED = 1024  # devices and sizes of calls
_DTYPES = {"i32": torch.int32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Part:
    """A segment among those of a call. inputs, outputs: the call's values for those of the source's fusion.

    overlaps_previous: whether its first kernel may read before the kernel before it has ended.
    """

    source: Source
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    overlaps_previous: bool = False

    @property
    def transposed(self) -> list[Value]:
        """The input that is passed with its last two dimensions swapped, if there is one."""
        return [v for v, own in zip(self.inputs, self.source.fusion.inputs, strict=True) if own is self.source.transposed]


@dataclass(frozen=True)
class _Step:
    """The kernels of a part, for known sizes. places: of its arrays among those of the call."""

    numbers: tuple[int, ...]
    places: tuple[int, ...]
    launches: tuple[cuda.Launch, ...]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """On the current device; addresses: of all arrays of the call."""
        words = (*self.numbers, *[addresses[i] for i in self.places], cuda.fault_word())
        params = (ctypes.c_longlong * len(words))(*words)
        pointer = ctypes.c_void_p(ctypes.addressof(params))
        for launch in self.launches:
            launch(stream, ctypes.addressof(pointer))


@dataclass(frozen=True)
class _Prepared:
    """What a call of known sizes needs: its results, offsets of all else that it makes in memory of nbytes, and kernels."""

    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    offsets: tuple[int, ...]
    nbytes: int
    steps: tuple[_Step, ...]


class Call:
    """call(tensors, sizes) -> outputs: the kernels of parts, in order, compiled at the first call that needs them.

    Its arrays are numbered: inputs, outputs, what else the parts make. What is passed transposed is an input, which no other part reads.
    """

    def __init__(self, inputs: Sequence[Value], outputs: Sequence[Value], parts: Sequence[Part]):
        self._parts, self._symbols = parts, tuple(dict.fromkeys(s for part in parts for s in part.source.fusion.symbols))
        self._made = [v for v in outputs if v not in inputs]
        self._inner: list[tuple[Source, Value | Array]] = []
        place: dict[object, int] = {v: i for i, v in enumerate((*inputs, *self._made))}
        self._outputs = [place[v] for v in outputs]
        self._places = [self._places_of(part, place) for part in parts]
        transposed = {v for part in parts for v in part.transposed}
        self._swap = [v in transposed for v in inputs]
        self._prepared = lru_cache(_REMEMBERED)(self._prepare)

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        device = tensors[0].device
        with torch.cuda.device(device.index):
            cuda.raise_fault()
            prepared = self._prepared(device, *[sizes[s] for s in self._symbols])
            arrays = [_aligned(t.mT if swap else t) for t, swap in zip(tensors, self._swap, strict=True)]
            arrays += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in prepared.results]
            _memory, inner = allocate(prepared.offsets, prepared.nbytes, device)  # held until all kernels are launched
            addresses, stream = [*[t.data_ptr() for t in arrays], *inner], cuda.stream(device)
            for step in prepared.steps:
                step.run(addresses, stream)
        return tuple([arrays[i] for i in self._outputs])

    def _places_of(self, part: Part, place: dict[object, int]) -> tuple[int, ...]:
        """Where the arrays of a part's struct are; those that have no place get the next."""
        outputs: dict[object, Value] = dict(zip(part.source.fusion.outputs, part.outputs, strict=True))
        found, arrays = [place[v] for v in part.inputs], list[Value | Array]((*part.source.memory, *part.source.scratch))
        for array in arrays:
            known = outputs.get(array, (part.source, array))
            if known not in place:
                place[known] = len(place)
                self._inner.append((part.source, array))
            found.append(place[known])
        return tuple(found)

    def _prepare(self, device: torch.device, *numbers: int) -> _Prepared:
        if cuda.capturing():
            raise BuildError(
                "a kernel is not compiled yet, and a CUDA graph is being captured", expected="a call of the same sizes before",
                todo="call the model once with these sizes before torch.cuda.graph", where="cuda",
            )  # fmt: skip
        sizes, index = dict(zip(self._symbols, numbers, strict=True)), device.index
        results = ((tuple(storage_shape(v.type, sizes)), DTYPES[v.type.dtype]) for v in self._made)
        nbytes = (_nbytes(source, array, sizes, cuda.arch(index)) for source, array in self._inner)
        *offsets, end = accumulate((ceil_to(n, ALIGNMENT) for n in nbytes), initial=0)
        steps = (_step(part, places, sizes, index) for part, places in zip(self._parts, self._places, strict=True))
        return _Prepared(tuple(results), tuple(offsets), end, tuple(steps))


def allocate(offsets: Sequence[int], nbytes: int, device: torch.device) -> tuple[object, list[int]]:
    """Memory for what a call makes for itself, and the addresses in it: one allocation, since each takes as long as a launch."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    start = memory.data_ptr()
    return memory, [start + offset for offset in offsets]


class Launch:
    """launch(*inputs, sizes=...) -> outputs: the kernels of a segment."""

    def __init__(self, source: Source):
        self.source, fusion = source, source.fusion
        self._call = Call(fusion.inputs, fusion.outputs, [Part(source, fusion.inputs, fusion.outputs)])

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return self._call(inputs, sizes)

    def chosen(self, sizes: Sizes) -> Chosen:
        """What is launched by itself, on the current device; on an H200 where there is none."""
        arch = cuda.arch(torch.cuda.current_device()) if torch.cuda.is_available() else H200
        names = ", ".join(kernel.title for kernel in self.source.launches(sizes, arch) if kernel.blocks)
        others: list[Value | Array] = [v for v in self.source.memory if v not in self.source.fusion.outputs]
        workspace = sum(_nbytes(self.source, a, sizes, arch) for a in [*others, *self.source.scratch])
        return Chosen(f"{names} on {arch.nvrtc}", workspace)


def build(kernel: KernelSource, arch: Arch) -> Path:
    """The cubin of a kernel."""
    return nvrtc.build(kernel.text, name=kernel.name, arch=arch.nvrtc, headers=_headers())


@cache
def _headers() -> Mapping[str, str]:
    return nvrtc.headers(KERNELS)


def _step(part: Part, places: tuple[int, ...], sizes: Sizes, index: int) -> _Step:
    launches = [kernel for kernel in part.source.launches(sizes, cuda.arch(index)) if kernel.blocks]
    overlaps = (part.overlaps_previous or i > 0 or not kernel.reads_before_wait for i, kernel in enumerate(launches))
    loaded = (_loaded(kernel, index, programmatic_launch=overlap) for kernel, overlap in zip(launches, overlaps, strict=True))
    return _Step(tuple(sizes[s] for s in part.source.fusion.symbols), places, tuple(loaded))


def _nbytes(source: Source, array: Value | Array, sizes: Sizes, arch: Arch) -> int:
    if isinstance(array, Array):
        return source.count(array, sizes, arch) * _DTYPES[array.type].itemsize
    return prod(storage_shape(array.type, sizes)) * DTYPES[array.type.dtype].itemsize


def _loaded(kernel: KernelSource, index: int, programmatic_launch: bool) -> cuda.Launch:
    arch = cuda.arch(index)
    function = cuda.load(build(kernel, arch), kernel.name, kernel.shared)
    carveout = cuda.carveout(function, index, kernel.carveout_blocks) if kernel.carveout_blocks else None
    overlap = programmatic_launch and arch.programmatic_launch
    return cuda.Launch(function, kernel.grid(arch), kernel.threads, kernel.shared, overlap, carveout)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """t in one piece, where vectors can be loaded from."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGN == 0 else t.clone()
