"""Weights in the layout that a target's kernels read fastest, in place of those that a program
reads as they lie: of constants (frontends/constants.py), and of eager calls, which keep them if the
option `keep_weights` says so.

Kept weights are those of a caller's tensors: of one storage, at one place, in one version. They are
made at the second call that reads it, and freed with the storage, or once it is written to; weights
that were written to FEW times are not made again. torch counts no writes through `.data`, nor those
of other libraries' kernels: hence an option.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..encodings import check_part_scales
from ..errors import NonFiniteError
from ..ir import Fusion, FusionDefinition, Op, Value
from ..ir.kinds.quantized import format_of
from ..layouts import LAYOUTS
from ..passes.rewrite import rewrite
from ..schedule.product import products
from ..target import Target

FEW = 3
Stored = Mapping[Op, tuple[str, Sequence[Tensor]]]  # of a pack: the layout, and the parts in it


def to_reorder(fusion: Fusion, target: Target) -> Iterator[tuple[Op, str]]:
    """The packs of weights whose kernels would rather read another layout, and which. The parts are
    inputs, and only the product reads them.
    """
    for product in products(fusion):
        pack = fusion.producer(product.b, "pack")
        if pack is None or product.kind != "fprop" or not pack.outputs[0].type.quantized:
            continue
        weight = pack.outputs[0].type
        wanted = target.layout_of(weight.dtype, format_of(product.a.type))
        alone = all(len(fusion.readers[v]) == 1 for v in (*pack.values, *pack.outputs))
        inputs = all(v in fusion.inputs for v in pack.values) and not set(weight.symbols())
        if wanted == weight.layout or not (alone and inputs):
            continue
        n, k = weight.shape[-2:]
        if not LAYOUTS[wanted].why_not(n, k, weight.encoding):
            yield pack, wanted


def in_layout(pack: Op, wanted: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a weight, given in the layout of `pack`, in the layout `wanted`: copies. An
    empty list if a scale is NaN or infinite, which kernels for the given layout report.
    """
    encoding = pack.outputs[0].type.encoding
    elements = (tensors[0].mT if pack.attrs.get("transposed") else tensors[0]).contiguous()
    stored = LAYOUTS[pack.attrs["layout"]]
    linear = stored.unpack(elements, *tensors[1:], encoding=encoding)
    try:
        for part, t in zip(encoding.parts, linear, strict=True):
            check_part_scales(part, t, part.name)
    except NonFiniteError:
        return []
    return list(LAYOUTS[wanted].pack(*linear, encoding=encoding))


def reading(fusion: Fusion, stored: Stored) -> Fusion:
    """The program that reads weights in other layouts."""
    types = {
        v: v.type.with_(shape=tuple(t.shape))
        for pack, (_, parts) in stored.items()
        for v, t in zip(pack.values, parts, strict=True)
    }
    layouts = {pack.outputs[0]: layout for pack, (layout, _) in stored.items()}

    def rule(fd: FusionDefinition, op: Op, inputs: Sequence[Any]) -> Sequence[Value] | None:
        if op in stored:
            attrs = {**op.attrs, "layout": stored[op][0], "transposed": False}
            return fd.append(op.kind, inputs, attrs)
        if wanted := next((layouts[v] for v in op.values if v in layouts), ""):
            return fd.append(op.kind, inputs, {**op.attrs, "w_layout": wanted})
        return None

    return rewrite(fusion, rule, types)


# Kept for eager calls -----------------------------------------------------------------------------


@dataclass
class _Kept:
    """What is known of one weight. state: the versions of its tensors when it was last read; parts:
    those that are new; those in the caller's memory by shape, strides and offset, so that they may
    be freed.
    """

    state: Any
    parts: list[Any] = field(default_factory=list)
    written: int = 0


_kept: dict[Any, _Kept] = {}


def kept(pack: Op, wanted: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a weight in a layout, of these tensors as they are now; none if they are read
    for the first time, or are not to be kept.
    """
    captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if captured or any(t.is_inference() for t in tensors):
        return []  # a graph's own kernels must see writes; or torch counts none
    state, of = [t._version for t in tensors], pack.attrs
    form = wanted, of["encoding"], of["layout"], of.get("transposed")
    # others begin at the same address, too, or are of a storage that counts by itself
    places = [(t.untyped_storage()._cdata, t.data_ptr(), t.shape, t.stride()) for t in tensors]
    key = *form, *places
    entry = _kept.get(key)
    if entry is None:
        _kept[key] = _Kept(state)
        for t in tensors:  # memory of others may then lie there
            weakref.finalize(t.untyped_storage(), _kept.pop, key, None)
        return []
    if entry.state != state:
        entry.state, entry.written = state, entry.written + bool(entry.parts)
        entry.parts = []
        return []
    if not entry.parts and entry.written < FEW:
        entry.parts = [
            made if made.data_ptr() != t.data_ptr() else _place(made)
            for made, t in zip(in_layout(pack, wanted, tensors), tensors, strict=False)
        ]
        if not entry.parts:  # nor will they be next time
            entry.written = FEW
    return [
        made if isinstance(made, Tensor) else t.as_strided(*made)
        for made, t in zip(entry.parts, tensors, strict=False)
    ]


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset()
