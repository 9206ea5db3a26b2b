"""Modules with encoded weights: parameters that are not trained, whose bytes survive a cast of the
model. In memory they have a target's layout and padding, in every state dict the linear layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ... import backends, options, plugins
from ...encodings import Encoding, Part, Quantized, check_part_scales
from ...encodings.encoded import (
    Encoded,
    EncodedParameter,
    Stored,
    as_plain_tensors,
    encoded,
    plain,
)
from ...encodings.search import has_values
from ...errors import NonFiniteError, UnsupportedError
from ...layouts import LAYOUTS, Layout, Padding
from ...layouts.groups import ceil_to
from ...messages.warn import warn_once
from ...runtime.host_memory import pages
from ...target import Target
from ..local import Sharding
from .base import own_parameters

_ordering = threading.Lock()
FROZEN = "_frozen_scale"  # buffers of `qat_`, by how their names end
_INTEGERS = {1: torch.uint8, 4: torch.int32}  # by size; gloo and NCCL have none of two bytes


class PackedModule(nn.Module):
    """A module with encoded weights. Its own tensors move but are never cast, since a cast would
    change what their bytes mean.

    castable: the names of exceptions. part_names: for each weight, the parameters that hold its
    parts. as_integers: whether 8-bit floats and scales of matrices are stored as integers of the
    same bits, since a wrapper may cast floats, and gloo has no 8-bit ones. State dicts have the
    dtypes of the encoding. weight_layout: the layout of elements and block scales; paddings: of
    weights that are not whole tiles of the layout; considered: whether `order` has decided about
    the weights where they are now; brought: whether they are brought for each call, in the linear
    layout, by somebody who sets parameters; scales: the rule that chose the scales of blocks, as in
    `NVFP4Config`; frozen_scales: whether those of matrices stay when weights change, since `qat_`
    froze them; sharding: how state dicts represent tensors that are a rank's share.
    """

    castable: tuple[str, ...] = ()
    part_names: Mapping[str, tuple[str, ...]]
    encoding: Encoding
    weight_layout: str
    paddings: Mapping[str, Padding]
    considered = False
    brought = False
    scales = "max"
    frozen_scales = False
    sharding: Sharding | None = None

    def __init__(self) -> None:
        super().__init__()
        plugins.load_all()  # of which some look at modules from now on
        # per instance: torch.compile guards class attributes in each class of the MRO
        self.as_integers, self.weight_layout, self.paddings = False, "linear", {}

    @property
    def packed(self) -> dict[str, tuple[str, ...]]:
        """For each weight, the parameters that hold its elements and block scales."""
        kept = 1 + len(self.encoding.block_scales)
        return {weight: names[:kept] for weight, names in self.part_names.items()}

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

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's; codes and scales become an `EncodedParameter`."""
        super().register_parameter(name, self._typed(name, param))

    def _typed(self, name: str, t: Any, kind: type[Encoded] = Encoded) -> Any:
        """A tensor of a name, as encoded if it holds the part of that name."""
        part = self._parts_by_name().get(name) if "encoding" in self.__dict__ else None
        if t is None or part is None or self.encoding.plain:
            return t
        stored = part.dtype, _INTEGERS.get(part.dtype.itemsize)
        return encoded(t, f"{part.name} of {self.encoding.name}", kind) if t.dtype in stored else t

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
            self.become_integers()
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def become_integers(self) -> None:
        """For who takes parameters and sends them, or casts floats: their dtypes and their layout
        stay what they are now.
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
                with torch.inference_mode(p.is_inference()), as_plain_tensors():
                    p.data = p.data.view(_INTEGERS[part.dtype.itemsize])

    def uncast(self) -> None:
        """Gives scales that something has cast to wider floats, tensor by tensor, their dtypes
        again.
        """
        for name, part in self._parts_by_name().items():
            p = self._parameters.get(name)
            if p is not None and part.scale and p.dtype == torch.float32 != part.dtype:
                with as_plain_tensors():
                    p.data = p.data.to(part.dtype)

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
            own[key] if key in own else getattr(self, key) for key in self.part_names[weight]
        ]
        return (
            [as_part(t, part) for t, part in zip(tensors, self.encoding.parts, strict=True)]
            if self.as_integers
            else tensors
        )

    def matrix_shape(self, weight: str) -> tuple[int, int]:
        """N and K of a weight, without padding."""
        if weight in self.paddings:
            return self.paddings[weight].shape
        *_, n, packed_k = getattr(self, self.part_names[weight][0]).shape
        return n, self.encoding.elements(packed_k)

    def row_scales(self, weight: str) -> int:
        """S: how many runs of a matrix's rows have their own scale."""
        scales = [t for part, t in self.weight_of(weight).named() if part.of_matrix]
        return max([t.shape[1] for t in scales if t.dim() > 1], default=1)

    def matrices(self, weight: str) -> int:
        """How many matrices lie above one another in a weight: gate and up, unless their rows
        alternate.
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
            or self.considered
            or self.as_integers
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
            captured = p.is_cuda and torch.cuda.is_current_stream_capturing()
            if not (
                self.considered or captured or self.encoding.plain or self.weight_layout != "linear"
            ):
                layout = self.layout_on(backends.find(wanted, p.device))
                try:
                    why = self.put_in(layout) if layout != "linear" else ""
                except (NonFiniteError, torch.OutOfMemoryError) as error:
                    why = str(error)
                if why:
                    warn_once(f"weights stay in the linear layout: {type(self).__name__}: {why}")
            self.considered = True

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
        relayout_(self, layout)
        return why

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        here = self._first.device
        moves = fn(torch.empty(0, dtype=torch.uint8, device=here)).device.type != here.type
        if moves:
            relayout_(self, "linear")
        fixed = [
            t
            for name, t in (*self._parameters.items(), *self._buffers.items())
            if name not in self.castable
        ]

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
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
            if not keep_vars:
                destination[key] = plain(destination[key])
            destination[key] = as_part(destination[key], part)
        for weight, keys in self._reordered(destination, prefix):
            linear = packing_of(self, weight).unpack(
                [plain(destination[key]).detach() for key in keys], self.encoding
            )
            destination.update(zip(keys, linear, strict=True))
        if self.sharding is not None:
            destination.update(
                {
                    prefix + name: self.sharding.whole(name, plain(destination[prefix + name]))
                    for name in self._own(prefix, destination)
                }
            )
        for name, part in self._parts_by_name().items():
            if part.dtype != torch.float32 and (t := destination.get(prefix + name)) is not None:
                destination[prefix + name] = self._typed(name, t, Stored)

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
        own = self._own(prefix, state_dict)
        entries = dict(state_dict) | {prefix + n: plain(state_dict[prefix + n]) for n in own}
        parts = self._parts_by_name()
        refused = []
        for name in own:
            key = prefix + name
            entries[key] = t = self._as_stored(entries[key], parts.get(name))
            if why := self._why_not_load(key, t, parts.get(name)):
                refused.append(why)
        if refused:
            errors += refused
            return
        if self.sharding is not None:
            entries.update(
                {prefix + name: self.sharding.share(name, entries[prefix + name]) for name in own}
            )
        for weight, keys in self._reordered(entries, prefix):
            packing, tensors = packing_of(self, weight), [entries[key].detach() for key in keys]
            kept = [t.detach() for t in self.weight_of(weight)[: len(keys)]]
            if wrong := packing.why_not(keys, tensors, kept, self.encoding):
                errors.append(wrong)
            entries.update(
                zip(keys, kept if wrong else packing.pack(tensors, self.encoding), strict=True)
            )
        for name in parts.keys() & own if self.as_integers else ():
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
            return t.to(part.dtype)
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

    def _own(self, prefix: str, tensors: Mapping[str, Any]) -> list[str]:
        """The names of the module's own tensors that are in a state dict, as tensors: torch refuses
        anything else.
        """
        return [
            name
            for name in (*self._parameters, *self._buffers)
            if isinstance(tensors.get(prefix + name), Tensor)
        ]

    def _reordered(self, tensors: Mapping[str, Any], prefix: str) -> list[tuple[str, list[str]]]:
        """The weights that a state dict has and whose layout in memory is not the linear one, each
        with the keys of its elements and block scales.
        """
        if self.weight_layout == "linear":
            return []
        keys = {weight: [prefix + n for n in names] for weight, names in self.packed.items()}
        return [
            (weight, its)
            for weight, its in keys.items()
            if all(isinstance(tensors.get(key), Tensor) for key in its)
        ]


def as_part(t: Tensor, part: Part) -> Tensor:
    """The tensor of a part, which a module may have stored as integers, in the part's dtype."""
    return (
        t.view(part.dtype) if part.dtype.is_floating_point and not t.dtype.is_floating_point else t
    )


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


