"""A weight as one value: its parts, and the form in which they are stored.

A form is a way from the linear order of an encoding: numbers as a float module has them, padding, a
layout, bits as integers, a device. Each step has an inverse, so `Weight.to` is the only conversion.
Only another encoding loses: numbers are rounded to it, and codes in few bits to FP8.

A weight is no tensor subclass. One would be a parameter of one name and dtype, but state dicts and
files have each part under its own name, so hooks on modules would stay. FSDP2 asks a subclass for
more hooks (`fsdp_pre_all_gather`, `chunk`), torch.distributed.checkpoint pickles it, and compiled
graphs unwrap it at each call. So modules keep parts as parameters (`encodings.encoded` is their
type), and their hooks ask the form.

>>> from dataclasses import replace
>>> from fusion_moe.encodings import MXFP4, quantize
>>> from fusion_moe.layouts import Padding
>>> w = Weight(quantize(torch.eye(32)[:24], MXFP4), Form(MXFP4))
>>> tiles = w.to(replace(w.form, layout="w16x64", padding=Padding((24, 32), (32, 64))))
>>> [*tiles.parts[0].shape], torch.equal(tiles.to(w.form).parts[0], w.parts[0])
([32, 32], True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ...encodings import F32, PLAIN, Encoding, Part, Quantized, has_values
from ...encodings.checks import check_floats
from ...encodings.requantized import requantize
from ...layouts import LAYOUTS, Layout, Padding
from ...runtime.host_memory import pages
from ..gate_up import deinterleave, interleave
from ..local import Sharding
from .base import by_kernels, round_

INTEGERS = {1: torch.uint8, 4: torch.int32}  # by size; gloo and NCCL have none of two bytes
_PANEL, _LARGE_PANEL = 2**24, 2**28  # elements converted at once, and rounded on a GPU


@dataclass(frozen=True)
class View:
    """Numbers [E, N, K] as a float module stores them: [E, K, N], or rows of gate and up in turns;
    a bias [E, N] too.
    """

    transposed: bool = False
    interleaved: bool = False

    def pack(self, *parts: Tensor, encoding: Encoding | None = None) -> tuple[Tensor, ...]:
        """Parts of a weight with gate above up, [..., N, K] -> the same as the float module stores
        them: rows interleaved, or transposed. encoding: not used.
        """
        return tuple(self._turned(self.interleave(t)) for t in parts)

    def unpack(self, *parts: Tensor, encoding: Encoding | None = None) -> tuple[Tensor, ...]:
        """The inverse."""
        return tuple(self.deinterleave(self._turned(t)) for t in parts)

    def interleave(self, rows: Tensor) -> Tensor:
        """Rows [E, N, ...], gate above up -> in the order of the float module's."""
        return interleave(rows, 1, 1) if self.interleaved else rows

    def deinterleave(self, rows: Tensor) -> Tensor:
        """The inverse."""
        return deinterleave(rows, 1, 1) if self.interleaved else rows

    def _turned(self, t: Tensor) -> Tensor:
        return t.mT if self.transposed and t.dim() == 3 else t


