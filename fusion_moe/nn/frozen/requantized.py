"""What a module's weights in few bits are read as: packed, requantized to FP8
(encodings/requantized.py), or either, by the number of rows.

Parameters stay what was loaded, and state dicts have nothing else; weights in FP8 are buffers that
are not saved. With "fp8" the parameters lie in the host's memory, since only state dicts read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from sys import maxsize
from typing import TYPE_CHECKING, Any

import torch

from ... import backends, options
from ...encodings import REQUANTIZED, EncodedParameter, requantizable
from ...errors import OptionError

if TYPE_CHECKING:
    from .adaptable import AdaptableModule

FROM = 128  # rows for each matrix from which "both" reads the requantized ones; on CUDA, by a table
_RUN = 32  # rows of gate that follow each other, or more, where kernels multiply FP8


@dataclass(frozen=True)
class Reading:
    """What a module's weights are read as: "fp8", or "both", which is FP8 from so many rows. lost:
    by requantizing, as `encodings.requantized.requantize` counts.
    """

    weights: str
    rows: int = 0
    lost: tuple[float, ...] = (0, 0, 0, 0)


def read_as_(module: AdaptableModule, weights: str) -> None:
    """Makes a module read its weights by a policy: packed if they cannot be requantized, such as
    FP8, which are read as they are.
    """
    if module.reading is not None:
        _move_packed(module, module.requantized_of(module.projections[0]).parts[0].device)
        for projection in module.projections:
            for name in requantized_names(projection):
                delattr(module, name)
        module.reading = None
        module.reform(device=None)
    if weights == "packed" or not requantizable(module.encoding):
        return
    if weights == "both":
        need_free_order()
    module.put_in("linear")
    module.reading = Reading(weights)
    renew_(module)
    module.reform(device=None)  # "both" puts packed weights in their layout at the next call


def renew_(module: AdaptableModule) -> None:
    """Requantizes weights, again into the same memory. Waits for the device."""
    if module.reading is None:
        return
    lost = []
    for projection in module.projections:
        here, there = module.value_of(projection), module.requantized_of(projection)
        with torch.no_grad():
            requantized = here.to(there.form, there.parts)
        for name, part, t in zip(
            requantized_names(projection), REQUANTIZED.parts, requantized.parts, strict=True
        ):
            if name not in module._buffers:
                # a parameter among buffers: averages of all buffers meet it too
                module.register_buffer(
                    name,
                    EncodedParameter(t, holds=f"{part.name} of {REQUANTIZED.name}"),
                    persistent=False,
                )
        lost += [] if requantized.lost is None else [requantized.lost]
    if lost:
        module.reading = replace(module.reading, lost=tuple(torch.stack(lost).sum(0).tolist()))
    settle_(module)


def settle_(module: AdaptableModule) -> None:
    """What depends on where weights lie. Puts parameters that only state dicts read in the host's
    memory.
    """
    if module.weights == "fp8":
        _move_packed(module, torch.device("cpu"))
    if (reading := module.reading) and reading.weights == "both":
        device = module.requantized_of(module.projections[0]).parts[0].device
        target, shape = backends.TARGETS.get(device.type), module.shape_of(module.projections[-1])
        average = (
            target.requantized_from(device, *shape) if target and target.requantized_from else FROM
        )
        alternate = getattr(module, "interleave", 0) % _RUN  # for which FP8 has only slow kernels
        module.reading = replace(reading, rows=maxsize if alternate else ceil(average * shape[0]))


def _move_packed(module: AdaptableModule, device: torch.device) -> None:
    for names in module.part_names.values():
        for p in (module._parameters[name] for name in names):
            if p is not None:
                p.data = p.data.to(device)


def need_free_order() -> None:
    """OptionError if results must not depend on the batch."""
    if options.current().row_order:
        raise OptionError(
            'weights = "both" with order = "row"',
            expected='"packed" or "fp8": with both, numbers depend on how many rows there are',
            where="prepare_",
        )


def requantized_names(projection: str) -> tuple[str, str]:
    """The buffers that hold a requantized weight."""
    return f"{projection}_requantized", f"{projection}_requantized_scale"


def requantizing(modules: Iterable[torch.nn.Module]) -> str:
    """What requantizing did to modules, in a sentence; "" if none is requantized."""
    read: list[Any] = [m for m in modules if getattr(m, "reading", None) is not None]
    if not read:
        return ""
    exact, blocks, error, weight = map(sum, zip(*(m.reading.lost for m in read), strict=True))
    weights = [(m.value_of(p), m.requantized_of(p)) for m in read for p in m.projections]
    packed, requantized = (
        f"{sum(t.nbytes for w in form for t in w.parts) / 2**20:,.1f} MiB"
        for form in zip(*weights, strict=True)
    )
    how = "exactly"
    if exact != blocks:
        some = f"{exact:,.0f} of {blocks:,.0f} blocks exact"
        how = f"rounded once more, by {(error / weight) ** 0.5:.2g} of their norm ({some})"
    if any(m.weights == "both" for m in read):
        how += "; results depend on how many rows are computed together"
    names = " and ".join(dict.fromkeys(m.encoding.name for m in read))
    to = f"{REQUANTIZED.name} ({requantized})"
    return f"{len(read)} x weights in {names} ({packed}) requantized to {to} {how}"
