"""Calling kernels: pointers in, new tensors out. What does not change from call to call is made once for each device and sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from ...arch import Arch
from ...errors import BuildError
from ...ir.core import storage_shape
from ...ir.types import DTYPES
from ...runtime import cuda, memory, nvrtc
from ...runtime.memory import Memory
from ...runtime.preparing import Build, run_builds
from .choice import AUTO
from .choose import Choice, Step, choose
from .parts import Parts, one_part
from .source import Boxes, KernelSource, Sizes, Source

KERNELS = Path(__file__).parent / "kernels"
_ALIGN = 16  # bytes that vectors are loaded by
_REMEMBERED = 1024  # devices and sizes of calls


@dataclass(frozen=True)
class _Loaded:
    """The kernels of a part, for known sizes. places: of its arrays among those of the call."""

    numbers: tuple[int, ...]
    places: tuple[int, ...]
    launches: tuple[tuple[cuda.Launch, tuple[Boxes, ...]], ...]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """On the current device; addresses: of all arrays of the call."""
        arrays = [addresses[i] for i in self.places]
        words = (*self.numbers, *arrays, cuda.fault_word())
        params = (ctypes.c_longlong * len(words))(*words)
        alone = ctypes.c_void_p(ctypes.addressof(params))
        for launch, boxes in self.launches:
            pointers: ctypes.c_void_p | ctypes.Array[ctypes.c_void_p] = alone
            if boxes:
                maps = [cuda.tensor_map(arrays[b.array], b.type, b.sizes, b.box) for b in boxes]
                pointers = (ctypes.c_void_p * (1 + len(maps)))(alone.value, *[m.address for m in maps])
            launch(stream, ctypes.addressof(pointers))


@dataclass(frozen=True)
class _Prepared:
    """What a call of known sizes needs: its results, memory for all else that it makes, and kernels."""

    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    workspace: Memory
    steps: tuple[_Loaded, ...]


class Call:
    """call(tensors, sizes) -> outputs: the kernels of parts, in order, compiled at the first call that needs them.

    choose(sizes, arch) -> what is launched for sizes on a GPU; its `kernels` are what has to be compiled.
    """

    def __init__(self, parts: Parts):
        self.parts = parts
        given = (*parts.inputs, *parts.made)
        self._outputs = [given.index(v) for v in parts.outputs]
        transposed = {v for part in parts.parts for v in part.transposed}
        self._swap = [v in transposed for v in parts.inputs]
        self._prepared = lru_cache(_REMEMBERED)(self._prepare)

    def choose(self, sizes: Sizes, arch: Arch) -> Choice:
        """What is launched. UnsupportedError if the option cuda_variant names what does not fit."""
        return choose(self.parts, sizes, arch)

    def builds(self, device: torch.device, sizes: Sizes) -> Iterator[Build]:
        """The kernels of a call of these sizes."""
        return _builds(self.choose(sizes, cuda.arch(_index(device))))

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """Loads them: a call of these sizes, a captured one too, then only launches."""
        index = _index(device)
        with torch.cuda.device(index):
            self._prepared(torch.device("cuda", index), *[sizes[s] for s in self.parts.symbols])

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.device(device.index):
            cuda.raise_fault()
            prepared = self._prepared(device, *[sizes[s] for s in self.parts.symbols])
            arrays = [_aligned(t.mT if swap else t) for t, swap in zip(tensors, self._swap, strict=True)]
            arrays += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in prepared.results]
            _held, inner = memory.allocate(prepared.workspace, device)  # until all kernels are launched
            addresses, stream = [*[t.data_ptr() for t in arrays], *inner], cuda.stream(device)
            for step in prepared.steps:
                step.run(addresses, stream)
        return tuple([arrays[i] for i in self._outputs])

    def _prepare(self, device: torch.device, *numbers: int) -> _Prepared:
        if cuda.capturing():
            raise BuildError(
                "a kernel is not compiled yet, and a CUDA graph is being captured", expected="a call of the same sizes before",
                todo="call the model once with these sizes before torch.cuda.graph, or use fusion_moe.preparing()", where="cuda",
            )  # fmt: skip
        parts, sizes = self.parts, dict(zip(self.parts.symbols, numbers, strict=True))
        choice = self.choose(sizes, cuda.arch(device.index))
        cubins = run_builds(_builds(choice))
        results = ((tuple(storage_shape(v.type, sizes)), DTYPES[v.type.dtype]) for v in parts.made)
        of_parts = zip(parts.parts, parts.places, choice.steps, strict=True)
        steps = (_Loaded(_numbers(part.source, sizes), places, _loaded(step, cubins, device.index)) for part, places, step in of_parts)
        return _Prepared(tuple(results), choice.workspace, tuple(steps))


class Launch:
    """launch(*inputs, sizes=...) -> outputs: the kernels of a segment. variant: the option cuda_variant."""

    def __init__(self, source: Source, variant: str = AUTO):
        self.source, self.call = source, Call(one_part(source, variant))

    def builds(self, device: torch.device, sizes: Sizes) -> Iterator[Build]:
        """The kernels of a call of these sizes."""
        return self.call.builds(device, sizes)

    def load(self, device: torch.device, sizes: Sizes) -> None:
        """Loads them."""
        self.call.load(device, sizes)

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        return self.call(inputs, sizes)


def build(kernel: KernelSource, arch: Arch) -> Path:
    """The cubin of a kernel."""
    return nvrtc.build(kernel.text, name=kernel.name, arch=arch.nvrtc, headers=_headers())


def _builds(choice: Choice) -> Iterator[Build]:
    """The kernels of a choice, by architecture and text."""
    return (((choice.arch.nvrtc, kernel.text), partial(build, kernel, choice.arch)) for kernel in choice.kernels)


def _index(device: torch.device) -> int:
    """The number of a CUDA device; the current one's if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _headers() -> Mapping[str, str]:
    return nvrtc.headers(KERNELS)


def _numbers(source: Source, sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[s] for s in source.fusion.symbols)


def _loaded(step: Step, cubins: Mapping[Hashable, Path], index: int) -> tuple[tuple[cuda.Launch, tuple[Boxes, ...]], ...]:
    arch, kernels = cuda.arch(index).nvrtc, zip(step.kernels, step.overlaps, strict=True)
    return tuple((_load(kernel, cubins[arch, kernel.text], index, overlap), kernel.boxes) for kernel, overlap in kernels)


def _load(kernel: KernelSource, cubin: Path, index: int, overlap: bool) -> cuda.Launch:
    arch = cuda.arch(index)
    function = cuda.load(cubin, kernel.name, kernel.shared)
    carveout = cuda.carveout(function, index, kernel.carveout_blocks) if kernel.carveout_blocks else None
    return cuda.Launch(function, kernel.grid(arch), kernel.threads, kernel.shared, overlap and arch.programmatic_launch, carveout)


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """t in one piece, where vectors can be loaded from."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGN == 0 else t.clone()
