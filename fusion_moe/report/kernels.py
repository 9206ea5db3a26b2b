"""What backends make of segments, also for targets that cannot run here and where nvFuser is not
installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .. import options
from ..arch import Arch
from ..backends import cuda, emit
from ..backends.nvfuser import NAME as NVFUSER
from ..backends.nvfuser import library
from ..errors import UnsupportedError
from ..ir.core import Fusion
from ..ir.text import text
from ..runtime.kernel import Kernel
from ..schedule.segment import Segment
from ..target import TARGETS, Target, never_run

_SIZES = (1, 8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class Made:
    """A kernel as it is reported: the backend's name, why it is that one or why it does not run,
    the source. kernel: itself, if made.
    """

    backend: str
    why: str
    source: str
    kernel: Kernel | None = None


@dataclass(frozen=True)
class Launched:
    """What a program launches for known sizes on a GPU. kernels, sources: of each segment, "" for
    one that CUDA's backend did not make.

    workspace: bytes that a call allocates beside its results, at a time.
    """

    gpu: str
    text: str
    kernels: tuple[str, ...]
    sources: tuple[str, ...]
    workspace: int


def made_of(segment: Segment, to: Target, why_not: str) -> Made:
    """What a target's backend makes of a segment. why_not: why programs for the target cannot run
    here; "" if they can.

    Where nvFuser is missing the source is the segment's own text, below what to do about it.
    """
    missing = library.why_missing() if segment.kind == NVFUSER else ""
    if missing:
        source = f"# nvFuser definition not shown: {missing}\n{text(segment.fusion)}"
        return Made(NVFUSER, _why(NVFUSER, to, why_not), source)
    kernel = emit(segment, to)
    return Made(
        kernel.backend, kernel.why or _why(kernel.backend, to, why_not), kernel.source, kernel
    )


def launched(fusion: Fusion, made: Sequence[Made], sizes: Mapping[str, int], gpu: Arch) -> Launched:
    """What the kernels of a program for CUDA launch. UnsupportedError if the option cuda_variant
    names what does not fit.
    """
    kernels = [m.kernel for m in made if m.kernel]
    choices, steps = cuda.choices(fusion, kernels, sizes, gpu)
    said = [*map(str, choices), *_meanwhile(fusion, kernels, sizes, gpu)]
    never = never_run(TARGETS[cuda.NAME], gpu.capability)
    return Launched(
        gpu=f"{gpu.name} ({gpu.nvrtc})" + (f", {never}" if never else ""),
        text="\n\n".join(said),
        kernels=tuple(str(step or "") for step in steps),
        sources=tuple(
            "\n".join(kernel.text for kernel in step.kernels) if step else "" for step in steps
        ),
        workspace=max(choice.workspace.nbytes for choice in choices),
    )


def _meanwhile(
    fusion: Fusion, kernels: Sequence[Kernel], sizes: Mapping[str, int], gpu: Arch
) -> Iterator[str]:
    """What is launched while the kernels of these sizes are compiled, under the option for it."""
    if options.current().background_compile:
        with suppress(UnsupportedError):
            for choice in cuda.choices(fusion, kernels, sizes, gpu, any_size=True)[0]:
                yield f"while these are compiled, kernels for any size: {choice}"


def launched_at(
    fusion: Fusion, made: Sequence[Made], gpu: Arch
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The kernels of each segment for a few values of the one size that a program leaves open; none
    if it leaves none or several.
    """
    if len(fusion.symbols) != 1:
        return ()
    (symbol,) = fusion.symbols
    return tuple((size, launched(fusion, made, {symbol: size}, gpu).kernels) for size in _SIZES)


def in_cuda(made: Sequence[Made]) -> bool:
    """Whether CUDA's backend made some of the kernels."""
    return any(m.backend == cuda.NAME for m in made)


def _why(backend: str, to: Target, why_not: str) -> str:
    if backend == to.name == "reference":
        return "requested"
    return _unexecuted(to, why_not) if why_not else "compiles it whole"


def _unexecuted(to: Target, why_not: str) -> str:
    never = never_run(to, to.capability) if to.capability else ""
    return f"emitted, unexecuted: {why_not}" + (f"; {never}" if never else "")