@dataclass(frozen=True)
class Form:
    """How a weight [..., N, K] is stored.

    layout: of elements and block scales; padding: to whole tiles of it, None for none; runs: equal
    runs of rows that are rounded by themselves, such as gate and up; integers: whether scales in
    8-bit floats and of matrices are integers of the same bits, since a wrapper may cast floats, and
    gloo has no 8-bit ones; view: of numbers; share: how state dicts represent a rank's share;
    device: for whose kernels this form was chosen, None as long as nobody chose.
    """

    encoding: Encoding
    layout: str = "linear"
    padding: Padding | None = None
    runs: int = 1
    integers: bool = False
    view: View | None = None
    share: Sharding | None = None
    device: torch.device | None = None

    @property
    def steps(self) -> tuple[View | Padding | Layout, ...]:
        """What leads from the linear order to this form."""
        layout = None if self.layout == "linear" else LAYOUTS[self.layout]
        return tuple(step for step in (self.view, self.padding, layout) if step)

    def pack(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parts in linear order -> in this form, but for integers."""
        for step in self.steps:
            parts = step.pack(*parts, encoding=self.encoding)
        return parts

    def unpack(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The inverse of `pack`."""
        for step in reversed(self.steps):
            parts = step.unpack(*parts, encoding=self.encoding)
        return parts


@dataclass(frozen=True, eq=False)
class Weight:
    """The parts of a weight [..., N, K] in a form. lost: what rounding to FP8 did to it, as
    `encodings.requantized.requantize` counts.
    """

    parts: Sequence[Tensor]
    form: Form
    lost: Tensor | None = None

    @classmethod
    def of_numbers(cls, numbers: Tensor, view: View | None = None) -> Weight:
        """Floats [..., N, K], or in the order of a float module."""
        return cls((numbers,), Form(PLAIN.get(numbers.dtype, F32), view=view))

    @property
    def linear(self) -> Quantized:
        """The parts in the linear order."""
        return Quantized(*self.form.unpack(self.natural), encoding=self.form.encoding)

    def matrices(self) -> Iterator[Weight]:
        """Each matrix by itself."""
        for e in range(len(self.parts[0])) if self.parts[0].dim() > 2 else (...,):
            yield Weight([t[e] for t in self.parts], self.form)

    @property
    def natural(self) -> list[Tensor]:
        """The parts in the dtypes of the encoding."""
        return [as_part(t, p) for t, p in zip(self.parts, self.form.encoding.parts, strict=False)]

    def to(
        self,
        form: Form,
        into: Sequence[Tensor] = (),
        matrix_scale: Tensor | None = None,
        scales: str = "max",
    ) -> Weight:
        """The weight in another form, converted some matrices at a time. into: where its parts go,
        on any device; otherwise they are new, but for scales of matrices that stay and for views.

        matrix_scale, scales: for numbers that are rounded, as in `quantize`.
        """
        parts, recodes = self.natural, self.form.encoding != form.encoding
        if not (into or recodes) and self.form.steps == form.steps:
            return Weight(_stored(parts, form), form)
        kernels = recodes and self._rounds_to(form, (into or parts)[0].device)
        if kernels and not into:  # nothing to copy
            (x,) = self.form.unpack([t.detach() for t in parts])
            encoded = round_(
                x.contiguous(), form.encoding, form.runs, matrix_scale, form.layout, scales
            )
            shapes = self._shapes(form)
            return Weight([t.reshape(s) for t, s in zip(encoded, shapes, strict=True)], form)
        moved = None if into or recodes else 1 + len(form.encoding.block_scales)
        own = [*into] or [*self.empty(form)[:moved], *(parts[moved:] if moved else ())]
        lost = [
            _convert(panel, to, self.form, form, kernels, scale, scales)
            for panel, to, scale in self._panels(
                parts[:moved], own[:moved], matrix_scale, bool(into)
            )
        ]
        counts = [count for count in lost if count is not None]
        return Weight(_stored(own, form), form, torch.stack(counts).sum(0) if counts else None)

    def _rounds_to(self, form: Form, device: torch.device) -> bool:
        """Whether kernels write what they round in the layout of a form: where there are any, and
        runs of rows are whole tiles.
        """
        return (
            self.form.encoding.plain
            and by_kernels(device, form.encoding)
            and not form.padding
            and self.shape[-2] // form.runs % LAYOUTS[form.layout].tile[0] == 0
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K], without padding."""
        form, first = self.form, self.parts[0]
        *lead, n, packed_k = (first.mT if form.view and form.view.transposed else first).shape
        return *lead, *(
            form.padding.shape if form.padding else (n, form.encoding.elements(packed_k))
        )

    def _shapes(self, form: Form) -> list[Sequence[int]]:
        """Those of the parts in a form."""
        *lead, n, k = self.shape
        n, k = form.padding.padded if form.padding else (n, k)
        runs, of = form.runs if form.runs > 1 else 0, form.encoding
        stored = LAYOUTS[form.layout].storage_shape
        shapes = ((part, of.part_shape(part, lead, n, k, runs)) for part in of.parts)
        return [stored(shape) if part.of_blocks else shape for part, shape in shapes]

    def empty(self, form: Form) -> list[Tensor]:
        """Memory for the weight in a form."""
        with torch.inference_mode(self.parts[0].is_inference()):
            return [
                empty(shape, self.parts[0], part.dtype)
                for part, shape in zip(form.encoding.parts, self._shapes(form), strict=True)
            ]

    def _panels(
        self, parts: Sequence[Tensor], own: Sequence[Tensor], scale: Tensor | None, large: bool
    ) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor | None]]:
        """Some matrices of a weight, on the device of what they become, that, and their scale."""
        if not has_values(parts[0]):
            return
        if own[0].dim() == 2:
            parts, own = [t[None] for t in parts], [t[None] for t in own]
            scale = None if scale is None else scale[None]
        device = own[0].device
        size = _LARGE_PANEL if large and device.type != "cpu" else _PANEL
        step = max(1, size * len(own[0]) // max(1, prod(self.shape)))
        for start in range(0, len(own[0]), step):
            some = slice(start, start + step)
            panel = [t.detach()[some].to(device) for t in parts]
            yield panel, [t.detach()[some] for t in own], None if scale is None else scale[some]


def _convert(
    parts: Sequence[Tensor],
    own: Sequence[Tensor],
    here: Form,
    there: Form,
    kernels: bool,
    matrix_scale: Tensor | None,
    scales: str,
) -> Tensor | None:
    """Puts parts in one form into memory for another; what FP8 lost. kernels: those of the device
    round and put in order.
    """
    parts, lost = here.unpack(parts), None
    if here.encoding.plain and here.encoding != there.encoding:
        numbers, layout = parts[0].contiguous(), there.layout if kernels else "linear"
        parts = round_(numbers, there.encoding, there.runs, matrix_scale, layout, scales)
    elif here.encoding != there.encoding:
        parts, lost = requantize(Quantized(*parts, encoding=here.encoding), there.runs)
    for t, new in zip(own, parts if kernels else there.pack(parts), strict=True):
        t.view(torch.uint8).copy_(new.contiguous().reshape(t.shape).view(torch.uint8))
    return lost


def _stored(parts: Sequence[Tensor], form: Form) -> list[Tensor]:
    """Parts in the dtypes of the encoding, as integers if the form has them so."""
    return [
        t.view(INTEGERS[t.dtype.itemsize])
        if form.integers and part.scale and t.dtype.itemsize in INTEGERS
        else t
        for t, part in zip(parts, form.encoding.parts, strict=False)
    ]


def as_part(t: Tensor, part: Part) -> Tensor:
    """The tensor of a part, which may be stored as integers, in the part's dtype."""
    return (
        t.view(part.dtype) if part.dtype.is_floating_point and not t.dtype.is_floating_point else t
    )


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory: on the CPU on large pages, as for all weights."""
    return (
        pages.empty(shape, dtype)
        if pages.takes(like)
        else torch.empty(shape, dtype=dtype, device=like.device)
    )


def rounded(
    x: Tensor,
    encoding: Encoding,
    runs: int = 1,
    matrix_scale: Tensor | None = None,
    layout: str = "linear",
    scales: str = "max",
) -> Quantized:
    """x float[G, N, K] -> the same in an encoding. If matrices have scales, one for each of so many
    runs of their rows: matrix_scale, f32[G] or [G, runs], or chosen. layout: of the result; on
    CUDA, if runs are whole tiles of it. scales: the rule for those of blocks.
    """
    check_floats(x, encoding)
    weight = Weight.of_numbers(x).to(Form(encoding, layout, runs=runs), (), matrix_scale, scales)
    return Quantized(*weight.parts, encoding=encoding)
