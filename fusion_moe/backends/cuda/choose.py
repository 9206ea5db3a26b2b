"""The choice for a call: which kernels are launched, the order of columns between products, and the
placement of arrays in memory.

A pure function of the parts of a call, the sizes that the host knows, and the facts of a GPU.
launch.py builds and launches exactly what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...arch import Arch
from ...ir import nbytes, plain, value
from ...runtime import memory
from ...runtime.memory import Memory
from ..cxx import stored
from .dataflow import Inner, Parts
from .heuristics import Chosen
from .source import Array, KernelSource, Sizes

# of the elements of arrays that do not hold values
_BYTES = {"i32": 4, "float": 4, "bf16": 2, "f16": 2, "u8": 1, "const void": 0}


@dataclass(frozen=True)
class Step:
    """The kernels of a part, in order. overlaps: for each kernel, whether it may start before the
    previous one has ended, for which it waits.

    previous, next: the parts with whose products this one has agreed on fragment order.
    """

    chosen: Chosen
    kernels: tuple[KernelSource, ...]
    overlaps: tuple[bool, ...]
    previous: int | None = None
    next: int | None = None

    def __str__(self) -> str:
        """The titles of the kernels, and what they are chained with."""
        kernels = ", ".join(kernel.title for kernel in self.kernels)
        return "; ".join(filter(None, (kernels, *self.chained)))

    @property
    def chained(self) -> list[str]:
        """What the rows of its product are chained with, and who quantizes its result."""
        texts = {
            "activations in fragment order, of segment": self.previous,
            "result in fragment order, for segment": self.next,
        }
        later = ["result quantized by the product that reads it"] * self.chosen.without_codes
        return [*(f"{what} {i}" for what, i in texts.items() if i is not None), *later]


@dataclass(frozen=True)
class Choice:
    """What is launched for certain sizes on a GPU: a step for each part; all inner arrays lie in
    one block of memory.
    """

    arch: Arch
    sizes: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    workspace: Memory

    @property
    def kernels(self) -> tuple[KernelSource, ...]:
        """All kernels that a call launches, in order."""
        return tuple(kernel for step in self.steps for kernel in step.kernels)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield ", ".join(
            [
                f"{self.arch.name} ({self.arch.nvrtc})",
                *(f"{symbol} = {n}" for symbol, n in self.sizes),
            ]
        )
        for i, step in enumerate(self.steps):
            yield f"segment {i}"
            for kernel in step.kernels:
                shared = (
                    f", {kernel.shared} bytes of dynamic shared memory" if kernel.shared else ""
                )
                clusters = f" in clusters of {kernel.cluster}" if kernel.cluster > 1 else ""
                yield (
                    f"    {kernel.title}: {kernel.grid(self.arch)} blocks{clusters} of "
                    f"{kernel.threads} threads{shared}"
                )
            yield from (f"    {text}" for text in step.chained)
        yield f"workspace: {self.workspace.nbytes} bytes"
        for offset, array in sorted(
            zip(self.workspace.offsets, self.workspace.arrays, strict=True),
            key=lambda pair: pair[0],
        ):
            if array.nbytes:
                lives = (
                    f"segment {array.first}"
                    if array.first == array.last
                    else f"segments {array.first} to {array.last}"
                )
                yield f"    {offset}: {array.name}, {array.nbytes} bytes, {lives}"


def choose(parts: Parts, sizes: Sizes, arch: Arch, any_size: bool = False) -> Choice:
    """The kernels of a joined program for a call's sizes on a GPU: variants of its products, what
    is chained, grids and workspace.

    any_size: with variants that fit every number of tokens, so that calls of all sizes share them.
    UnsupportedError if the variant that `parts` asks for (the option cuda_variant) does not fit one
    of the products.
    """
    sources = [part.source for part in parts.parts]
    chosen = [
        replace(s.choose(None if any_size else sizes, arch, parts.variant), any_size=any_size)
        for s in sources
    ]
    may_chain = [s.may_chain(c) for s, c in zip(sources, chosen, strict=True)]
    links = [(i, j) for i, j in parts.links if may_chain[i] and may_chain[j]]
    for i, j in links:
        chosen[i], chosen[j] = (
            replace(chosen[i], writes_fragment_order=True),
            replace(chosen[j], rows_given=True),
        )
    for i in parts.unquantized:
        if sources[i + 1].rounds(chosen[i + 1], arch) and not chosen[i].by_wgmma:
            chosen[i] = replace(chosen[i], without_codes=True)
            chosen[i + 1] = replace(chosen[i + 1], rows_given=True)
    for i in parts.without_rest:
        chosen[i] = replace(chosen[i], without_rest=True)
    for i, (ids, first) in parts.routed.items():
        few = all(sources[n].takes_few_ids(chosen[n], sizes) for n in (i, i + 1))
        one = few and value(plain(ids.type.shape[0]), sizes) == 1
        chosen[i] = replace(chosen[i], few_ids=few, one_token=one)
        chosen[i + 1] = replace(chosen[i + 1], few_ids=few, one_token=one, ids=(stored(ids), first))
    next_, previous = dict(links), {j: i for i, j in links}
    steps, after_product = list[Step](), False
    for i, (part, how) in enumerate(zip(parts.parts, chosen, strict=True)):
        kernels = tuple(
            kernel for kernel in part.source.launches(how, sizes, arch) if kernel.blocks
        )
        overlaps = tuple(
            n > 0 or _may_overlap(kernel, after_product) for n, kernel in enumerate(kernels)
        )
        steps.append(Step(how, kernels, overlaps, previous.get(i), next_.get(i)))
        after_product = bool(how.size_classes) if kernels else after_product
    return Choice(
        arch,
        tuple((s, sizes[s]) for s in parts.symbols),
        tuple(steps),
        _workspace(parts, chosen, sizes),
    )


def _may_overlap(kernel: KernelSource, after_product: bool) -> bool:
    """Whether the first kernel of a segment may start before the last kernel of the previous
    segment has ended.

    The previous kernel must not make what this one reads before it waits (ends, weights): a product
    makes neither.
    """
    return not kernel.writes_before_wait and (after_product or not kernel.reads_before_wait)


# Memory is reused from segment to segment, but never by kernels of the same segment, which may run
# concurrently. This is safe although launches overlap:
#
# - A kernel writes after `griddepcontrol.wait`, when the previous kernel has ended. All blocks of
#   that kernel, or its last one, have waited too, and so on: all kernels of earlier segments have
#   ended.
# - Concurrent kernels of a product wait for the previous kernel at their end, and begin when the
#   first of them has waited. So all kernels of earlier segments have ended when any of them begins,
#   and a kernel that waits for the last of them waits for all.
# - Only `reorder_activations` writes before it waits (grouped_mm.py). If it is the first kernel of
#   its segment, it does not overlap. Otherwise the previous kernel is routing in the same segment,
#   which waits before it lets others start.
# - What a kernel reads before it waits lives in its segment, so nothing else is written there
#   before the next one.
# - A product that routes waits before it does. The next one reads ids before it waits: these were
#   there before the former's wait.
def _workspace(parts: Parts, chosen: Sequence[Chosen], sizes: Sizes) -> Memory:
    """The placement of the inner arrays; steps are segments."""
    return memory.plan(
        [
            memory.Array(x.array.name, _nbytes(x, chosen[x.first], sizes), x.first, x.last)
            for x in parts.arrays.inner
        ]
    )


def _nbytes(inner: Inner, chosen: Chosen, sizes: Sizes) -> int:
    array = inner.array
    if isinstance(array, Array):
        return inner.source.count(array, chosen, sizes) * _BYTES[array.type]
    return nbytes(array.type, sizes)
