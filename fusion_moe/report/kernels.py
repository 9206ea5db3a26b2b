"""What backends make of segments, also for targets that cannot run here and where nothing can be
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from .. import options
from ..arch import Arch
from ..backends import TARGETS, backend_for, cuda
from ..bodies.stored import to_reorder
from ..errors import UnsupportedError
from ..ir import Fusion, TensorType, plain, value
from ..ir.kinds.quantized import format_of
from ..ir.text import text
from ..layouts import LAYOUTS, LINEAR, ceil_to
from ..messages.units import amount
from ..runtime.kernel import Kernel
from ..schedule.product import products
from ..schedule.segment import Segment
from ..target import Target, never_run


@dataclass(frozen=True)
class Made:
    """A kernel as it is reported: the backend's name, why it is that one or why it does not run,
    the source. kernel: itself, if made; launched: what CUDA launches for it.
    """

    backend: str
    why: str
    source: str
    kernel: Kernel | None = None
    launched: str = ""


def made_of(segment: Segment, to: Target, why_not: str, ran: Kernel | None = None) -> Made:
    """What a target's backend makes of a segment; ran: what ran for it, if it ran. why_not: why
    programs for the target cannot run here; "" if they can.

    Where the backend cannot write a source, it is the segment's own text, below what to do about
    it.
    """
    backend = backend_for(segment, to)
    if ran is None and (missing := backend.why_missing()):
        source = f"# source not shown: {missing}\n{text(segment.fusion)}"
        return Made(backend.name, _why(backend.name, to, why_not), source)
    kernel = ran or backend.emit(segment)
    return Made(
        kernel.backend, kernel.why or _why(kernel.backend, to, why_not), kernel.source, kernel
    )


def on_gpu(
    fusion: Fusion, entries: Sequence[Made], sizes: Mapping[str, int], gpu: Arch
) -> tuple[list[Made], dict[str, Any]]:
    """The kernels of a program for CUDA with what is launched for these sizes, and a FusionReport's
    fields about it. UnsupportedError if the option cuda_variant names what does not fit.
    """
    kernels = [m.kernel for m in entries if m.kernel]
    choices, steps = cuda.choices(fusion, kernels, sizes, gpu)
    texts = [*map(str, choices)]
    if options.current().background_compile:
        with suppress(UnsupportedError):
            for choice in cuda.choices(fusion, kernels, sizes, gpu, any_size=True)[0]:
                texts.append(f"while these are compiled, kernels for any size: {choice}")
    never = never_run(TARGETS[cuda.NAME], gpu.capability)
    launched = [
        replace(m, launched=str(step), source="\n".join(kernel.text for kernel in step.kernels))
        if step
        else m
        for m, step in zip(entries, steps, strict=True)
    ]
    return launched, {
        "gpu": f"{gpu.name} ({gpu.nvrtc})" + (f", {never}" if never else ""),
        "choice": "\n\n".join(texts),
        "workspace": max(choice.workspace.nbytes for choice in choices),
    }


def _why(backend: str, to: Target, why_not: str) -> str:
    if backend == to.name == "reference":
        return "requested"
    if not why_not:
        return "compiles it whole"
    never = never_run(to, to.capability) if to.capability else ""
    return f"emitted, unexecuted: {why_not}" + (f"; {never}" if never else "")


def weight_layouts(fusion: Fusion, to: Target) -> tuple[tuple[str, str], ...]:
    """(layout, what `prepare_` does about it) for encoded weights that are not in a target's layout
    but in one that `prepare_` knows; under the option `keep_weights` what eager calls keep.
    """
    if options.current().keep_weights:
        packs = [(pack.outputs[0].type, wanted) for pack, wanted in to_reorder(fusion, to)]
        return tuple((w.layout, _what_calls_keep(w, wanted)) for w, wanted in packs)
    prepared = {target.weight_layout for target in TARGETS.values()}
    results = (
        (p.weight.type, to.layout_of(p.weight.type.dtype, format_of(p.a.type)))
        for p in products(fusion)
        if p.weight is not None
    )
    return tuple(
        dict.fromkeys(
            (w.layout, _what_prepare_does(w, wanted, to))
            for w, wanted in results
            if w.quantized and w.layout in prepared - {wanted} and not set(w.symbols())
        )
    )


def _what_calls_keep(w: TensorType, wanted: str) -> str:
    moves = any(getattr(LAYOUTS[name], "elements", None) for name in (wanted, w.layout))
    bits = w.encoding.weight_bits - (0 if moves else w.encoding.element.bits)
    nbytes = prod(value(plain(d), {}) for d in w.shape) * bits / 8
    return f"eager calls keep a copy in {wanted}, of {amount(nbytes, 'B')}"


def _what_prepare_does(w: TensorType, wanted: str, to: Target) -> str:
    layout = LAYOUTS[wanted]
    if layout is not LINEAR:
        n, k = (
            ceil_to(value(plain(d), {}), n) for d, n in zip(w.shape[1:], layout.tile, strict=True)
        )
        if why := layout.why_not(n, k, w.encoding):
            return f"prepare_ leaves them as they are: {why}"
    return (
        f"fusion_moe.prepare_(model, {to.name!r}) reorders them to {wanted}, the "
        f"layout of {to.name}"
    )
