"""What a rank reads of a directory when experts are divided between ranks: the experts that it
keeps, and everything else.

transformers loads what it finds in a state dict. Here this is a dictionary of tensors in files,
which are read when it asks for them. Which tensors it contains is decided when the model is on the
meta device and its experts have been made smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from ..checkpoints import Directory, Entry
from ..errors import UnsupportedError
from ..layouts.layout import as_bytes
from .names import live_names
from .sources import ExpertsSource

if TYPE_CHECKING:  # not at run time: torch may have been built without torch.distributed
    from ..distributed.parallelize import Division
    from ..distributed.states import FeatureShards

_INDEX = re.compile(r"(\d+)\.")


class Part(NamedTuple):
    """The part of a tensor to read: ranges of some dimensions, and several ranges of one, which are
    joined. absent: none, but zeros.
    """

    ranges: Mapping[int, range] = {}
    dim: int = 0
    several: Sequence[range] = ()
    absent: bool = False


class Stored:
    """A tensor in a file, of which a part is read; it has the methods of safetensors' slices that
    transformers calls.
    """

    def __init__(self, entry: Entry, source: Any, part: Part):
        """source: safetensors' slice."""
        self.dtype, self.shape, self.source, self.part = entry.dtype, entry.shape, source, part

    def __getitem__(self, index: Any) -> Tensor:
        ranges, dim, several, absent = self.part
        if absent:
            return torch.zeros(self.get_shape(), dtype=self.dtype)
        if not several:
            return self.source[self._index(ranges) if ranges else index]
        parts = [self.source[self._index({**ranges, dim: one})] for one in several]
        return torch.cat([as_bytes(t) for t in parts], dim).view(parts[0].dtype)

    def _index(self, ranges: Mapping[int, range]) -> tuple[slice, ...]:
        return tuple(
            slice(ranges[d].start, ranges[d].stop) if d in ranges else slice(None)
            for d in range(len(self.shape))
        )

    def get_shape(self) -> list[int]:
        """The shape of the part that is read."""
        sizes = {d: len(one) for d, one in self.part.ranges.items()}
        if self.part.several:
            sizes[self.part.dim] = sum(map(len, self.part.several))
        return [sizes.get(d, size) for d, size in enumerate(self.shape)]

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return str(self.source.get_dtype())

    def is_floating_point(self) -> bool:
        """As the method of a tensor."""
        return self.dtype.is_floating_point


class Share(dict[str, Stored]):
    """The state dict of a rank. experts: for each module of experts, E over all ranks."""

    def __init__(self, directory: Directory, division: Division):
        super().__init__()
        self.directory, self.division, self.experts = directory, division, dict[str, int]()

    def take(self, model: Any, sources: Mapping[str, ExpertsSource]) -> None:
        """Makes the experts of a model without weights smaller, and finds the tensors for them and
        for everything else.

        sources: where modules of encoded experts are stored. UnsupportedError for dividing the
        features of experts that are not encoded.
        """
        names = live_names(model, self.directory.tensors)
        modules = self.division.modules(model)
        features = self.division.plan != "ep"
        for name in modules:
            if features and (name not in sources or sources[name].scheme.encoding is None):
                todo = "load the whole model, then parallelize_(model, mesh, plan=...)"
                raise UnsupportedError(
                    "features of floats",
                    expected="encoded experts in the files, or plan = 'ep'",
                    todo=todo,
                    where=name,
                )
        kept = {name: self._keep(name, module) for name, module in modules.items()}
        for name, entry in self.directory.tensors.items():
            owner, below = _module_of(names[name], modules)
            expert = _INDEX.match(below)
            if owner is not None and expert is not None and int(expert[1]) not in kept[owner]:
                continue
            part = Part()
            if owner is not None:
                fused = expert is None and entry.shape[:1] == (self.experts[owner],)
                part = Part({0: kept[owner]} if fused else {})
                if features:
                    part = _features(
                        part,
                        sources[owner],
                        cast(Any, modules[owner]).sharding,
                        below[expert.end() :] if expert else below,
                        entry.shape,
                    )
            self[name] = Stored(entry, self.directory.slice(name), part)

    def _keep(self, name: str, module: Any) -> range:
        """The range of experts that a module keeps."""
        self.experts[name] = self.division.keep(module)
        first = module.first_expert or 0
        return range(first, first + len(module.down_proj))

    def join(self, model: Any) -> None:
        """Makes the loaded modules compute the sums over all ranks."""
        for name, experts in self.experts.items():
            self.division.join(model.get_submodule(name), experts)


def _features(
    part: Part, source: ExpertsSource, shards: FeatureShards, name: str, shape: Sequence[int]
) -> Part:
    """The part of a tensor for some features: rows of gate and up, columns of down; down's bias on
    one rank; per-matrix scales whole.
    """
    up, down = ([one.removeprefix("*.") for one in names] for names in source.names)
    at = next(one for one in sorted((*up, *down), key=len, reverse=True) if name.startswith(one))
    stored = next((p for p in source.scheme.parts if p.suffix == name.removeprefix(at)), None)
    bias = name.removeprefix(at) in (".bias", "_bias")
    if not bias and (stored is None or stored.direction is not None):
        return part
    lead, transposed = 0 if source.joined else 1, stored is not None and stored.transposed
    rows, columns = (lead + 1, lead) if transposed else (lead, lead + 1)
    first, end, whole = shards.features.start, shards.features.stop, shards.intermediate
    if at in down:
        if bias:
            return part._replace(absent=not shards.biased)
        per_item = whole // shape[columns]
        return part._replace(
            ranges={**part.ranges, columns: range(first // per_item, end // per_item)}
        )
    if source.joined:
        return part._replace(ranges={**part.ranges, rows: shards.features})
    if source.in_turns:
        return part._replace(ranges={**part.ranges, rows: range(2 * first, 2 * end)})
    return part._replace(dim=rows, several=(shards.features, range(whole + first, whole + end)))


def _module_of(name: str, modules: Mapping[str, Any]) -> tuple[str | None, str]:
    """The module of experts that a tensor belongs to, and the tensor's name there; None if there is
    no such module.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return module, ".".join(parts[end:])
    return None, name


_share: ContextVar[Share | None] = ContextVar("fusion_moe_share", default=None)


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """In force while transformers loads this share."""
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def shared() -> Share | None:
    """The share that is being loaded; None for a whole model."""
    return _share.get()
