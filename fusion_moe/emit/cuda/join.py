"""Programs in one call: all segments at once, products that follow each other chained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

from ...ir.core import Fusion
from ...runtime.kernel import Kernel
from .grouped_mm import Product
from .launch import Call, Launch, Part
from .source import Source


def join(fusion: Fusion, kernels: Sequence[Kernel]) -> tuple[tuple[Kernel, ...], Call | None]:
    """The kernels, and one call for all of them if all are ours and each output is memory of its own."""
    sources = [k.launch.source for k in kernels if isinstance(k.launch, Launch)]
    if len(sources) < len(kernels) or not kernels:
        return tuple(kernels), None
    # A product reads ends and weights before the kernel before it has ended, which must not be what makes them.
    overlaps = [False, *(isinstance(source, Product) for source in sources[:-1])]
    chained = _chained(fusion, kernels, sources)
    parts = [Part(s, k.segment.inputs, k.segment.outputs, o) for s, k, o in zip(chained, kernels, overlaps, strict=True)]
    results, read = {v for part in parts for v in part.outputs}, Counter(v for part in parts for v in part.inputs)
    whole = set(fusion.outputs) <= results and len(set(fusion.outputs)) == len(fusion.outputs)
    transposable = all(v in fusion.inputs and read[v] == 1 for part in parts for v in part.transposed)
    return tuple(kernels), Call(fusion.inputs, fusion.outputs, parts) if whole and transposable else None


def _chained(fusion: Fusion, kernels: Sequence[Kernel], sources: Sequence[Source]) -> list[Source]:
    """The sources; a product that alone reads the result of another is chained to that."""
    found = [copy(source) for source in sources]
    makers = {v: source for kernel, source in zip(kernels, found, strict=True) for v in kernel.segment.outputs}
    readers = Counter([*fusion.outputs, *(v for kernel in kernels for v in set(kernel.segment.inputs))])
    for kernel, source in zip(kernels, found, strict=True):
        if not isinstance(source, Product) or source.matrix not in source.fusion.inputs:
            continue
        read = kernel.segment.inputs[source.fusion.inputs.index(source.matrix)]
        maker = makers.get(read)
        if isinstance(maker, Product) and readers[read] == 1:
            source.chain_after(maker)
    return found
