"""update_weights_: new weights in the memory of the old ones, for whoever trains a model and serves
or rolls out with it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...encodings import (
    F32,
    Encoding,
    check_finite,
    check_part_scales,
    check_parts,
)
from ...encodings.encoding import FLOATS
from ...errors import CheckpointError, DtypeError, ShapeError, UnsupportedError, did_you_mean
from ..local import is_dtensor
from .adaptable import AdaptableModule
from .base import by_kernels, rounded
from .packed import PackedModule, Packing, packing_of

_WHERE = "update_weights_"
_PANEL, _LARGE_PANEL = 2**24, 2**28  # elements that are quantized at once, on CPUs and on GPUs


def update_weights_(
    module: nn.Module, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> None:
    """Gives a module new weights in place: no parameter changes its address, so CUDA graphs,
    compiled models and engines read the new ones. Names are those of the module's state dict.

    An encoded weight takes either numbers, float [..., N, K] under the name of its elements, or all
    of its parts as a state dict has them. Numbers are quantized as by `quantize_`, with as many
    scales of a matrix as the weight has: `Experts` take gate_up_proj [E, 2I, H], rows as the module
    has them, and down_proj [E, H, I]; `QuantizedLinear` weight [N, K]. A rank that has a share of a
    weight takes that share. Every other tensor is copied; floats may have another float dtype.
    Weights that are not named stay. Tensors may be on any device, are read one weight at a time,
    and are ordered with other work on the current stream. The checks of values wait for the device.

    Args:
        module: any module, also one that torch.compile returned.
        tensors: a mapping, which is checked as a whole before anything changes; or pairs of names
            and tensors, such as of a trainer that sends one weight after the other, each of which
            is checked before it changes anything.

    Raises:
        CheckpointError: for an unknown name, or parts without the others of their weight.
        ShapeError, DtypeError: for a tensor that does not fit.
        NonFiniteError: for NaN or infinity, and for scales that no quantizer writes.
        UnsupportedError: for a parameter that FSDP2 or a parallel plan divides.

    After an error that comes too late for nothing to have changed (one in the middle of pairs, no
    memory), the module is never half new: what was to change is NaN, for graphs to show it, and the
    next call of a module raises UnsupportedError, until an update gives it all of its tensors.
    """
    module = getattr(module, "_orig_mod", module)
    places = _places(module)
    begun: list[_Place] = []
    if isinstance(tensors, Mapping):
        updates: Iterable[_Update] = list(_checked(places, tensors.items()))
    else:
        updates = _checked(places, tensors)
    try:
        for place, given in updates:
            begun.append(place)
            place.write(given)
    except BaseException:
        for place in begun:
            place.spoil()
        raise
    for module in {place.module for place in begun}:
        if isinstance(module, AdaptableModule):
            module.renew()
    for place in begun:
        there = [other for other in places.values() if other.module is place.module]
        if isinstance(place.module, _Unusable) and all(other in begun for other in there):
            place.module.__class__ = type(place.module).__mro__[2]


_Update = tuple["_Place", dict[str, Tensor]]


class _Unusable:
    """What is put in front of the class of a module whose weights are half new. torch.compile looks
    at the class before it runs what it compiled.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "weights that an update left unfinished",
            expected="an update that ends",
            todo="fusion_moe.update_weights_ with all tensors of the module",
            where=type(self).__name__,
        )


@dataclass(frozen=True)
class _Place:
    """A tensor of a module, or the parts of one of its weights; where: the module's name; weight:
    that of the weight.
    """

    module: Any
    names: tuple[str, ...]
    where: str = field(compare=False)
    weight: str = ""

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of a weight; None for a tensor that is no part of one."""
        return self.module.encoding if self.weight else None

    @property
    def own(self) -> list[Tensor]:
        """The module's tensors, in the dtypes of the encoding."""
        if self.weight:
            return [t.detach() for t in self.module.weight_of(self.weight)]
        return [getattr(self.module, name).detach() for name in self.names]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        shape = tuple(getattr(self.module, self.names[0]).shape)
        return (*shape[:-2], *self.module.matrix_shape(self.weight)) if self.weight else shape

    def has_numbers(self, given: Mapping[str, Tensor]) -> bool:
        """Whether this is given as numbers, not as the parts of a weight."""
        elements = given.get(self.names[0])
        return elements is not None and (self.encoding is None or elements.dtype in FLOATS)

    def check(self, given: dict[str, Tensor]) -> None:
        """Raises what `update_weights_` says. Bytes become views as the floats that they are."""
        encoding, name = self.encoding, self.where + self.names[0]
        if any(is_dtensor(getattr(self.module, key)) for key in self.names):
            raise UnsupportedError(
                f"{name}, a DTensor",
                expected="a parameter of one device",
                todo="load_state_dict takes what is divided",
                where=_WHERE,
            )
        if encoding is not None and not (self.has_numbers(given) and len(given) == 1):
            self._check_parts(given, encoding)
            return
        (t,), (own, *_) = given.values(), self.own
        _need_shape(name, tuple(t.shape), self.shape)
        if t.dtype != own.dtype and not (t.dtype in FLOATS and (encoding or own.dtype in FLOATS)):
            raise DtypeError(f"{name} is {t.dtype}", expected=f"{own.dtype}", where=_WHERE)
        if t.dtype in FLOATS:
            check_finite(t.detach(), encoding or F32, name)

    def _check_parts(self, given: dict[str, Tensor], encoding: Encoding) -> None:
        names = [self.where + name for name in self.names]
        if missing := [self.where + name for name in self.names if name not in given]:
            raise CheckpointError(
                f"{', '.join(self.where + name for name in given)} without {', '.join(missing)}",
                expected=f"{names[0]} in float32, bfloat16 or float16, or all of "
                f"{', '.join(names)}",
                where=_WHERE,
            )
        for name, part in zip(self.names, encoding.parts, strict=True):
            given[name] = self.module._as_stored(given[name], part)
        parts = [given[name].detach() for name in self.names]
        _need_shape(
            names[0], check_parts(parts, encoding, where=f"{_WHERE}: {names[0]}"), self.shape
        )
        for name, part, t, own in zip(names, encoding.parts, parts, self.own, strict=True):
            if part.of_matrix:
                _need_shape(name, tuple(t.shape), tuple(own.shape))
            check_part_scales(part, t, name)

    def write(self, given: Mapping[str, Tensor]) -> None:
        """Puts checked tensors in place, a panel of matrices at a time."""
        own, encoding = self.own, self.encoding
        with torch.inference_mode(own[0].is_inference()), torch.no_grad():
            if encoding is None:
                own[0].copy_(given[self.names[0]])
                return
            tensors = [given[name] for name in self.names if name in given]
            if own[0].dim() == 2:
                own, tensors = [t[None] for t in own], [t[None] for t in tensors]
            runs = self.module.rounded_runs(self.weight) if self.has_numbers(given) else 0
            packing, rule = packing_of(self.module, self.weight), self.module.scales
            write_weight_(own, tensors, encoding, packing, runs, scales=rule)

    def spoil(self) -> None:
        """Makes the tensors useless, and the module unusable."""
        if not isinstance(self.module, _Unusable):
            cls = type(self.module)
            self.module.__class__ = type(cls.__name__, (_Unusable, cls), {})
        for t in self.own:
            if t.is_floating_point():
                with torch.inference_mode(t.is_inference()), torch.no_grad():
                    t.fill_(float("nan"))


