"""Calling kernels: pointers in, new tensors out. What does not change from call to call is made once for each device and sizes."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from ...errors import BuildError
from ...ir.core import Fusion, Value, storage_shape
from ...ir.types import DTYPES
from ...runtime import cuda, nvrtc
from ...runtime.kernel import Kernel
from .grouped_mm import Product
from .source import Launched, Sizes, Source

KERNELS = Path(__file__).parent / "kernels"
_ALIGN = 16  # bytes that vectors are loaded by
_REMEMBERED = 1024  # devices and sizes of calls
_DTYPES = {"i32": torch.int32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class _Prepared:
    """What a call of known sizes needs: shapes to allocate, and kernels."""

    allocate: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    launches: tuple[cuda.Launch, ...]


class Launch:
    """launch(*inputs, sizes=...) -> outputs: the kernels of a segment, compiled at the first call that needs them.

    follows: whether its first kernel may start while the kernel before it ends.
    """

    def __init__(self, source: Source, follows: bool = False):
        self.source, self._follows, self._prepared = source, follows, lru_cache(_REMEMBERED)(self._prepare)
        fusion = source.fusion
        held = [*fusion.inputs, *source.memory]
        self._results = [held.index(v) for v in fusion.outputs]
        self._swap = [v is source.transposed for v in fusion.inputs]

    def __call__(self, *inputs: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        with torch.cuda.device(inputs[0].device):
            cuda.raise_fault()
            return self.run(inputs, sizes)

    def run(self, inputs: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """The outputs; on the current device, faults not looked at."""
        device, numbers = inputs[0].device, [sizes[s] for s in self.source.fusion.symbols]
        prepared = self._prepared(device, *numbers)
        held = [_aligned(t.mT if swap else t) for t, swap in zip(inputs, self._swap, strict=True)]
        held += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in prepared.allocate]
        words = (*numbers, *[t.data_ptr() for t in held], cuda.fault_word())
        params = (ctypes.c_longlong * len(words))(*words)
        pointer, stream = ctypes.c_void_p(ctypes.addressof(params)), cuda.stream(device)
        for launch in prepared.launches:
            launch(stream, ctypes.addressof(pointer))
        return tuple(held[i] for i in self._results)

    def _prepare(self, device: torch.device, *numbers: int) -> _Prepared:
        if cuda.capturing():
            raise BuildError(
                "a kernel is not compiled yet, and a CUDA graph is being captured", expected="a call of the same sizes before",
                todo="call the model once with these sizes before torch.cuda.graph", where="cuda",
            )  # fmt: skip
        sizes = dict(zip(self.source.fusion.symbols, numbers, strict=True))
        shapes = [(tuple(storage_shape(v.type, sizes)), DTYPES[v.type.dtype]) for v in self.source.memory]
        index = device.index if device.index is not None else torch.cuda.current_device()
        arch = cuda.arch(index)
        shapes += [((self.source.count(a, sizes, arch),), _DTYPES[a.type]) for a in self.source.scratch]
        wanted = [launched for launched in self.source.launches(sizes, arch) if launched.blocks]
        launches = [_loaded(launched, index, overlap=self._follows or i > 0) for i, launched in enumerate(wanted)]
        return _Prepared(tuple(shapes), tuple(launches))


class Joined:
    """joined(tensors, sizes=...) -> the outputs of a program, all of whose segments are kernels; faults are looked at once, before."""

    def __init__(self, fusion: Fusion, kernels: Sequence[Kernel], sources: Sequence[Source]):
        self._fusion = fusion
        # A product reads ends and weights before the kernel before it has ended, which must not be what makes them.
        follows = [False, *(isinstance(source, Product) for source in sources[:-1])]
        chained = _chained(fusion, kernels, sources)
        launches = [Launch(source, f) for source, f in zip(chained, follows, strict=True)]
        self._steps = [(k.segment.inputs, k.segment.outputs, launch) for k, launch in zip(kernels, launches, strict=True)]

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> tuple[torch.Tensor, ...]:
        made: dict[Value, torch.Tensor] = dict(zip(self._fusion.inputs, tensors, strict=True))
        with torch.cuda.device(tensors[0].device):
            cuda.raise_fault()
            for inputs, outputs, launch in self._steps:
                made.update(zip(outputs, launch.run([made[v] for v in inputs], sizes), strict=True))
        return tuple(made[v] for v in self._fusion.outputs)


def join(fusion: Fusion, kernels: Sequence[Kernel]) -> tuple[tuple[Kernel, ...], Joined | None]:
    """The kernels, and one call for all of them if all are ours and each output is memory of its own."""
    sources = [k.launch.source for k in kernels if isinstance(k.launch, Launch)]
    results = {v for k in kernels for v in k.segment.outputs}
    whole = len(sources) == len(kernels) > 0 and set(fusion.outputs) <= results and len(set(fusion.outputs)) == len(fusion.outputs)
    return tuple(kernels), Joined(fusion, kernels, sources) if whole else None


def _chained(fusion: Fusion, kernels: Sequence[Kernel], sources: Sequence[Source]) -> list[Source]:
    """The sources, those of products whose result only the next product reads in the know of each other."""
    found = [copy(source) for source in sources]
    makers = {v: source for kernel, source in zip(kernels, found, strict=True) for v in kernel.segment.outputs}
    readers = Counter([*fusion.outputs, *(v for kernel in kernels for v in set(kernel.segment.inputs))])
    for kernel, source in zip(kernels, found, strict=True):
        if not isinstance(source, Product) or source.matrix not in source.fusion.inputs:
            continue
        read = kernel.segment.inputs[source.fusion.inputs.index(source.matrix)]
        maker = makers.get(read)
        if isinstance(maker, Product) and readers[read] == 1:
            source.follow(maker)
    return found


def build(launched: Launched, arch: str) -> Path:
    """The cubin of a kernel."""
    return nvrtc.build(launched.text, name=launched.name, arch=arch, headers=_headers())


@cache
def _headers() -> Mapping[str, str]:
    return nvrtc.headers(KERNELS)


def _loaded(launched: Launched, index: int, overlap: bool) -> cuda.Launch:
    function = cuda.load(build(launched, cuda.arch(index)), launched.name, launched.shared)
    blocks = min(launched.blocks, cuda.multiprocessors(index)) if launched.persistent else launched.blocks
    return cuda.Launch(function, blocks, launched.threads, launched.shared, overlap and cuda.can_overlap(index))


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """t in one piece, where vectors can be loaded from."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGN == 0 else t.clone()
