"""What a module's weights in few bits are read as: packed, folded to FP8 (encodings/folding.py), or
either, by the number of rows.

Parameters stay what was loaded, and state dicts have nothing else; folded weights are buffers that
are not saved. With "fp8" the parameters lie in the host's memory, since only state dicts read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from sys import maxsize
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends, options
from ...encodings import Quantized
from ...encodings.encoded import EncodedParameter
from ...encodings.folding import FOLDED, fold, foldable
from ...errors import OptionError
from .packed import packing_of

if TYPE_CHECKING:
    from .adaptable import AdaptableModule

FROM = 128  # rows for each matrix from which "both" reads the folded ones; on CUDA, by a table
_RUN = 32  # rows of gate that follow each other, or more, where kernels multiply FP8
_PANEL = 2**24  # elements that are folded at once


@dataclass(frozen=True)
class Rounding:
    """What folding a module's weights did: exact of so many blocks; error: its norm, of that of the
    weights; nbytes: packed and folded.
    """

    encoding: str
    exact: int
    blocks: int
    error: float
    nbytes: tuple[int, int]

    def __str__(self) -> str:
        packed, folded = (f"{n / 2**20:,.1f} MiB" for n in self.nbytes)
        how = (
            "exactly"
            if self.exact == self.blocks
            else f"rounded once more, by {self.error:.2g} of their norm ({self.exact:,} of "
            f"{self.blocks:,} blocks exact)"
        )
        return f"weights in {self.encoding} ({packed}) folded to {FOLDED.name} ({folded}) {how}"


def fold_(module: AdaptableModule, weights: str) -> Rounding | None:
    """Makes a module read its weights by a policy; what that rounded, None for "packed" and for
    weights that cannot be folded, such as FP8, which are read as they are.
    """
    _forget(module)
    if weights == "packed" or not foldable(module.encoding):
        return None
    if weights == "both":
        need_free_order()
    module.put_in("linear")
    module.weights = weights
    for projection in module.projections:
        weight = module.weight_of(projection)
        lead, (n, k) = weight.shape[:-2], weight.shape[-2:]
        for name, part in zip(_names(projection), FOLDED.parts, strict=True):
            shape, where = FOLDED.part_shape(part, lead, n, k), weight.device
            buffer = torch.empty(shape, dtype=part.dtype, device=where)
            # a parameter among buffers: averages of all buffers meet it too
            held = EncodedParameter(buffer, holds=f"{part.name} of {FOLDED.name}")
            module.register_buffer(name, held, persistent=False)
    refold_(module)
    module.considered = False  # "both" puts packed weights in their layout at the next call
    return module.rounding


def refold_(module: AdaptableModule) -> None:
    """Folds weights that have changed, into the same memory. Waits for the device."""
    if module.weights == "packed":
        return
    counts = []
    with torch.no_grad():
        for projection in module.projections:
            for some, into in _panels(module, projection):
                found, counted = fold(some, module.matrices(projection))
                for part, t in zip(into, found, strict=True):
                    part.view(torch.uint8).copy_(t.view(torch.uint8))
                counts.append(counted)
    exact, blocks, error, weight = torch.stack(counts).sum(0).tolist() if counts else [0.0] * 4
    sizes = [sum(t.nbytes for t in of) for of in (_packed(module), _folded(module))]
    module.rounding = Rounding(
        module.encoding.name,
        int(exact),
        int(blocks),
        (error / weight) ** 0.5 if weight else 0.0,
        (sizes[0], sizes[1]),
    )
    settle_(module)


def settle_(module: AdaptableModule) -> None:
    """What depends on where weights lie. Puts parameters that only state dicts read in the host's
    memory.
    """
    if module.weights == "fp8":
        for p in _packed(module):
            p.data = p.data.cpu()
    if module.weights == "both":
        device, shape = _folded(module)[0].device, module.shape_of(module.projections[-1])
        target = backends.TARGETS.get(device.type)
        average = target.folded_from(device, *shape) if target and target.folded_from else FROM
        alternate = getattr(module, "interleave", 0) % _RUN  # for which FP8 has only slow kernels
        module.folded_from = maxsize if alternate else ceil(average * shape[0])


def need_free_order() -> None:
    """OptionError if results must not depend on the batch."""
    if options.current().row_order:
        raise OptionError(
            'weights = "both" with order = "row"',
            expected='"packed" or "fp8": with both, numbers depend on how many rows there are',
            where="prepare_",
        )


def folded_of(module: AdaptableModule, projection: str) -> list[Tensor]:
    """The parts of a folded weight."""
    own = module._buffers
    return [own[name] for name in _names(projection)]  # type: ignore[misc]


def _names(projection: str) -> tuple[str, str]:
    return f"{projection}_folded", f"{projection}_folded_scale"


def _panels(module: AdaptableModule, projection: str) -> Iterator[tuple[Quantized, list[Tensor]]]:
    """Some matrices at a time, on the device of what they become, in linear order."""
    into, weight = folded_of(module, projection), module.weight_of(projection)
    packing = packing_of(module, projection)
    step = max(1, _PANEL // max(1, into[0][0].numel()))
    for start in range(0, len(into[0]), step):
        some = slice(start, start + step)
        parts = [t.detach()[some].to(into[0].device) for t in weight]
        yield weight.of(packing.unpack(parts, module.encoding)), [t[some] for t in into]


def _packed(module: AdaptableModule) -> list[torch.nn.Parameter]:
    own = module._parameters
    found = (own[name] for names in module.part_names.values() for name in names)
    return [p for p in found if p is not None]


def _folded(module: AdaptableModule) -> list[Tensor]:
    return [t for projection in module.projections for t in folded_of(module, projection)]


def _forget(module: AdaptableModule) -> None:
    """Undoes `fold_`."""
    if module.weights == "packed":
        return
    where = _folded(module)[0].device
    for p in _packed(module):
        p.data = p.data.to(where)
    for projection in module.projections:
        for name in _names(projection):
            delattr(module, name)
    module.weights, module.rounding, module.considered = "packed", None, False


def folding(modules: Iterable[torch.nn.Module]) -> str:
    """What folding did to modules, in a sentence; "" if none is folded."""
    found: list[Any] = [m for m in modules if getattr(m, "rounding", None) is not None]
    if not found:
        return ""
    each: list[Rounding] = [m.rounding for m in found]
    squares = sum(r.error**2 for r in each) / len(each)
    packed, folded = (sum(n) for n in zip(*(r.nbytes for r in each), strict=True))
    all_of = Rounding(
        " and ".join(dict.fromkeys(r.encoding for r in each)),
        sum(r.exact for r in each),
        sum(r.blocks for r in each),
        squares**0.5,
        (packed, folded),
    )
    policies = {m.weights for m in found}
    depends = (
        "; results depend on how many rows are computed together" if "both" in policies else ""
    )
    return f"{len(found)} x {all_of}{depends}"