def packing_of(module: PackedModule, weight: str, layout: Layout | None = None) -> Packing:
    """How a weight is stored, or would be in a given layout."""
    if layout is not None:
        return Packing(layout, module.padding(weight, layout))
    shape = module.matrix_shape(weight)
    padding = module.paddings.get(weight, Padding(shape, shape))
    return Packing(LAYOUTS[module.weight_layout], padding)


def relayout_(module: PackedModule, layout: str) -> None:
    """Puts the weights of a module in a layout, in new parameters, one weight at a time. An
    exception undoes what was already done.

    Other holders of the old parameters or of their memory (a state dict, an exported program) keep
    them unchanged.
    """
    if layout == module.weight_layout:
        return
    packings = {
        weight: (packing_of(module, weight), packing_of(module, weight, LAYOUTS[layout]))
        for weight in module.part_names
    }
    done = []
    try:
        for weight, (here, there) in packings.items():
            _move(module, weight, here, there)
            done.append(weight)
    except BaseException:
        for weight in done:
            _move(module, weight, *reversed(packings[weight]))
        raise
    module.weight_layout = layout
    module.paddings = {
        weight: there.padding for weight, (_, there) in packings.items() if there.padding
    }


def _move(module: PackedModule, weight: str, here: Packing, there: Packing) -> None:
    """Replaces the parameters of one weight by new ones, made one matrix at a time."""
    names = module.packed[weight]
    old = [getattr(module, name) for name in names]
    parts = [
        as_part(plain(p).detach(), part)
        for p, part in zip(old, module.encoding.parts, strict=False)
    ]
    lead, padded = parts[0].shape[:-2], there.padding.padded
    with torch.inference_mode(parts[0].is_inference()):
        moved_parts = [
            empty(module.encoding.part_shape(part, lead, *padded), t, t.dtype)
            for part, t in zip(module.encoding.parts, parts, strict=False)
        ]
        matrices = (
            zip(_matrices(parts), _matrices(moved_parts), strict=True)
            if has_values(parts[0])
            else []
        )
        for source, target in matrices:
            moved = there.pack(here.unpack(source, module.encoding), module.encoding)
            for part, t in zip(target, moved, strict=True):
                part.view(torch.uint8).copy_(t.view(torch.uint8))
    for name, p, t in zip(names, old, moved_parts, strict=True):
        new = nn.Parameter(t, requires_grad=False)
        new.__dict__.update(p.__dict__)
        setattr(module, name, new)


def empty_parts(x: Tensor, encoding: Encoding, padded: Sequence[int], runs: int) -> list[Tensor]:
    """Uninitialized memory for x float [E, N, K] in an encoding, as it is stored. runs: as in
    `Encoding.part_shape`.
    """
    n, k = padded
    return [
        empty(encoding.part_shape(part, x.shape[:1], n, k, runs), x, part.dtype)
        for part in encoding.parts
    ]


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory: on the CPU on large pages, as for all weights."""
    return (
        pages.empty(shape, dtype)
        if pages.takes(like)
        else torch.empty(shape, dtype=dtype, device=like.device)
    )


def _matrices(parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The parts [E, N, ...] of a weight, for each matrix; [N, ...] is one matrix."""
    return (
        [parts]
        if parts[0].dim() == 2
        else [[part[e] for part in parts] for e in range(len(parts[0]))]
    )
