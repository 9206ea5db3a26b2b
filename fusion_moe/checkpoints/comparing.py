"""How far the encoded weights of a directory are from those of another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..messages.progress import progress
from .families import Family, known_family
from .fused import FusedOrder, family_order, matrices_of
from .layers import layers_of_floats, orders_of_floats
from .source import Source


@dataclass(frozen=True)
class WeightError:
    """The error of a layer's experts, or of one other weight: the norm of the difference, relative
    to the norm of what it should be; and the matrix with the largest error.
    """

    name: str
    matrices: int
    error: float
    worst: str
    largest: float


class _Matrix(NamedTuple):
    """owner: the experts of a layer, or the weight itself; read: f32 [N, K]."""

    owner: str
    encoded: bool
    read: Callable[[], Tensor]


def errors_of(source: Source, against: Source) -> Iterator[WeightError]:
    """Reads all encoded weights of a directory, and what they are in another one. CheckpointError
    for a matrix that is not there, or has another shape.
    """
    mine, theirs = _matrices(source), _matrices(against)
    by_owner = defaultdict[str, list[str]](list)
    for name, matrix in mine.items():
        if matrix.encoded:
            by_owner[matrix.owner].append(name)
    for owner, names in progress(by_owner.items(), "comparing weights", len(by_owner)):
        squares = torch.stack([_squares(name, mine, theirs) for name in names])
        each, whole = _relative(squares), _relative(squares.sum(0))
        worst = int(each.argmax())
        yield WeightError(owner, len(names), float(whole), names[worst], float(each[worst]))


def _relative(squares: Tensor) -> Tensor:
    """Squared norms [..., 2] as those of `_squares` -> [...]; zeros that stayed zeros have none."""
    off, of = squares.unbind(-1)
    return torch.where(off == 0, off, off / of).sqrt()


def _squares(name: str, mine: Mapping[str, _Matrix], theirs: Mapping[str, _Matrix]) -> Tensor:
    """f64 [2]: the squared norms of the difference, and of what it is a difference from."""
    if name not in theirs:
        raise CheckpointError(f"no {name}", expected="every encoded weight", where="--against")
    got, want = mine[name].read(), theirs[name].read()
    if got.shape != want.shape:
        raise CheckpointError(
            f"{name} is {[*want.shape]}", expected=f"{[*got.shape]}", where="--against"
        )
    return torch.stack([(got - want).double().square().sum(), want.double().square().sum()])


def _matrices(source: Source) -> dict[str, _Matrix]:
    """All matrices by name, those of experts as `…experts.3.gate_proj`."""
    plain, family = source.plain, known_family(source.directory)
    layers, to = layers_of_floats(source, family)
    results: dict[str, _Matrix] = {}
    for layer in layers.values():
        for projection, names in layer.projections.items():
            encoded = names[0] in source.weights
            if not layer.fused:
                for e, name in enumerate(names):
                    usual = f"{layer.name}.{e}.{projection}"
                    results[usual if to[name] == name else to[name]] = _Matrix(
                        layer.name, name in source.weights, partial(_whole, source, name)
                    )
                continue
            count = (source.weights.get(names[0]) or plain[names[0]]).shape[0]
            order = (
                _of_encoded(source, family, names[0])
                if encoded
                else orders_of_floats(source, family, layer)[names[0]]
            )
            of_expert = matrices_of(projection)
            for e, (at, matrix) in product(range(count), enumerate(of_expert)):
                read = partial(_of_expert, source, names[0], order, e, at, len(of_expert))
                results[f"{layer.name}.{e}.{matrix}"] = _Matrix(layer.name, encoded, read)
    of_experts = {name for layer in layers.values() for name in layer.names}
    others = {n for n, entry in plain.items() if len(entry.shape) == 2} | {*source.weights}
    return results | {
        name: _Matrix(name, name in source.weights, partial(_whole, source, name))
        for name in others - of_experts
    }


def _of_encoded(source: Source, family: Family, name: str) -> FusedOrder:
    experts = family.of(source.weights[name].elements.name)
    usual = family_order(source.directory.config, name)
    return FusedOrder(interleaved=experts.interleaved if experts else usual.interleaved)


def _whole(source: Source, name: str) -> Tensor:
    if name in source.weights:
        return source.weights[name].floats(source.directory.read)
    return source.directory.read(f"{name}.weight").float()


def _of_expert(source: Source, name: str, order: FusedOrder, e: int, at: int, count: int) -> Tensor:
    """A matrix of an expert, of a tensor that has all of them."""
    if name not in source.weights:
        return order.matrix(source.directory.read, source.plain[name].name, e, at, count).float()
    weight = source.weights[name]
    parts = weight.parts(source.directory.read)
    return order.rows(weight.scheme.floats(part[e] for part in parts), at, count)
