"""The choice for a call: which kernels are launched, in which order columns lie between products, where in memory arrays lie.

A pure function of the parts of a call, of the sizes that the host knows and of the facts of a GPU. launch.py builds and launches what it
says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...arch import Arch
from ...ir.core import storage_shape
from ...ir.types import DTYPES
from ...runtime import memory
from ...runtime.memory import Memory
from .choice import Chosen
from .parts import Inner, Parts
from .source import Array, KernelSource, Sizes

_BYTES = {"i32": 4, "float": 4, "bf16": 2, "f16": 2}  # of the elements of arrays that are no values


@dataclass(frozen=True)
class Step:
    """The kernels of a part, in order. overlaps: of each, whether it may start before the one before it has ended, for which it waits.

    previous, next: the parts with whose product this one agreed on fragment order.
    """

    chosen: Chosen
    kernels: tuple[KernelSource, ...]
    overlaps: tuple[bool, ...]
    previous: int | None = None
    next: int | None = None

    def __str__(self) -> str:
        """The kernels by their titles, and what is chained."""
        chained = {"activations in fragment order, of segment": self.previous, "result in fragment order, for segment": self.next}
        said = [", ".join(kernel.title for kernel in self.kernels), *(f"{what} {i}" for what, i in chained.items() if i is not None)]
        return "; ".join(said)


@dataclass(frozen=True)
class Choice:
    """What is launched for some sizes on a GPU: a step for each part, whose inner arrays lie in one piece of memory."""

    arch: Arch
    sizes: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    workspace: Memory

    @property
    def kernels(self) -> tuple[KernelSource, ...]:
        """All kernels, in order."""
        return tuple(kernel for step in self.steps for kernel in step.kernels)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield ", ".join([f"{self.arch.name} ({self.arch.nvrtc})", *(f"{symbol} = {n}" for symbol, n in self.sizes)])
        for i, step in enumerate(self.steps):
            yield f"segment {i}"
            for kernel in step.kernels:
                shared = f", {kernel.shared} bytes of dynamic shared memory" if kernel.shared else ""
                clusters = f" in clusters of {kernel.cluster}" if kernel.cluster > 1 else ""
                yield f"    {kernel.title}: {kernel.grid(self.arch)} blocks{clusters} of {kernel.threads} threads{shared}"
            if step.previous is not None:
                yield f"    reads the result of segment {step.previous} in fragment order"
            if step.next is not None:
                yield f"    writes its result in fragment order, for segment {step.next}"
        yield f"workspace: {self.workspace.nbytes} bytes"
        for offset, array in sorted(zip(self.workspace.offsets, self.workspace.arrays, strict=True), key=lambda pair: pair[0]):
            if array.nbytes:
                lives = f"segment {array.first}" if array.first == array.last else f"segments {array.first} to {array.last}"
                yield f"    {offset}: {array.name}, {array.nbytes} bytes, {lives}"


def choose(parts: Parts, sizes: Sizes, arch: Arch, any_size: bool = False) -> Choice:
    """What is launched; any_size: by kernels that calls of all other sizes have too, where there are such.

    UnsupportedError if the variant that parts ask for fits one of their products not.
    """
    sources = [part.source for part in parts.parts]
    chosen = [s.choose_any(arch, parts.variant) if any_size else s.choose(sizes, arch, parts.variant) for s in sources]
    links = [(i, j) for i, j in parts.links if all(chosen[n].may_chain for n in (i, j))]
    for i, j in links:
        chosen[i], chosen[j] = replace(chosen[i], writes_fragment_order=True), replace(chosen[j], reads_fragment_order=True)
    next_, previous = dict(links), {j: i for i, j in links}
    steps, after_product = list[Step](), False
    for i, (part, how) in enumerate(zip(parts.parts, chosen, strict=True)):
        kernels = tuple(kernel for kernel in part.source.launches(how, sizes, arch) if kernel.blocks)
        overlaps = tuple(n > 0 or _may_overlap(kernel, after_product) for n, kernel in enumerate(kernels))
        steps.append(Step(how, kernels, overlaps, previous.get(i), next_.get(i)))
        after_product = bool(how.size_classes) if kernels else after_product
    return Choice(arch, tuple((s, sizes[s]) for s in parts.symbols), tuple(steps), _workspace(parts, chosen, sizes))


def _may_overlap(kernel: KernelSource, after_product: bool) -> bool:
    """Whether the first kernel of a segment may start before that of another one has ended.

    What it reads before it waits (ends, weights) must not be what the kernel before makes: a product makes none of these.
    """
    return not kernel.writes_before_wait and (after_product or not kernel.reads_before_wait)


# Memory is used again from segment to segment, never by kernels of the same one, which may be concurrent. That is safe although launches
# overlap:
#
# - A kernel writes after `griddepcontrol.wait`, when the kernel before it has ended. That one has waited itself, all of its blocks or the
#   last one, and so on: all kernels of the segments before have ended.
# - Concurrent kernels of a product wait for the one before them when they are done, and begin when the first of them has waited. So all
#   of the segments before has ended when any of them begins, and what waits for the last of them waits for all.
# - `reorder_activations` alone writes before it waits (grouped_mm.py). Where it is the first kernel of its segment, it does not overlap.
#   Else the kernel before it is routing of the same segment, which has waited before it let others start.
# - What a kernel reads before it waits lives in its segment, so nothing else is written there before the next one.
def _workspace(parts: Parts, chosen: Sequence[Chosen], sizes: Sizes) -> Memory:
    """Where the inner arrays lie; steps are segments."""
    nbytes = (_nbytes(inner, chosen[inner.first], sizes) for inner in parts.inner)
    return memory.plan([memory.Array(x.array.name, n, x.first, x.last) for x, n in zip(parts.inner, nbytes, strict=True)])


def _nbytes(inner: Inner, chosen: Chosen, sizes: Sizes) -> int:
    array = inner.array
    if isinstance(array, Array):
        return inner.source.count(array, chosen, sizes) * _BYTES[array.type]
    return prod(storage_shape(array.type, sizes)) * DTYPES[array.type.dtype].itemsize
