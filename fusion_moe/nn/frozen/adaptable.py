"""Modules with encoded weights, each of which may have an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from sys import maxsize
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ... import backends
from ...encodings import REQUANTIZED, EncodedParameter, requantizable
from ...encodings.encoded import plain
from ...errors import need_one_of
from ...layouts import Layout
from ...messages import warn_once
from ...target import ACTIVATION_FORMATS, Target
from ..local import local
from .packed import PackedModule
from .requantized import Reading, need_free_order, requantized_names
from .weight import Form, Weight

FROM = 128  # rows for each matrix from which "both" reads the requantized ones; on CUDA, by a table
_RUN = 32  # rows of gate that follow each other, or more, where kernels multiply FP8


class AdaptableModule(PackedModule):
    """A module with encoded weights and optional adapters that train, each in a submodule
    `<projection>_lora` (lora/) or outside.

    projections: the names of the weights; targets: what `add_lora_` calls them; wrappers: the
    adapters of another library, which wrap this module, by projection. An adapter has A [G, r, K],
    B [G, N, r], scale, and whether it is disabled. reading: what weights are read as
    (requantized.py), None: as they are. fixed: why the module can have no adapter, no requantized
    weights and no share of a rank, "" if it can. adapters_on: where its adapters compute, which it
    can have nevertheless, if weights lie elsewhere.
    """

    projections: tuple[str, ...]
    targets: tuple[str, ...]
    activation_format: str
    # names of the module that this one was converted from, for which these are this module's
    renamed: Mapping[str, str] = MappingProxyType({})
    reading: Reading | None
    fixed = ""
    adapters_on: torch.device | None = None

    def __init__(self, activation_format: str) -> None:
        super().__init__()
        need_one_of(
            "activation_format", activation_format, ACTIVATION_FORMATS, where=type(self).__name__
        )
        self.activation_format, self.reading = activation_format, None
        self.wrappers: dict[str, Any] = {}  # no submodules, since this is one of theirs

    @property
    def weights(self) -> str:
        """What weights are read as: "packed", "fp8" or "both"."""
        return self.reading.weights if self.reading else "packed"

    def layout_on(self, target: Target) -> str:
        """As in `PackedModule`; parameters that only state dicts read stay linear."""
        return "linear" if self.weights == "fp8" else super().layout_on(target)

    def why_not(self, layout: Layout) -> str:
        """Why the module's weights cannot be stored in a layout, or "": beside the reasons of
        `PackedModule`, weights that would be padded while a requantized copy is kept, which is not.
        """
        padded = [weight for weight in self.part_names if self.padding(weight, layout)]
        if self.weights != "packed" and padded:
            name = self.part_names[padded[0]][0]
            return f"{name} would be padded, and its requantized weight is not"
        return super().why_not(layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdaptableModule:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.renew()

    def read_as_(self, weights: str) -> None:
        """Reads weights by a policy: packed if they cannot be requantized, such as FP8, which are
        read as they are.
        """
        if self.reading is not None:
            self._move_packed(self.requantized_of(self.projections[0]).parts[0].device)
            for projection in self.projections:
                for name in requantized_names(projection):
                    delattr(self, name)
            self.reading = None
            self.reform(device=None)
        if weights == "packed" or not requantizable(self.encoding):
            return
        if weights == "both":
            need_free_order()
        self.put_in("linear")
        self.reading = Reading(weights)
        self.renew()
        self.reform(device=None)  # "both" puts packed weights in their layout at the next call

    def renew(self) -> None:
        """Makes anew what is made of the weights, which have changed in place: requantizes them,
        into the same memory, and waits for the device.
        """
        if self.reading is None:
            return
        lost = []
        for projection in self.projections:
            here, there = self.value_of(projection), self.requantized_of(projection)
            with torch.no_grad():
                requantized = here.to(there.form, there.parts)
            for name, part, t in zip(
                requantized_names(projection), REQUANTIZED.parts, requantized.parts, strict=True
            ):
                if name not in self._buffers:
                    # a parameter among buffers: averages of all buffers meet it too
                    holds = f"{part.name} of {REQUANTIZED.name}"
                    self.register_buffer(name, EncodedParameter(t, holds=holds), persistent=False)
            lost += [] if requantized.lost is None else [requantized.lost]
        counts = tuple(torch.stack(lost).sum(0).tolist()) if lost else self.reading.lost
        self.reading = replace(self.reading, lost=counts, of=self._versions())
        self._settle()

    def _versions(self) -> tuple[tuple[int, int], ...]:
        """Which parameters the weights are, and how often torch has counted writes to them."""
        own: dict[str, Any] = {**self._buffers, **self._parameters}
        parts = (own.get(name) for names in self.part_names.values() for name in names)
        return tuple((id(p), 0 if p is None or p.is_inference() else p._version) for p in parts)

    def reform(self, **changes: Any) -> None:
        """As in `PackedModule`; what was requantized has the same numbers as before."""
        known = self.reading and self.reading.of == self._versions()
        super().reform(**changes)
        if known and self.reading:
            self.reading = replace(self.reading, of=self._versions())

    def _settle(self) -> None:
        """What depends on where weights lie. Puts parameters that only state dicts read in the
        host's memory.
        """
        if self.weights == "fp8":
            self._move_packed(torch.device("cpu"))
        if (reading := self.reading) and reading.weights == "both":
            device = self.requantized_of(self.projections[0]).parts[0].device
            target, shape = backends.TARGETS.get(device.type), self.shape_of(self.projections[-1])
            average = (
                target.requantized_from(device, *shape)
                if target and target.requantized_from
                else FROM
            )
            alternate = getattr(self, "interleave", 0) % _RUN  # for which FP8 has only slow kernels
            self.reading = replace(reading, rows=maxsize if alternate else ceil(average * shape[0]))

    def _move_packed(self, device: torch.device) -> None:
        for names in self.part_names.values():
            for p in (self._parameters[name] for name in names):
                if p is not None:
                    p.data = p.data.to(device)

    def _requantized(self, rows: int) -> bool:
        """Whether products of so many rows read requantized weights, which are made anew if torch
        has counted a write to what they were made of.
        """
        if (reading := self.reading) is None:
            return False
        if not torch.compiler.is_compiling():
            if reading.weights == "both":
                need_free_order()
            if reading.of != self._versions() and not _get_current_dispatch_mode():
                self.renew()
        return reading.weights == "fp8" or rows >= reading.rows

    def _operand(self, projection: str, of_fp8: bool) -> list[Tensor]:
        """The parts of a weight that a product reads."""
        if not of_fp8:
            return self._parts(projection)
        return [
            t
            for name in requantized_names(projection)
            if (t := self._buffers.get(name)) is not None
        ]

    def requantized_of(self, projection: str) -> Weight:
        """A requantized weight with its form."""
        parts = list(map(plain, self._operand(projection, of_fp8=True)))
        return Weight(parts, Form(REQUANTIZED, runs=self.matrices(projection)))

    def _format(self, of_fp8: bool) -> dict[str, str]:
        """The arguments that say how these parts are stored, and what rows are rounded to: rows in
        FP8 have no use beside weights in fewer bits, which are multiplied in 16.
        """
        form = self.forms[self.projections[0]]
        few = self.activation_format == "fp8" and not of_fp8 and requantizable(form.encoding)
        return {
            "weight_format": REQUANTIZED.name if of_fp8 else form.encoding.name,
            "weight_layout": "linear" if of_fp8 else form.layout,
            "activation_format": "bf16" if few else self.activation_format,
        }

    def shape_of(self, projection: str) -> tuple[int, int, int]:
        """E, N and K of the weight of a projection, without padding."""
        elements = getattr(self, self.part_names[projection][0])
        return (len(elements), *self.matrix_shape(projection))

    def adapter(self, projection: str) -> Any:
        """The adapter of a projection; None if it has none."""
        return self._modules.get(f"{projection}_lora", self.wrappers.get(projection))

    @property
    def adapted(self) -> bool:
        """Whether any projection has an adapter."""
        return any(self.adapter(projection) is not None for projection in self.projections)

    def _factors(self, projection: str, scale: float) -> tuple[Tensor | None, Tensor | None]:
        """A [G, r, K] and B [G, N, r] of a projection's adapter, padded like its weight. scale: by
        which the product multiplies B @ A.
        """
        adapter = self.adapter(projection)
        if adapter is None or adapter.disabled:
            return None, None
        a, b = local(adapter.A), local(adapter.B)
        if (
            self.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not a.requires_grad
        ):
            warn_once(
                f"training mode, but the adapters of {type(self).__name__} are frozen: add them "
                "after what freezes a model, and load them to train"
            )
        if adapter.scale != scale:
            b = b * adapter.scale
        return self.padded_factors(projection, a, b)

    def padded_factors(self, projection: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a [G, r, K] and b [G, N, r], padded like a projection's weight."""
        padding = self.forms[projection].padding
        return (padding.pad_columns(a), padding.pad_rows(b, -2)) if padding else (a, b)

    def _product(self, projection: str, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [..., K] that are sorted by group, ends i32[G] of the groups -> [..., N], with what
        an adapter adds.
        """
        padding, of_fp8, scale = self.forms[projection].padding, False, self._lora_scale
        if self.reading is not None:
            of_fp8 = self._requantized(rows.numel() // rows.shape[-1])
        y = torch.ops.fusion_moe.grouped_mm(
            padding.pad_columns(rows) if padding else rows,
            self._operand(projection, of_fp8),
            ends,
            *self._factors(projection, scale),
            **self._format(of_fp8),
            lora_scale=scale,
        )
        return padding.cut_rows(y) if padding else y

    @property
    def _lora_scale(self) -> float:
        """The factor of B @ A for all projections; 1 if theirs differ."""
        adapters = [self.adapter(projection) for projection in self.projections]
        scales = {adapter.scale for adapter in adapters if adapter and not adapter.disabled}
        return scales.pop() if len(scales) == 1 else 1.0
