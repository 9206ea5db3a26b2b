"""Encoded weights of a module in a layout: in memory they have a target's layout and padding, in
every state dict the linear layout.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ... import backends, options
from ...encodings import (
    Encoding,
    Part,
    check_part_scales,
)
from ...errors import NonFiniteError, UnsupportedError
from ...layouts import LAYOUTS, Layout, Padding
from ...layouts.groups import ceil_to
from ...runtime.host_memory import pages
from ..local import Sharding
from .base import FrozenModule

log = logging.getLogger("fusion_moe")
_ordering = threading.Lock()
_INTEGERS = {1: torch.uint8, 4: torch.int32}  # by size; gloo and NCCL have none of two bytes


class PackedModule(FrozenModule):
    """A module with encoded weights.

    part_names: for each weight, the parameters that hold its parts. as_integers: whether 8-bit
    floats and scales of matrices are stored as integers of the same bits, since a wrapper may cast
    floats, and gloo has no 8-bit ones. State dicts have the dtypes of the encoding. packed: the
    names of the elements and block scales of each weight; weight_layout: their layout; paddings: of
    weights that are not whole tiles of the layout, by the name of their elements; considered:
    whether `order` has decided about the weights where they are now; sharding: how state dicts
    represent tensors that are a rank's share.
    """

    packed: tuple[tuple[str, ...], ...] = ()
    part_names: Mapping[str, tuple[str, ...]] = {}
    encoding: Encoding
    weight_layout: str = "linear"
    paddings: Mapping[str, Padding] = {}
    considered = False
    sharding: Sharding | None = None
    as_integers = False

    def __init__(self) -> None:
        super().__init__()
        self.as_integers = False
        # per instance: torch.compile guards class attributes in each class of the MRO
        self.weight_layout, self.paddings = "linear", {}

    @property
    def is_transposed(self) -> bool:
        """False: weights are [E, N, K]. PEFT asks before it adapts a parameter: UnsupportedError if
        its numbers are codes.
        """
        if self.encoding.plain:
            return False
        found = f"an adapter of another library on a parameter of {self.encoding.name} codes"
        todo = (
            "fusion_moe.nn.add_lora_(model) adapts experts; name other layers in the library's "
            "target_modules"
        )
        raise UnsupportedError(
            found, expected="parameters that are numbers", todo=todo, where=type(self).__name__
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's. In a process group a module whose own parameters are listed, as DDP and FSDP2
        do first, stores them as integers.
        """
        if (
            not (recurse or self.as_integers or self.sharding)
            and distributed.is_available()
            and distributed.is_initialized()
        ):
            self._become_integers()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _become_integers(self) -> None:
        """Before a wrapper takes parameters: their dtypes and their layout stay what they are
        now.
        """
        if self.encoding.plain or any(
            p.is_meta for p in self._parameters.values() if p is not None
        ):
            return
        self.order()
        self.as_integers = True
        for name, part in self._parts_by_name().items():
            p = self._parameters.get(name)
            if (
                p is not None
                and not p.requires_grad
                and part.scale
                and p.dtype == part.dtype
                and part.dtype.itemsize in _INTEGERS
            ):
                with torch.inference_mode(p.is_inference()):
                    p.data = p.data.view(_INTEGERS[part.dtype.itemsize])

    def _parts_by_name(self) -> dict[str, Part]:
        """The part of the encoding that each parameter holds."""
        return {
            name: part
            for names in self.part_names.values()
            for name, part in zip(names, self.encoding.parts, strict=True)
        }

    def _parts(self, weight: str) -> list[Tensor]:
        """The parts of a weight, as they are stored, in the dtypes of the encoding."""
        # getattr takes ten times as long; wrappers such as FSDP put attributes in their place
        own: dict[str, Any] = self._parameters
        tensors = [
            own[key] if key in own else self._replaced(key) for key in self.part_names[weight]
        ]
        return (
            [as_part(t, part) for t, part in zip(tensors, self.encoding.parts, strict=True)]
            if self.as_integers
            else tensors
        )

    def _replaced(self, key: str) -> Any:
        """What is in the place of a parameter. UnsupportedError for what torch computes from
        codes.
        """
        if "parametrizations" in self._modules and not self.encoding.plain:
            found, todo = (
                f"{key} of {self.encoding.name} codes, parametrized",
                "fusion_moe.nn.add_lora_(model) adapts experts",
            )
            raise UnsupportedError(
                found, expected="the codes as they are", todo=todo, where=type(self).__name__
            )
        return getattr(self, key)

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """N and K of the weight whose elements have this name, without padding."""
        if name in self.paddings:
            return self.paddings[name].shape
        *_, n, packed_k = getattr(self, name).shape
        return n, self.encoding.elements(packed_k)

    def row_scales(self, name: str) -> int:
        """S: how many runs of a matrix's rows have their own scale."""
        return 1

    def padding(self, name: str, layout: Layout) -> Padding:
        """The padding that makes a weight whole tiles of a layout: rows are padded in each run with
        one scale.
        """
        n, k = self.matrix_shape(name)
        (rows, columns), runs = layout.tile, self.row_scales(name)
        padded = n if n % rows == 0 else runs * ceil_to(n // runs, rows)
        return Padding((n, k), (padded, ceil_to(k, columns)), runs)

    def why_not(self, layout: Layout) -> str:
        """Why the weights cannot be put in a layout; "" if they can."""
        for name, *_ in self.packed:
            padding, scales = self.padding(name, layout), self.row_scales(name)
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

    def order(self) -> None:
        """Puts encoded weights in the layout that the kernels of their device read, once: when a
        module moves there, or at its first call.

        Weights that a CUDA graph or a traced program reads keep their layout, and so do parameters
        that are tensor subclasses.
        """
        if (
            torch.compiler.is_compiling()
            or self.considered
            or self.as_integers
            or not options.current().order_weights
        ):
            return
        p, wanted = getattr(self, self.packed[0][0]), options.current().target
        if (
            type(p) is not nn.Parameter
            or _get_current_dispatch_mode()
            or (wanted == "auto" and p.device.type not in backends.TARGETS)
        ):
            return
        with _ordering:  # calls in other threads wait
            captured = p.is_cuda and torch.cuda.is_current_stream_capturing()
            if not (
                self.considered or captured or self.encoding.plain or self.weight_layout != "linear"
            ):
                self._order(backends.find(wanted, p.device).weight_layout)
            self.considered = True

    def _order(self, layout: str) -> None:
        """Puts weights in a layout, or logs why they stay as they are."""
        why = self.why_not(LAYOUTS[layout])
        try:
            if layout != "linear" and not why:
                self.check_block_scales()
                relayout_(self, layout)
        except (NonFiniteError, torch.OutOfMemoryError) as error:
            why = str(error)
        if why:
            say_once(f"weights stay in the linear layout: {type(self).__name__}: {why}")

    def check_block_scales(self) -> None:
        """NonFiniteError for block scales, in linear order, that no quantizer writes. Waits for the
        device.
        """
        for name, part in self._parts_by_name().items():
            if part.of_blocks:
                check_part_scales(part, as_part(getattr(self, name).detach(), part), name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        here = getattr(self, self.packed[0][0]).device
        moves = fn(torch.empty(0, dtype=torch.uint8, device=here)).device.type != here.type
        if moves:
            relayout_(self, "linear")
        super()._apply(fn, recurse)
        if moves:
            self.considered = False
            self.order()
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, part in (
            (prefix + name, part)
            for name, part in self._parts_by_name().items()
            if prefix + name in destination
        ):
            destination[key] = as_part(destination[key], part)
        for names, keys in self._reordered(destination, prefix):
            linear = _packing(self, names[0]).unpack(
                [destination[key].detach() for key in keys], self.encoding
            )
            destination.update(zip(keys, linear, strict=True))
        if self.sharding is not None:
            destination.update(
                {
                    prefix + name: self.sharding.whole(name, destination[prefix + name])
                    for name in self._own(prefix, destination)
                }
            )

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
        entries, own = dict(state_dict), self._own(prefix, state_dict)
        fixed = {name: prefix + name for name in own if name not in self.castable}
        refused = [
            f"{prefix}{name} is {layout}, not strided."
            for name in own
            if (layout := entries[prefix + name].layout) != torch.strided
        ]
        refused = refused or [
            why
            for name, key in fixed.items()
            if (why := self._why_not_load(name, key, entries[key]))
        ]
        if refused:
            errors += refused
            return
        entries.update({key: self._as_stored(name, entries[key]) for name, key in fixed.items()})
        if self.sharding is not None:
            entries.update(
                {prefix + name: self.sharding.share(name, entries[prefix + name]) for name in own}
            )
        for names, keys in self._reordered(entries, prefix):
            packing, parts = _packing(self, names[0]), [entries[key].detach() for key in keys]
            kept = [
                as_part(getattr(self, name).detach(), part)
                for name, part in zip(names, self.encoding.parts, strict=False)
            ]
            if wrong := packing.why_not(keys, parts, kept, self.encoding):
                errors.append(wrong)
            entries.update(
                zip(keys, kept if wrong else packing.pack(parts, self.encoding), strict=True)
            )
        for name, key in fixed.items() if self.as_integers else ():
            entries[key] = entries[key].view(getattr(self, name).dtype)
        super()._load_from_state_dict(
            entries, prefix, metadata, strict, missing, unexpected, errors
        )

    def _as_stored(self, name: str, t: Tensor) -> Tensor:
        """A tensor of a state dict in the dtype of the parameter: bytes are those of 8-bit floats,
        numbers may become wider.
        """
        want = self._dtype(name)
        if t.dtype == torch.uint8 and want.is_floating_point and want.itemsize == 1:
            return t.view(want)
        wider = _numbers(t.dtype, want) and (
            self.encoding.plain or torch.promote_types(t.dtype, want) == want
        )
        return t.to(want) if wider else t

    def _why_not_load(self, name: str, key: str, t: Tensor) -> str:
        """An error text in torch's style for another dtype, and for scales that no quantizer
        writes; "" if there is none.
        """
        stored, want, part = (
            self._as_stored(name, t),
            self._dtype(name),
            self._parts_by_name().get(name),
        )
        if stored.dtype != want:
            return (
                f"dtype mismatch for {key}: copying a param of {t.dtype} from checkpoint, the "
                f"dtype in current model is {want}."
            )
        try:
            if part and type(t) in (Tensor, nn.Parameter) and not t.is_meta:
                check_part_scales(part, stored, key)  # waits for the device
        except NonFiniteError as error:
            return str(error)
        return ""

    def _dtype(self, name: str) -> torch.dtype:
        """The dtype in state dicts of a tensor of this module."""
        part = None if self.encoding.plain else self._parts_by_name().get(name)
        return part.dtype if part else getattr(self, name).dtype

    def _own(self, prefix: str, tensors: Mapping[str, Any]) -> list[str]:
        """The names of the module's own tensors that are in a state dict, as tensors: torch refuses
        anything else.
        """
        return [
            name
            for name in (*self._parameters, *self._buffers)
            if isinstance(tensors.get(prefix + name), Tensor)
        ]

    def _reordered(
        self, tensors: Mapping[str, Any], prefix: str
    ) -> list[tuple[Sequence[str], list[str]]]:
        """Names and keys of those weights in a state dict whose layout in memory is not the linear
        one.
        """
        weights = [
            (names, [prefix + name for name in names])
            for names in self.packed
            if self.weight_layout != "linear"
        ]
        return [
            (names, keys)
            for names, keys in weights
            if all(isinstance(tensors.get(key), Tensor) for key in keys)
        ]


def as_part(t: Tensor, part: Part) -> Tensor:
    """The tensor of a part, which a module may have stored as integers, in the part's dtype."""
    return (
        t.view(part.dtype) if part.dtype.is_floating_point and not t.dtype.is_floating_point else t
    )


def _numbers(*dtypes: torch.dtype) -> bool:
    """Whether these are dtypes of numbers, not of encoded bytes."""
    return all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes)


@functools.cache
def say_once(text: str) -> None:
    log.warning("%s", text)


@dataclass(frozen=True)
class Packing:
    """How the parts of a weight are stored: padded, and then in a layout."""

    layout: Layout
    padding: Padding

    def pack(self, parts: Sequence[Tensor], encoding: Encoding) -> tuple[Tensor, ...]:
        """Elements and block scales as in a state dict -> the same, padded and in the layout."""
        return self.layout.pack(*self.padding.pad(*parts, encoding=encoding), encoding=encoding)

    def unpack(self, parts: Sequence[Tensor], encoding: Encoding) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        return self.padding.cut(*self.layout.unpack(*parts, encoding=encoding), encoding=encoding)

    def shapes(self, lead: Sequence[int], encoding: Encoding) -> list[tuple[int, ...]]:
        """The shapes of elements and block scales of a weight [*lead, N, K]."""
        return [
            encoding.part_shape(part, lead, *self.padding.padded)
            for part in encoding.parts
            if not part.of_matrix
        ]

    def why_not(
        self,
        keys: Sequence[str],
        parts: Sequence[Tensor],
        own: Sequence[Tensor],
        encoding: Encoding,
    ) -> str:
        """An error text in torch's style if parts of a state dict are not such a weight; "" if they
        are.
        """
        for key, t, part, mine in zip(keys, parts, encoding.parts, own, strict=False):
            if t.shape != (want := encoding.part_shape(part, mine.shape[:-2], *self.padding.shape)):
                return (
                    f"size mismatch for {key}: copying a param with shape {t.shape} from "
                    "checkpoint, the shape in current model is "
                    f"{torch.Size(want)}."
                )
        return ""


def _packing(module: PackedModule, name: str, layout: Layout | None = None) -> Packing:
    """How the weight whose elements have this name is stored, or would be in a given layout."""
    if layout is not None:
        return Packing(layout, module.padding(name, layout))
    shape = module.matrix_shape(name)
    return Packing(LAYOUTS[module.weight_layout], module.paddings.get(name, Padding(shape, shape)))


def relayout_(module: PackedModule, layout: str) -> None:
    """Puts the weights of a module in a layout, in new parameters, one weight at a time. An
    exception undoes what was already done.

    Other holders of the old parameters or of their memory (a state dict, an exported program) keep
    them unchanged.
    """
    if layout == module.weight_layout:
        return
    packings = {
        names: (_packing(module, names[0]), _packing(module, names[0], LAYOUTS[layout]))
        for names in module.packed
    }
    done = []
    try:
        for names, (here, there) in packings.items():
            _move(module, names, here, there)
            done.append(names)
    except BaseException:
        for names in done:
            _move(module, names, *reversed(packings[names]))
        raise
    module.weight_layout = layout
    module.paddings = {
        names[0]: there.padding for names, (_, there) in packings.items() if there.padding
    }


def _move(module: PackedModule, names: Sequence[str], here: Packing, there: Packing) -> None:
    """Replaces the parameters of one weight by new ones, made one matrix at a time."""
    old = [getattr(module, name) for name in names]
    parts = [as_part(p.detach(), part) for p, part in zip(old, module.encoding.parts, strict=False)]
    shapes = there.shapes(parts[0].shape[:-2], module.encoding)
    with torch.inference_mode(parts[0].is_inference()):
        moved_parts = [_empty(shape, part) for shape, part in zip(shapes, parts, strict=True)]
        for source, target in zip(_matrices(parts), _matrices(moved_parts), strict=True):
            moved = there.pack(here.unpack(source, module.encoding), module.encoding)
            for part, t in zip(target, moved, strict=True):
                part.view(torch.uint8).copy_(t.view(torch.uint8))
    for name, p, t in zip(names, old, moved_parts, strict=True):
        new = nn.Parameter(t, requires_grad=False)
        new.__dict__.update(p.__dict__)
        setattr(module, name, new)


def _empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialized memory: on the CPU on large pages, as for all weights."""
    return (
        pages.empty(shape, like.dtype)
        if pages.takes(like)
        else torch.empty(shape, dtype=like.dtype, device=like.device)
    )


def _matrices(parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The parts [E, N, ...] of a weight, for each matrix; [N, ...] is one matrix."""
    return (
        [parts]
        if parts[0].dim() == 2
        else [[part[e] for part in parts] for e in range(len(parts[0]))]
    )
