"""Modules with encoded weights: parameters that are not trained, whose bytes survive a cast of the
model. In memory they have a target's layout and padding, in every state dict the linear layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ... import backends, options, plugins
from ...encodings import (
    EncodedParameter,
    Encoding,
    Part,
    Quantized,
    as_plain_tensors,
    check_part_scales,
    has_values,
)
from ...encodings.encoded import Encoded, Stored, encoded, plain
from ...errors import NonFiniteError, UnsupportedError
from ...layouts import LAYOUTS, Layout, Padding, ceil_to
from ...messages import warn_once
from ...runtime.host_memory import pages
from ...target import Target
from ..local import Sharding
from .base import frozen, own_parameters
from .weight import INTEGERS, Form, View, Weight, as_part

_ordering = threading.Lock()
FROZEN = "_frozen_scale"  # buffers of `qat_`, by how their names end


class PackedModule(nn.Module):
    """A module with encoded weights. Its own tensors move but are never cast, since a cast would
    change what their bytes mean.

    castable: the names of exceptions. part_names: for each weight, the parameters that hold its
    parts. forms: for each, how these are stored (weight.py); state dicts have the linear form, in
    the dtypes of the encoding. brought: whether weights are brought for each call, in the linear
    layout, by somebody who sets parameters. scales: the rule that chose the scales of blocks, as in
    `NVFP4Config`; frozen_scales: whether those of matrices stay when weights change, since `qat_`
    froze them.
    """

    castable: tuple[str, ...] = ()
    part_names: dict[str, tuple[str, ...]]
    forms: dict[str, Form]
    brought = False
    scales = "max"
    frozen_scales = False
    # how the module that this one was converted from stores floats: as [E, K, N]; with rows of gate
    # and up that alternate
    transposed = False
    interleaved = False
    turned = False  # transposed, of which PEFT does not know (lora's factors.py)
    lent = False  # an engine takes parameters off for a while, as when vLLM reloads

    def __init__(self) -> None:
        super().__init__()
        plugins.load_all()  # of which some look at modules from now on
        self.part_names, self.forms = {}, {}

    def hold(self, weight: str, names: tuple[str, ...], parts: Quantized) -> None:
        """Makes the parts of a weight, in linear order, parameters of these names."""
        self.part_names[weight], self.forms[weight] = names, Form(parts.encoding)
        for name, part in zip(names, parts, strict=True):
            if part.dim():
                setattr(self, name, frozen(part))
            else:  # FSDP2 refuses parameters that are scalars
                self.register_buffer(name, part.detach())

    @property
    def form(self) -> Form:
        """The form (encoding, layout, views) of the module's first weight. Forms of its other
        weights differ only in their padding.
        """
        return next(iter(self.forms.values()))

    @property
    def encoding(self) -> Encoding:
        """The encoding of all weights."""
        return self.form.encoding

    @property
    def weight_layout(self) -> str:
        """The layout of elements and block scales."""
        return self.form.layout

    @property
    def sharding(self) -> Sharding | None:
        """How state dicts represent tensors that are a rank's share; None: they are all of them."""
        return self.form.share

    @property
    def packed(self) -> dict[str, tuple[str, ...]]:
        """For each weight, the parameters that hold its elements and block scales."""
        return {
            weight: names[: 1 + len(self.forms[weight].encoding.block_scales)]
            for weight, names in self.part_names.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the weights: codes and scales."""
        return sum(t.nbytes for t in (*own_parameters(self), *self.buffers(recurse=False)))

    def requires_grad_(self, requires_grad: bool = True) -> PackedModule:
        """As torch's; UnsupportedError for a request to train codes."""
        if requires_grad and not all(p.is_floating_point() for p in own_parameters(self)):
            raise UnsupportedError(
                "quantized weights do not train",
                expected="requires_grad_(False)",
                todo="train weights in floating point, and quantize them then: docs/training.md",
                where=type(self).__name__,
            )
        return super().requires_grad_(requires_grad)

    def weight_of(self, weight: str) -> Quantized:
        """A weight, as it is stored."""
        return Quantized(*map(plain, self._parts(weight)), encoding=self.encoding)

    def value_of(self, weight: str) -> Weight:
        """A weight with its form."""
        return Weight([t.detach() for t in self.weight_of(weight)], self.forms[weight])

    def view_of(self, weight: str) -> View:
        """How the module that this one was converted from stores a weight's numbers [..., N, K],
        and its bias [E, N].
        """
        return View(self.transposed, self.interleaved and weight == "gate_up")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; codes and scales become an `EncodedParameter`."""
        super().register_parameter(name, self._typed(name, param))

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch's. FSDP2 calls this with its shards, and `register_parameter` so, because it is
        not torch's own.
        """
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """As torch's; UnsupportedError for a part of a weight: torch's parametrizations, such as
        weight_norm, take a parameter away to compute it from others.
        """
        if not self.lent and self.__dict__.get("forms") and name in self._parts_by_name():
            raise UnsupportedError(
                f"{name} of {type(self).__name__}, removed or parametrized",
                expected="a part of a weight in few bits, which stays one",
                todo="parametrize the module in floating point, or add_lora_ beside its weights",
            )
        super().__delattr__(name)

    def _typed(self, name: str, t: Any, kind: type[Encoded] = Encoded) -> Any:
        """A tensor of a name, as encoded if it holds the part of that name."""
        part = self._parts_by_name().get(name) if self.__dict__.get("forms") else None
        if t is None or part is None or self.encoding.plain:
            return t
        stored = part.dtype, INTEGERS.get(part.dtype.itemsize)
        return encoded(t, f"{part.name} of {self.encoding.name}", kind) if t.dtype in stored else t

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's. In a process group a module whose own parameters are listed, as DDP and FSDP2
        do first, stores them as integers.
        """
        if (
            not (recurse or self.form.integers or self.sharding or self.encoding.plain)
            and not any(p.is_meta for p in own_parameters(self))
            and distributed.is_available()
            and distributed.is_initialized()
        ):
            self.order()  # who takes parameters keeps their layout
            self.reform(integers=True)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _parts_by_name(self) -> dict[str, Part]:
        """The part of the encoding that each parameter holds."""
        return {
            name: part
            for weight, names in self.part_names.items()
            for name, part in zip(names, self.forms[weight].encoding.parts, strict=True)
        }

    def _parts(self, weight: str) -> list[Tensor]:
        """The parts of a weight, as they are stored, in the dtypes of the encoding."""
        # getattr takes ten times as long; wrappers such as FSDP put attributes in their place
        own: dict[str, Any] = self._parameters
        tensors = [
            own[key] if key in own else getattr(self, key) for key in self.part_names[weight]
        ]
        return (
            [as_part(t, part) for t, part in zip(tensors, self.encoding.parts, strict=True)]
            if self.forms[weight].integers
            else tensors
        )

    def matrix_shape(self, weight: str) -> tuple[int, int]:
        """N and K of a weight, without padding."""
        if padding := self.forms[weight].padding:
            return padding.shape
        *_, n, packed_k = getattr(self, self.part_names[weight][0]).shape
        return n, self.encoding.elements(packed_k)

    def row_scales(self, weight: str) -> int:
        """S: how many runs of a matrix's rows have their own scale."""
        scales = [t for part, t in self.weight_of(weight).named() if part.of_matrix]
        return max([t.shape[1] for t in scales if t.dim() > 1], default=1)

    def matrices(self, weight: str) -> int:
        """How many matrices of equal size a weight holds, one above the other along N: 2 for gate
        above up, 1 for others and for gate and up whose rows alternate.
        """
        return 2 if weight == "gate_up" and not getattr(self, "interleave", 0) else 1

    def rounded_runs(self, weight: str) -> int:
        """How many runs of a matrix's rows are rounded by themselves: those with a scale of their
        own and, if blocks have several rows, matrices.
        """
        blocks_of_rows = any(scale.rows > 1 for scale in self.encoding.scales)
        return self.matrices(weight) if blocks_of_rows else self.row_scales(weight)

    def padding(self, weight: str, layout: Layout) -> Padding:
        """The padding that makes a weight whole tiles of a layout: rows are padded in each run with
        one scale.
        """
        n, k = self.matrix_shape(weight)
        (rows, columns), runs = layout.tile, self.row_scales(weight)
        padded = n if n % rows == 0 else runs * ceil_to(n // runs, rows)
        return Padding((n, k), (padded, ceil_to(k, columns)), runs)

    def why_not(self, layout: Layout) -> str:
        """Why the weights cannot be put in a layout; "" if they can."""
        if self.brought:
            return "they are brought for each call"
        for weight, (name, *_) in self.part_names.items():
            padding, scales = self.padding(weight, layout), self.row_scales(weight)
            if why := layout.why_not(*padding.padded, self.encoding):
                return why
            if padding.padded[0] != padding.shape[0] and (
                scales not in (1, padding.runs) or scales > 2
            ):
                return (
                    f"{name} has scales for {scales} runs of its {padding.shape[0]} rows, "
                    "which are no whole tiles"
                )
        return ""

    @property
    def _first(self) -> Any:
        """The elements of the first weight."""
        return getattr(self, next(iter(self.part_names.values()))[0])

    def order(self) -> None:
        """Puts encoded weights in the layout that the kernels of their device read, once: when a
        module moves there, or at its first call.

        Weights that a CUDA graph or a traced program reads keep their layout, and so do parameters
        that are tensor subclasses.
        """
        if (
            torch.compiler.is_compiling()
            or self.form.device is not None
            or self.form.integers
            or not options.current().order_weights
        ):
            return
        p, wanted = self._first, options.current().target
        if (
            type(p) not in (EncodedParameter, nn.Parameter)
            or _get_current_dispatch_mode()
            or (wanted == "auto" and p.device.type not in backends.TARGETS)
        ):
            return
        with _ordering:  # calls in other threads wait
            as_it_is = self.encoding.plain or self.weight_layout != "linear"
            captured = p.is_cuda and torch.cuda.is_current_stream_capturing()
            if not (self.form.device or as_it_is or captured):
                layout = self.layout_on(backends.find(wanted, p.device))
                try:
                    why = self.put_in(layout) if layout != "linear" else ""
                except (NonFiniteError, torch.OutOfMemoryError) as error:
                    why = str(error)
                if why:
                    warn_once(f"weights stay in the linear layout: {type(self).__name__}: {why}")
            self.decided()

    def decided(self) -> None:
        """Keeps the layout that weights have, as long as they stay on their device."""
        self.reform(device=self._first.device)

    def layout_on(self, target: Target) -> str:
        """The layout that a target's kernels read fastest."""
        return target.layout_of(self.encoding.name, getattr(self, "activation_format", "bf16"))

    def put_in(self, layout: str) -> str:
        """Puts weights in a layout. Returns why they are in the linear one instead; "" if not.

        NonFiniteError for block scales that no quantizer writes, for which it waits for the device.
        """
        why = self.why_not(LAYOUTS[layout])
        layout = "linear" if why else layout
        if layout != "linear" and self.weight_layout == "linear":
            for name, part in self._parts_by_name().items():
                if part.of_blocks and has_values(getattr(self, name)):
                    own = plain(getattr(self, name)).detach()
                    check_part_scales(part, as_part(own, part), name)
        self.reform(layout=layout)
        return why

    def reform(self, **changes: Any) -> None:
        """Puts all weights in other forms, one after the other: in new parameters if bytes move, so
        that other holders of the old ones (a state dict, an exported program) keep them. padding
        follows the layout. An exception undoes what was already done.
        """
        old = dict(self.forms)
        try:
            for weight, form in old.items():
                if (layout := changes.get("layout", form.layout)) != form.layout:
                    changes["padding"] = self.padding(weight, LAYOUTS[layout]) or None
                self._put(weight, replace(form, **changes))
        except BaseException:
            for weight, form in old.items():
                self._put(weight, form)
            raise

    def _put(self, weight: str, form: Form) -> None:
        here, own = self.forms[weight], self._parameters
        parts = self.value_of(weight).to(form).parts
        for name, t in zip(self.part_names[weight], parts, strict=True):
            p: Any = own.get(name)
            if p is not None and t.dtype != p.dtype:
                with torch.inference_mode(p.is_inference()), as_plain_tensors():
                    p.data = t
            elif here.steps != form.steps and name in self.packed[weight]:
                new = nn.Parameter(t, requires_grad=False)
                new.__dict__.update(p.__dict__)
                setattr(self, name, new)
        self.forms[weight] = form

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        here = self._first.device
        moves = fn(torch.empty(0, dtype=torch.uint8, device=here)).device.type != here.type
        if moves:
            self.reform(layout="linear", device=None)
        fixed = [
            t
            for name, t in (*self._parameters.items(), *self._buffers.items())
            if name not in self.castable
        ]

        def keep_dtype(t: Tensor) -> Tensor:
            moved = plain(fn(t))  # of shards torch makes parameters only so
            if not any(t is p for p in fixed):
                return moved
            kept = t.to(moved.device) if moved.dtype != t.dtype else moved
            return pages.on_large_pages(kept) if kept.device != t.device else kept

        buffers = dict(self._buffers)
        with as_plain_tensors():
            super()._apply(keep_dtype, recurse)
        own = self._parameters
        own.update((name, self._typed(name, p)) for name, p in own.items())
        for name, t in buffers.items():
            if isinstance(t, EncodedParameter) and (moved := self._buffers[name]) is not None:
                self._buffers[name] = EncodedParameter(moved, **t.__dict__)
        if moves:
            self.order()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        own = {name: destination[prefix + name] for name in self._own(prefix, destination)}
        for weight, names in self.part_names.items():
            form = self.forms[weight]
            moved = form.steps or form.integers or not keep_vars
            if moved and own.keys() >= {*names}:
                stored = Weight([plain(own[name]).detach() for name in names], form)
                own.update(zip(names, stored.linear, strict=True))
        if self.sharding is not None:
            own = {name: self.sharding.whole(name, plain(t)) for name, t in own.items()}
        parts = self._parts_by_name()
        for name, t in own.items():
            numbers = name not in parts or parts[name].dtype == torch.float32
            destination[prefix + name] = t if numbers else self._typed(name, t, Stored)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: list[str],
    ) -> None:
        own, entries = self._own(prefix, state_dict), dict(state_dict)
        parts, refused = self._parts_by_name(), []
        for name in own:
            key, part = prefix + name, parts.get(name)
            entries[key] = t = self._as_stored(plain(entries[key]), part)
            if why := self._why_not_load(key, t, part):
                refused.append(why)
        if refused:
            errors += refused
            return
        if self.sharding is not None:
            entries.update(
                {prefix + name: self.sharding.share(name, entries[prefix + name]) for name in own}
            )
        for weight, names in self.packed.items() if self.weight_layout != "linear" else ():
            if not {*own} >= {*names}:
                continue
            keys = [prefix + name for name in names]
            tensors = [entries[key].detach() for key in keys]
            if wrong := self._why_not_shape(weight, keys, tensors):
                errors.append(wrong)
                tensors = [t.detach() for t in self.weight_of(weight)[: len(keys)]]
            else:
                tensors = [*self.forms[weight].pack(tensors)]
            entries.update(zip(keys, tensors, strict=True))
        for name in parts.keys() & own if self.form.integers else ():
            entries[prefix + name] = entries[prefix + name].view(getattr(self, name).dtype)
        super()._load_from_state_dict(
            entries, prefix, metadata, strict, missing, unexpected, errors
        )

    def _as_stored(self, t: Tensor, part: Part | None) -> Tensor:
        """A tensor of a state dict in the dtype of its part: bytes are those of 8-bit floats, and
        numbers of plain weights are cast.
        """
        if part is None or t.layout != torch.strided:
            return t
        if self.encoding.plain:
            return t if t.is_complex() else t.to(part.dtype)
        want = part.dtype
        is_bytes = t.dtype == torch.uint8 and want.is_floating_point and want.itemsize == 1
        return t.view(want) if is_bytes else t

    def _why_not_load(self, key: str, t: Tensor, part: Part | None) -> str:
        """An error text in torch's style for another layout or dtype, and for scales that no
        quantizer writes; "" if there is none.
        """
        if t.layout != torch.strided:
            return f"{key} is {t.layout}, not strided."
        if part and t.dtype != part.dtype:
            return (
                f"dtype mismatch for {key}: copying a param of {t.dtype} from checkpoint, the "
                f"dtype in current model is {part.dtype}."
            )
        try:
            if part and type(t) in (Tensor, nn.Parameter) and not t.is_meta:
                check_part_scales(part, t, key)  # waits for the device
        except NonFiniteError as error:
            return str(error)
        return ""

    def _why_not_shape(self, weight: str, keys: Sequence[str], parts: Sequence[Tensor]) -> str:
        """An error text in torch's style if parts of a state dict are not of a weight's sizes; ""
        if they are.
        """
        encoding, lead = self.encoding, self._parts(weight)[0].shape[:-2]
        for key, t, part in zip(keys, parts, encoding.parts, strict=False):
            if t.shape != (want := encoding.part_shape(part, lead, *self.matrix_shape(weight))):
                return (
                    f"size mismatch for {key}: copying a param with shape {t.shape} from "
                    f"checkpoint, the shape in current model is {torch.Size(want)}."
                )
        return ""

    def _own(self, prefix: str, tensors: Mapping[str, Any]) -> list[str]:
        """The names of the module's own tensors that are in a state dict, as tensors: torch refuses
        anything else.
        """
        return [
            name
            for name in (*self._parameters, *self._buffers)
            if isinstance(tensors.get(prefix + name), Tensor)
        ]