def write_weight_(
    own: Sequence[Tensor],
    given: Sequence[Tensor],
    encoding: Encoding,
    packing: Packing,
    runs: int,
    matrix_scale: Tensor | None = None,
    scales: str = "max",
) -> None:
    """Puts a weight into its parts as they are stored, a panel of matrices at a time. given: parts
    in linear order or, with `runs` scales of a matrix, numbers [E, N, K], which are rounded.
    """
    device, (n, k) = own[0].device, packing.padding.shape
    step = max(1, (_PANEL if device.type == "cpu" else _LARGE_PANEL) // (n * k))
    in_order = order_by_kernels(device, encoding, packing, runs, scales)
    for start in range(0, len(own[0]), step):
        some = slice(start, start + step)
        parts: Sequence[Tensor] = [t[some].to(device).contiguous() for t in given]
        if runs:
            scale = None if matrix_scale is None else matrix_scale[some]
            parts = rounded(parts[0], encoding, runs, scale, in_order, scales)
        if in_order == "linear":
            parts = packing.pack(parts, encoding)
        for t, made in zip(own, parts, strict=True):
            t[some].view(torch.uint8).copy_(made.reshape(t[some].shape).view(torch.uint8))


def order_by_kernels(
    device: torch.device, encoding: Encoding, packing: Packing, runs: int, scales: str = "max"
) -> str:
    """The layout in which kernels write the parts of a weight that they round: the one that it is
    stored in, if rows with a scale of their own are whole tiles of it; "linear" without kernels.
    """
    layout, (n, _) = packing.layout, packing.padding.shape
    whole = runs and not packing.padding and n // runs % layout.tile[0] == 0
    return layout.name if whole and by_kernels(device, encoding, scales) else "linear"


def _need_shape(name: str, found: tuple[int, ...], want: tuple[int, ...]) -> None:
    if found != want:
        raise ShapeError(
            f"{name} is {list(found)}",
            expected=f"{list(want)}, as the module",
            todo="rows are out-features: transpose what is stored [E, K, N]"
            if sorted(found) == sorted(want)
            else "",
            where=_WHERE,
        )


def _places(module: nn.Module) -> dict[str, _Place]:
    """By the names of a state dict, all that an update may change."""
    found: dict[str, _Place] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        where = f"{name}." if name else ""
        for key, t in (*owner._parameters.items(), *owner._buffers.items()):
            if t is not None and key not in owner._non_persistent_buffers_set:
                found[where + key] = _Place(owner, (key,), where)
        if isinstance(owner, PackedModule):
            for weight, keys in owner.part_names.items():
                found |= dict.fromkeys(
                    (where + key for key in keys), _Place(owner, keys, where, weight)
                )
    return found


def _checked(
    places: Mapping[str, _Place], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[_Update]:
    """Each weight with what it gets, once all of it is there."""
    waiting: dict[_Place, dict[str, Tensor]] = {}
    for name, t in tensors:
        if (place := places.get(name)) is None:
            raise CheckpointError(
                f"{name}, which the module does not have",
                expected="names of its state dict",
                todo=did_you_mean(name, places),
                where=_WHERE,
            )
        given = waiting.setdefault(place, {})
        given[name.removeprefix(place.where)] = t
        if place.has_numbers(given) or len(given) == len(place.names):
            place.check(given)
            yield place, waiting.pop(place)
    for place, given in waiting.items():
        place.check(given)  # raises: parts are missing
