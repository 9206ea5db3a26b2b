"""How a family of models has its experts: their sizes, and the tensors that hold them in floats.

Files of one family have single experts, those of another all of a layer in one tensor, gate and up
apart or together, transposed or not, by names of its own. Its class knows: packages of classes are
asked (`plugins.families`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from .. import plugins
from ..errors import UnsupportedError
from ..messages import install
from .directory import Directory
from .fused import AS_STORED, FusedOrder, matrices_of
from .headers import Entry, shown


@dataclass(frozen=True)
class InFloats:
    """A tensor of experts in files. projection: "gate_up_proj", "gate_proj", "up_proj" or
    "down_proj"; bias: whether it is that of the projection; experts: whose it has, in order; alone:
    it is of one, without a dimension for experts.
    """

    name: str
    projection: str
    experts: tuple[int, ...]
    order: FusedOrder = AS_STORED
    bias: bool = False
    alone: bool = False

    def shape(self, experts: Experts) -> tuple[int, ...]:
        """The shape that the tensor has in files."""
        n, k = experts.hidden, experts.intermediate
        if self.projection != "down_proj":
            n, k = len(matrices_of(self.projection)) * k, n
        matrix = (n,) if self.bias else (k, n) if self.order.transposed else (n, k)
        return matrix if self.alone else (len(self.experts), *matrix)

    def matrices(self, whole: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Of the tensor: the matrices, or biases, of each expert, [N, K] or [N], as views; each
        with its name, "gate_proj" say, and the number of the expert.
        """
        each = matrices_of(self.projection)
        for e, one in zip(self.experts, whole[None] if self.alone else whole, strict=True):
            rows = one.mT if self.order.transposed and not self.bias else one
            for at, matrix in enumerate(each):
                yield matrix, e, self.order.rows(rows, at, len(each))


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. name: what files call it that have them encoded, one by one;
    interleaved: rows of gate and up alternate in the module; floats: what its class reads and
    writes.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    interleaved: bool
    floats: tuple[InFloats, ...]


@dataclass(frozen=True)
class Family:
    """What the class of a directory's config.json has. layers: by the names of modules; in_model:
    what tensors of the directory are called in the model; there: those of experts in floats, by the
    names that the class gives them.
    """

    layers: Mapping[str, Experts]
    in_model: Mapping[str, str] = field(default_factory=dict, repr=False)
    there: Mapping[str, str] = field(default_factory=dict, repr=False)

    def of(self, tensor: str) -> Experts | None:
        """The experts that a tensor of the directory is a part of."""
        name = self.in_model.get(tensor, tensor)
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name)

    def orders(self, entries: Iterable[Entry]) -> dict[str, FusedOrder]:
        """How the file stores each of the given tensors that hold all experts of a layer: a
        FusedOrder by tensor name. {} if one of them is none of the family's, or has a shape that
        its class reads in neither order.
        """
        of = {self.there.get(t.name): (t, e) for e in self.layers.values() for t in e.floats}
        orders = dict[str, FusedOrder]()
        for entry in entries:
            t, experts = of.get(entry.name, (None, None))
            shape = t.shape(experts) if t and experts else ()
            if t is None or entry.shape not in (shape, (*shape[:-2], *shape[:-3:-1])):
                return {}
            turned = entry.shape != shape
            orders[entry.name] = replace(t.order, transposed=t.order.transposed != turned)
        return orders


def known_family(directory: Directory) -> Family:
    """The description of a family; without layers if nothing is known of it."""
    with contextlib.suppress(UnsupportedError):
        return family_of(directory)
    return Family({})


def family_of(directory: Directory) -> Family:
    """UnsupportedError for a class that nobody here knows, or that stores experts in a way of
    which there is no description. Of a class that comes with the directory nothing is said.
    """
    for ask in plugins.families:
        family = ask(directory)
        if isinstance(family, Family):
            return family
    if "auto_map" in directory.config:
        return Family({})
    raise UnsupportedError(
        f"experts of model_type {shown(directory.config.get('model_type'))}, of no known class",
        expected="a class that says by which names it reads them in floats",
        todo=install("models"),
        where=str(directory.path),
    )
