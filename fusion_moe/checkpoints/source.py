"""A directory whose weights are read one by one, encoded ones as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ..encodings import FLOATS, Quantized
from ..errors import CheckpointError
from .directory import Directory
from .experts import LayerExperts, experts_of, layers_of_experts
from .headers import Entry
from .shard import Planned, Step
from .stored import StoredWeight, weights_in
from .values import check_weight


@dataclass(frozen=True)
class Source:
    """A directory and the weights in it."""

    directory: Directory
    weights: Mapping[str, StoredWeight]

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Raises as `Directory.open`, `method_of`, `stored_weights` and `layers_of_experts`."""
        return cls.of(Directory.open(path))

    @classmethod
    def of(cls, directory: Directory) -> Source:
        """Raises as `open`, once the directory is."""
        source = cls(directory, weights_in(directory))
        _ = source.layers
        return source

    @cached_property
    def layers(self) -> dict[str, LayerExperts]:
        """The layers of experts of a directory, encoded or in floats. Raises as
        `layers_of_experts`, also for another number in one tensor than config.json says.
        """
        layers = layers_of_experts([*self.weights, *self.plain], self.directory.config)
        for layer in layers.values():
            wanted = experts_of(self.directory.config, layer.name)
            for name in layer.names if layer.fused and wanted is not None else ():
                shape = (self.weights.get(name) or self.plain[name]).shape
                if len(shape) == 3 and shape[0] != wanted:
                    raise CheckpointError(
                        f"{name} {[*shape]}", expected=f"{wanted} experts, by config.json"
                    )
        return layers

    @cached_property
    def plain(self) -> dict[str, Entry]:
        """The directory's float tensors of 2 dimensions (matrices) and 3 (of all experts), by their
        names without `.weight`.
        """
        return {
            e.name.removesuffix(".weight"): e
            for e in self.directory.tensors.values()
            if e.dtype in FLOATS and len(e.shape) in (2, 3)
        }

    def steps(
        self,
        of_weight: Callable[[StoredWeight], Step | None],
        of_other: Callable[[Source, Entry], Step | None],
    ) -> Iterator[Step]:
        """The steps of writing, in the order of src: one for each weight, and one for each other
        tensor, unless the function for it returns None.
        """
        weight_of = {
            entry.name: weight
            for weight in self.weights.values()
            for entry in weight.entries.values()
        }
        done: set[str] = set()
        for entry in self.directory.tensors.values():
            weight, step = weight_of.get(entry.name), None
            if weight is None:
                step = of_other(self, entry)
            elif weight.name not in done:
                done.add(weight.name)
                step = of_weight(weight)
            if step is not None:
                yield step

    def kept(self, entry: Entry) -> Step:
        """A step that writes a tensor unchanged."""
        return Step(
            (Planned(entry.name, entry.dtype, entry.shape),),
            lambda: {entry.name: self.directory.read(entry.name)},
        )

    def quantized(self, weight: StoredWeight) -> Quantized:
        """A weight in its encoding. CheckpointError as from `check_scales`."""
        check_weight(self.directory.read, weight)
        return weight.quantized(self.directory.read)

    def matrices(self, weight: StoredWeight) -> Iterator[Tensor]:
        """f32 [N, K], one matrix after another. CheckpointError as from `check_scales`."""
        yield from map(self.of_expert(weight), range(weight.shape[0] if weight.scheme.fused else 1))

    def of_expert(self, weight: StoredWeight) -> Callable[[int], Tensor]:
        """A function that reads the matrix of an expert, of a weight with those of all, f32 [N, K];
        of any other weight its only one. CheckpointError as from `check_scales`.
        """
        check_weight(self.directory.read, weight, columns=False)
        if not weight.scheme.fused:
            return lambda e: weight.floats(self.directory.read)
        parts = weight.parts(self.directory.read)
        return lambda e: weight.scheme.floats(part[e] for part in parts)
