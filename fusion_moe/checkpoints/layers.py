"""The experts of a layer, whatever tensors hold them in files, written in floats as the family's
class reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..encodings import FLOATS
from ..errors import CheckpointError, UnsupportedError
from ..messages import some
from .experts import PER_EXPERT, LayerExperts
from .families import Experts, Family, InFloats, family_of
from .fused import FusedOrder, matrices_of, order_of
from .headers import Entry
from .shard import Planned, Step
from .source import Source
from .stored import StoredWeight

Reads = Callable[[str, int], Tensor]  # the matrix, or the bias, of this name and expert


@dataclass(frozen=True)
class Layer:
    """stored: how the directory has them; experts: how their class does."""

    source: Source
    stored: LayerExperts
    experts: Experts

    @property
    def tensors(self) -> dict[str, Entry]:
        """What the directory has of them, by name, but for what stays as it is."""
        tensors, weights = self.source.directory.tensors, self.source.weights
        suffixes = ("", ".weight", "_bias", ".bias")
        names = {name + suffix for name in self.stored.names for suffix in suffixes}
        encoded = (weights[name] for name in self.stored.names if name in weights)
        entries = [entry for weight in encoded for entry in weight.entries.values()]
        entries += [entry for name, entry in tensors.items() if name in names]
        kept = {t.name for t in self.experts.floats if self._is_there(t)}
        return {entry.name: entry for entry in entries if entry.name not in kept}

    def steps(self, dtype: torch.dtype, exact: bool = False) -> Iterator[Step]:
        """Write each tensor of theirs. exact: as of `dense_step`. CheckpointError for sizes,
        matrices or biases that their class does not have.
        """
        self._check_all_used()
        for t in self.experts.floats:
            if not self._is_there(t):
                self._check_sizes(t)
                planned = Planned(t.name, self._dtype(t, dtype), t.shape(self.experts))
                yield Step((planned,), partial(self._made, t, planned, exact))

    def compared(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """What was written, beside what it was made of, in the same dtype. read: a tensor that was
        written.
        """
        for t in self.experts.floats:
            if not self._is_there(t):
                reads = self._reads(t.bias)
                for matrix, e, one in t.matrices(read(t.name)):
                    yield t.name, reads(matrix, e).to(one.dtype), one

    def _stored(self, name: str) -> StoredWeight | Entry:
        return self.source.weights.get(name) or self.source.plain[name]

    def _is_there(self, t: InFloats) -> bool:
        """Whether a tensor is in floats already."""
        entry = self.source.directory.tensors.get(t.name)
        return entry is not None and entry.dtype in FLOATS

    def _made(self, t: InFloats, planned: Planned, exact: bool) -> dict[str, Tensor]:
        whole, reads = torch.empty(planned.shape, dtype=planned.dtype), self._reads(t.bias)
        for matrix, e, into in t.matrices(whole):
            why = "FP8 whose scales are no powers of two"
            put(into, reads(matrix, e), f"{t.name}: {why}" if exact else "", t.name)
        return {t.name: whole}

    def _reads(self, bias: bool) -> Reads:
        """Reads one after the other, of tensors that have all experts."""
        of = lru_cache(1)(self._bias if bias else self._of_expert)  # gate and up may be in one
        matrix = lru_cache(1)(lambda name, e: of(name)(e))

        def read(name: str, e: int) -> Tensor:
            stored, at, count = self._place(name, e)
            order = FusedOrder(interleaved=self.experts.interleaved)
            return order.rows(matrix(stored, e), at, count)

        return read

    def _of_expert(self, name: str) -> Callable[[int], Tensor]:
        if name in self.source.weights:
            return self.source.of_expert(self.source.weights[name])
        return lambda e: self.source.directory.read(self.source.plain[name].name)

    def _bias(self, name: str) -> Callable[[int], Tensor]:
        entry, weight = self._bias_of(name), self._stored(name)
        if entry.shape != weight.shape[:-1]:
            raise CheckpointError(
                f"{entry.name} is {list(entry.shape)}",
                expected=f"{list(weight.shape[:-1])}, as {name} has rows",
                where=self.stored.name,
            )
        whole = self.source.directory.read(entry.name)
        return lambda e: whole[e] if self.stored.fused else whole

    def _bias_of(self, name: str) -> Entry:
        bias = f"{name}_bias" if self.stored.fused else f"{name}.bias"
        entry = self.source.directory.tensors.get(bias)
        if entry is None:
            raise CheckpointError(
                f"no {bias}", expected="a bias of each expert", where=self.stored.name
            )
        return entry

    def _place(self, matrix: str, e: int) -> tuple[str, int, int]:
        """The name of the weight with a matrix, and which of how many it is there."""
        for projection, names in self.stored.projections.items():
            each = matrices_of(projection)
            if matrix in each:
                return names[0 if self.stored.fused else e], each.index(matrix), len(each)
        raise CheckpointError(
            f"no {matrix}",
            expected="what their class has",
            where=self.stored.name,
        )

    def _dtype(self, t: InFloats, dtype: torch.dtype) -> torch.dtype:
        """Biases keep theirs."""
        if not t.bias:
            return dtype
        (matrix, *_) = matrices_of(t.projection)
        return self._bias_of(self._place(matrix, t.experts[0])[0]).dtype

    def _check_all_used(self) -> None:
        known = {m for t in self.experts.floats for m in matrices_of(t.projection)}
        left = [p for p in self.stored.projections if not known.issuperset(matrices_of(p))]
        names = [name for p in left for name in self.stored.projections[p]]
        if not any(t.bias for t in self.experts.floats):
            names += [name for name in self.tensors if name.endswith((".bias", "_bias"))]
        if names:
            raise CheckpointError(
                f"{some(names)}, which their class does not have",
                expected="what is used",
                where=self.stored.name,
            )

    def _check_sizes(self, t: InFloats) -> None:
        there = self.stored.experts
        if there is not None and there != self.experts.experts:
            raise CheckpointError(
                f"{there} experts",
                expected=f"{self.experts.experts}, as the model",
                where=self.stored.name,
            )
        sizes = self.experts.hidden, self.experts.intermediate
        for matrix in matrices_of(t.projection):
            for e in t.experts:
                name, _, count = self._place(matrix, e)
                weight = self._stored(name)
                n, k = sizes if matrix == "down_proj" else (count * sizes[1], sizes[0])
                lead = (self.experts.experts,) if self.stored.fused else ()
                if weight.shape != (*lead, n, k):
                    raise CheckpointError(
                        f"{name} is {list(weight.shape)}",
                        expected=f"{[*lead, n, k]}, as the model",
                        where=self.stored.name,
                    )


def put(into: Tensor, numbers: Tensor, exact: str, name: str) -> None:
    """Writes float32 numbers into a tensor of the same shape, rounded to its dtype.

    UnsupportedError for a number that becomes infinite; with a text in `exact`, which says what the
    numbers are, for any that rounding changes. name: of the tensor, for the message.
    """
    into.copy_(numbers)
    if exact and not torch.equal(into.float(), numbers):
        raise UnsupportedError(
            exact,
            expected="numbers that bfloat16 holds",
            todo='convert it to="dense", or quantize it',
            where="convert",
        )
    if not into.isfinite().all():
        largest = numbers.float().abs().max().item()
        raise UnsupportedError(
            f"{name}: a number of magnitude {largest:.4g}",
            expected=f"at most {torch.finfo(into.dtype).max:.4g}, the largest of {into.dtype}",
            todo="bfloat16 has the range of float32" if into.dtype == torch.float16 else "",
            where="convert",
        )


def layers_of_floats(
    source: Source, family: Family
) -> tuple[dict[str, LayerExperts], dict[str, str]]:
    """The layers of experts with the names that their files have, also of families that have names
    of their own; and what each single matrix is called where it is encoded: as here, unless that is
    in no module.
    """
    layers = dict(source.layers)
    to = {name: name for layer in layers.values() if not layer.fused for name in layer.names}
    results = {name for layer in layers.values() for name in layer.names}
    for experts in family.layers.values():
        tensors = [t for t in experts.floats if not t.bias]
        if any(t.name not in family.there for t in tensors):
            continue
        names = {t: family.there[t.name].removesuffix(".weight") for t in tensors}
        known, single = results >= {*names.values()}, all(t.alone for t in tensors)
        at_home = known and all(family.of(family.there[t.name]) is experts for t in tensors)
        if single and not at_home:
            to |= {n: f"{experts.name}.{t.experts[0]}.{t.projection}" for t, n in names.items()}
        if not known:
            tensors.sort(key=lambda t: t.experts)
            projections = {
                p: of
                for p in ("gate_up_proj", *PER_EXPERT[0])
                if (of := tuple(names[t] for t in tensors if t.projection == p))
            }
            layers[experts.name] = LayerExperts(experts.name, projections, fused=not single)
    return layers, to


def orders_of_floats(source: Source, family: Family, layer: LayerExperts) -> dict[str, FusedOrder]:
    """How the float tensors with all experts of a layer are stored, by their names. Raises as
    `order_of` if no class says it.
    """
    entries = {name: source.plain[name] for name in layer.names if name in source.plain}
    if known := family.orders(entries.values()):
        return {name: known[entry.name] for name, entry in entries.items()}
    shapes = {
        projection: (source.weights.get(name) or source.plain[name]).shape
        for projection, (name,) in layer.projections.items()
    }
    return dict.fromkeys(entries, order_of(layer, shapes, source.directory.config))


def layers_in_floats(
    source: Source, becomes_floats: Callable[[StoredWeight], bool], family: Family | None = None
) -> list[Layer]:
    """The layers of experts with encoded weights that all become floats, as their class has them.
    family: None for that of the directory.

    UnsupportedError as from `family_of`, and for layers of no module with all experts in a tensor.
    Single experts of no module, such as those that predict further tokens, keep their names, and so
    do all if their class comes with the directory: quantizers name what its modules are called.
    """
    layers = list[Layer]()
    for layer in source.layers.values():
        encoded = [source.weights[name] for name in layer.names if name in source.weights]
        if not encoded or not all(map(becomes_floats, encoded)):
            continue
        family = family or family_of(source.directory)
        experts = family.of(encoded[0].elements.name)
        if experts is not None:
            layers.append(Layer(source, layer, experts))
        elif layer.fused:
            raise UnsupportedError(
                f"{layer.name}, all experts in one tensor, of no module",
                expected="a class that says how it reads them in floats",
                where=str(source.directory.path),
            )
    return layers
