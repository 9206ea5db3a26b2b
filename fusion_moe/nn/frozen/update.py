"""update_weights_: new weights in the memory of the old ones, for whoever trains a model and serves
or rolls out with it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...encodings import (
    F32,
    FLOATS,
    Encoding,
    check_finite,
    check_part_scales,
    check_parts,
    has_values,
    is_dtensor,
)
from ...encodings.encoded import plain
from ...errors import CheckpointError, DtypeError, ShapeError, UnsupportedError, did_you_mean
from ...messages import log
from ..local import Sharding
from .adaptable import AdaptableModule
from .packed import FROZEN, PackedModule
from .weight import Form, View, Weight

_WHERE = "update_weights_"


def update_weights_(
    module: nn.Module,
    tensors: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Gives a module new weights in place: no parameter changes its address, so CUDA graphs,
    compiled models and engines read the new ones. Names are those of the module's state dict.

    An encoded weight takes either numbers, floats under the name of its elements, or all of its
    parts as a state dict has them. Numbers are those of the module that `quantize_` replaced, in
    its order, which the family decides, never a shape: gpt-oss stores gate_up_proj [E, H, 2I] with
    gate and up interleaved, and down_proj [E, I, H]; Llama-4 and Aria [E, H, 2I], gate before up.
    So the state dict of the float model is right as it is. `Experts` that no `quantize_` made take
    what their constructors do, gate_up_proj [E, 2I, H], rows as the module has them, and down_proj
    [E, H, I]; `QuantizedLinear` takes weight [N, K]. A bias is in the order of its weight: that of
    the float module, unless the same update has parts of the weight.

    Numbers are quantized as by `quantize_`, with as many scales of a matrix as the weight has. A
    rank that has a share of a weight takes that share or, if it has whole experts, those of all
    ranks. Every other tensor is copied; floats may have another float dtype. Weights that are not
    named stay. Tensors may be on any device, are read one weight at a time, and are ordered with
    other work on the current stream. The checks of values wait for the device. As with every change
    in place of torch's, nothing holds back calls of the module in other threads, or on other
    streams, which would read some weights of both: wait for them before, and begin none meanwhile.

    Args:
        module: any module, also one that torch.compile returned.
        tensors: a mapping, or a module, whose state dict it is: checked as a whole before anything
            changes; or pairs of names and tensors, such as of a trainer that sends one weight after
            the other, each of which is checked before it changes anything.

    Raises:
        CheckpointError: for an unknown name, what is no tensor or has no values, or parts without
            the others of their weight.
        ShapeError, DtypeError: for a tensor that does not fit.
        NonFiniteError: for NaN or infinity, also after a cast, and for scales that no quantizer
            writes.
        UnsupportedError: for a tensor or a parameter that FSDP2 or a parallel plan divides, and for
            a parameter on the meta device.

    After an error that comes too late for nothing to have changed (one in the middle of pairs, no
    memory), the module is never half new: what was to change is NaN, for graphs to show it, and the
    next call of a module raises UnsupportedError, until an update gives it all of its tensors.
    """
    module = getattr(module, "_orig_mod", module)
    if isinstance(tensors, nn.Module):
        tensors = getattr(tensors, "_orig_mod", tensors).state_dict()
    places = _places(module)
    begun: list[_Place] = []
    if isinstance(tensors, Mapping):
        updates: Iterable[_Update] = list(_checked(places, tensors.items()))
    else:
        updates = _checked(places, tensors)
    try:
        for place, new in updates:
            begun.append(place)
            place.write(new)
    except BaseException:
        for place in begun:
            place.spoil()
        raise
    if not begun:
        log.warning(
            "update_weights_ changes nothing: no tensors were given (a generator is empty?)"
        )
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
    that of the weight; bias_of: of a bias, the weight whose order its own follows.
    """

    module: Any
    names: tuple[str, ...]
    where: str = field(compare=False)
    weight: str = ""
    bias_of: str = ""

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

    @property
    def sharding(self) -> Sharding | None:
        """How ranks share the module; None if they do not."""
        return getattr(self.module, "sharding", None)

    @property
    def view(self) -> View:
        """How the module that this one was converted from stores the numbers of a weight."""
        return self.module.view_of(self.weight) if self.weight else View()

    def has_numbers(self, new: Mapping[str, Tensor]) -> bool:
        """Whether this is given as numbers, not as the parts of a weight."""
        elements = new.get(self.names[0])
        return elements is not None and (self.encoding is None or elements.dtype in FLOATS)

    def check(self, new: dict[str, Tensor]) -> None:
        """Raises what `update_weights_` says. Bytes become views as the floats that they are."""
        encoding, name = self.encoding, self.where + self.names[0]
        for key in self.names:
            _need_memory(self.where + key, getattr(self.module, key))
        if encoding is not None and not (self.has_numbers(new) and len(new) == 1):
            self._check_parts(new, encoding)
            return
        of_matrix = encoding is not None and any(part.of_matrix for part in encoding.parts)
        if of_matrix and self.sharding is not None and not self.sharding.adaptable:
            raise UnsupportedError(
                f"{name}, numbers of features that are divided between ranks",
                expected="all parts of it, whose scales of matrices are those of the whole",
                todo="parallelize_ with plan='ep', or divide the model after it is quantized again",
                where=_WHERE,
            )
        (t,), (own, *_) = new.values(), self.own
        shape = self.shape if not self.view.transposed else (*self.shape[:-2], *self.shape[:-3:-1])
        _need_shape(name, tuple(t.shape), shape, self.view.transposed)
        if t.dtype != own.dtype and not (t.dtype in FLOATS and (encoding or own.dtype in FLOATS)):
            raise DtypeError(f"{name} is {t.dtype}", expected=f"{own.dtype}", where=_WHERE)
        if t.dtype in FLOATS:
            check_finite(t.detach(), encoding or F32, name)
            if t.numel() and own.dtype in FLOATS and own.dtype != t.dtype:
                extremes = torch.stack(t.detach().aminmax()).to(own.dtype)
                if not extremes.isfinite().all():
                    cast = t.detach().to(own.dtype)
                    check_finite(cast, encoding or F32, f"{name} in {own.dtype}")

    def _check_parts(self, new: dict[str, Tensor], encoding: Encoding) -> None:
        names = [self.where + name for name in self.names]
        elements, stored = new.get(self.names[0]), encoding.parts[0].dtype
        known = *FLOATS, stored, torch.uint8
        if elements is not None and elements.dtype not in known:
            raise DtypeError(
                f"{names[0]} is {elements.dtype}",
                expected="numbers in float32, bfloat16 or float16, or elements in "
                f"{stored} with their scales",
                where=_WHERE,
            )
        if missing := [self.where + name for name in self.names if name not in new]:
            raise CheckpointError(
                f"{', '.join(self.where + name for name in new)} without {', '.join(missing)}",
                expected=f"{names[0]} in float32, bfloat16 or float16, or all of "
                f"{', '.join(names)}",
                where=_WHERE,
            )
        for name, part in zip(self.names, encoding.parts, strict=True):
            new[name] = self.module._as_stored(new[name], part)
        parts = [new[name].detach() for name in self.names]
        _need_shape(
            names[0], check_parts(parts, encoding, where=f"{_WHERE}: {names[0]}"), self.shape
        )
        for name, part, t, own in zip(names, encoding.parts, parts, self.own, strict=True):
            if part.of_matrix:
                _need_shape(name, tuple(t.shape), tuple(own.shape))
            check_part_scales(part, t, name)

    def write(self, new: Mapping[str, Tensor]) -> None:
        """Puts checked tensors in place, a panel of matrices at a time."""
        own, encoding = self.own, self.encoding
        with torch.inference_mode(own[0].is_inference()), torch.no_grad():
            if encoding is None:
                if self.sharding is None or self.sharding.has(self.names[0]):
                    own[0].copy_(new[self.names[0]])
                return
            to = self.module.forms[self.weight]
            weight = Weight([new[name] for name in self.names if name in new], Form(encoding))
            if self.has_numbers(new):
                to = replace(to, runs=self.module.rounded_runs(self.weight))
                weight = Weight.of_numbers(new[self.names[0]], self.view)
            weight.to(to, own, own[-1] if self.module.frozen_scales else None, self.module.scales)

    def spoil(self) -> None:
        """Makes the tensors useless, and the module unusable."""
        if not isinstance(self.module, _Unusable):
            cls = type(self.module)
            self.module.__class__ = type(cls.__name__, (_Unusable, cls), {})
        for t in self.own:
            if t.is_floating_point():
                with torch.inference_mode(t.is_inference()), torch.no_grad():
                    t.fill_(float("nan"))


def _need_shape(
    name: str, shape: tuple[int, ...], want: tuple[int, ...], transposed: bool = False
) -> None:
    if shape != want:
        todo = ""
        if sorted(shape) == sorted(want):
            stored = ("[E, N, K]", "[E, K, N]")[:: -1 if transposed else 1]
            todo = f"numbers are {stored[0]} here: transpose what is stored {stored[1]}"
        like = "float module that this one was converted from" if transposed else "module"
        raise ShapeError(
            f"{name} is {list(shape)}",
            expected=f"{list(want)}, as the {like}",
            todo=todo,
            where=_WHERE,
        )


def _need_memory(name: str, own: Tensor) -> None:
    """UnsupportedError for a parameter that is not one of one device, with values."""
    if is_dtensor(own) or not has_values(own):
        raise UnsupportedError(
            f"{name}, {'a DTensor' if is_dtensor(own) else 'on the meta device'}",
            expected="a parameter of one device",
            todo="load_state_dict takes what is divided" if is_dtensor(own) else "load it first",
            where=_WHERE,
        )


def _of_rank(place: _Place, name: str, t: Tensor) -> Tensor:
    """This rank's part of a tensor of all experts. Raises for what is no plain tensor with
    values.
    """
    is_tensor = isinstance(t, Tensor)
    if not is_tensor or not has_values(t) or t.layout != torch.strided:
        raise CheckpointError(
            f"{name}, {f'{t.layout} on {t.device}' if is_tensor else f'a {type(t).__name__}'}",
            expected="a dense tensor with values",
            where=_WHERE,
        )
    if place.sharding is not None and place.sharding.adaptable and t.dim():
        t = place.sharding.share(name.removeprefix(place.where), t)
    if is_traceable_wrapper_subclass(t):
        raise UnsupportedError(
            f"{name}, a {type(t).__name__}",
            expected="a plain tensor",
            todo="DTensor.full_tensor() gathers what is divided",
            where=_WHERE,
        )
    return t


def _need_same(name: str, t: Tensor, own: Tensor) -> None:
    """UnsupportedError for scales of matrices that are not those which `qat_` froze."""
    if t.shape != own.shape or not torch.equal(t.detach().to(own), own):
        raise UnsupportedError(
            f"{name}, other scales than the module's",
            expected="scales that stay",
            todo="quantize_ the model that was trained, and pass the state dict of the result",
            where=_WHERE,
        )


def _places(module: nn.Module) -> dict[str, _Place]:
    """By the names of a state dict, all that an update may change."""
    places: dict[str, _Place] = {}
    for name, owner in module.named_modules(remove_duplicate=False):
        where, turned = f"{name}." if name else "", getattr(owner, "interleaved", False)
        for key, t in (*owner._parameters.items(), *owner._buffers.items()):
            if t is not None and key not in owner._non_persistent_buffers_set:
                bias_of = "gate_up" if turned and key == "gate_up_proj_bias" else ""
                places[where + key] = _Place(owner, (key,), where, bias_of=bias_of)
        if isinstance(owner, PackedModule):
            for weight, keys in owner.part_names.items():
                places |= dict.fromkeys(
                    (where + key for key in keys), _Place(owner, keys, where, weight)
                )
        if isinstance(owner, AdaptableModule):
            others = {where + name: places[where + key] for name, key in owner.renamed.items()}
            places = others | places
    return places


def _checked(
    places: Mapping[str, _Place], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[_Update]:
    """Each weight with what it gets, once all of it is there; biases last whose order depends on
    what their weights get.
    """
    waiting: dict[_Place, dict[str, Tensor]] = {}
    biases, as_parts = dict[_Place, Tensor](), set[tuple[nn.Module, str]]()
    fixed = {
        place.where + place.weight + FROZEN: place.own[-1]
        for place in places.values()
        if place.weight and place.module.frozen_scales
    }
    for name, t in tensors:
        if name in fixed:
            _need_same(name, t, fixed[name])
            continue
        if (place := places.get(name)) is None:
            raise CheckpointError(
                f"{name}, which the module does not have",
                expected="names of its state dict",
                todo=did_you_mean(name, places),
                where=_WHERE,
            )
        t = _of_rank(place, name, plain(t))
        new, key = waiting.setdefault(place, {}), name.removeprefix(place.where)
        new[key if key in place.names else place.names[0]] = t
        if place.has_numbers(new) or len(new) == len(place.names):
            place.check(new)
            if place.weight and not place.has_numbers(new):
                as_parts.add((place.module, place.weight))
            if place.bias_of:
                biases[place] = waiting.pop(place)[place.names[0]].clone()
            else:
                yield place, waiting.pop(place)
    for place, new in waiting.items():
        place.check(new)  # raises: parts are missing
    for place, t in biases.items():
        stored = (place.module, place.bias_of) in as_parts
        t = t if stored else place.module.view_of(place.bias_of).unpack(t)[0]
        yield place, {place.names[0]: t}
