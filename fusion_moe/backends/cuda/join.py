"""Programs in one call: all segments at once, with consecutive products chained."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Fusion
from ...runtime.kernel import Kernel
from .dataflow import Part, parts_of
from .launch import Call, Launch


def join(fusion: Fusion, kernels: Sequence[Kernel]) -> tuple[tuple[Kernel, ...], Call | None]:
    """The kernels of a program, and one call that launches all of them. None in place of the call
    if one of them is not a CUDA kernel of this library, or two outputs share memory.
    """
    launches = [k.launch for k in kernels if isinstance(k.launch, Launch)]
    if len(launches) < len(kernels) or not kernels:
        return tuple(kernels), None
    parts = [
        Part(launch.source, k.segment.fusion.inputs, k.segment.fusion.outputs)
        for launch, k in zip(launches, kernels, strict=True)
    ]
    result = parts_of(fusion.inputs, fusion.outputs, parts, launches[0].parts.variant)
    return tuple(kernels), Call(result) if result else None
