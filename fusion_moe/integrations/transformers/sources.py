"""Finds where the weights of a module are stored in files, by their names in the model.

Experts are E weights for each projection, `…experts.3.gate_proj`, or one weight for all experts,
`…experts.gate_up_proj`. The stored weights decide what is encoded and how, not the model's family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ...checkpoints import PER_EXPERT, Direction, Scheme, StoredPart, StoredWeight
from ...encodings import F32
from ...encodings.encoding import FLOATS as PLAIN
from ...errors import CheckpointError
from ...messages import some
from ...nn.frozen import PackedModule, View

# experts in floats beside those that are encoded
FLOATS = Scheme("floats", F32, (StoredPart("values", ".weight", PLAIN, cast=torch.float32),))
INPUT_SCALES = (".input_scale", "_input_scale")

Weights = Mapping[str, StoredWeight]


class Row(NamedTuple):
    """A parameter, or a buffer, and its tensors in files: `part.suffix` follows each of the names.

    Their rows follow one another. `*` in a name stands for the number of an expert; a name without
    it has all of them. view: the order of rows in the file. scheme: of elements, beside which are
    its fixed tensors.
    """

    parameter: str
    names: tuple[str, ...]
    part: StoredPart
    view: View
    scheme: Scheme | None = None


@dataclass(frozen=True)
class Source:
    """Where a module is stored: its name in the model, and for each of its weights the names below
    it, gate before up.

    `*` stands for the number of an expert. interleaved: gate and up rows alternate in the file.
    input_scale: the suffix of the scales of activations, which are kept; "" if there are none.
    rounds: whether the module does not have the parts that the files have: they are floats, with
    scales or without, or of several schemes, and become floats, or are rounded to fewer bits.
    """

    name: str
    scheme: Scheme
    names: Mapping[str, tuple[str, ...]]
    interleaved: bool = False
    input_scale: str = ""
    rounds: bool = False

    def weights(self, projection: str, experts: int, first: int = 0) -> list[list[str]]:
        """For each of the names that make up a projection, those of the experts from `first` on."""
        return [
            [f"{self.name}.{name.replace('*', str(e))}" for e in range(first, first + experts)]
            if "*" in name
            else [f"{self.name}.{name}"]
            for name in self.names[projection]
        ]

    def rows(self, module: PackedModule) -> Iterator[Row]:
        """Where each tensor of the module lies: parts, unless they are made by rounding, biases of
        experts, scales of activations.
        """
        for weight, below in self.names.items():
            names = tuple(f"{self.name}.{one}".removesuffix(".") for one in below)
            view = View(interleaved=self.interleaved and weight == "gate_up")
            tensors = {}
            if not self.rounds:
                tensors = dict(zip(module.part_names[weight], self.scheme.parts, strict=True))
            bias = f"{weight}_proj_bias"
            if getattr(module, bias, None) is not None:
                tensors[bias] = StoredPart("bias", ".bias" if "*" in below[0] else "_bias", ())
            if self.input_scale:
                scale = "input_scale" if weight == "weight" else f"{weight}_input_scale"
                tensors[scale] = StoredPart(
                    scale, self.input_scale, (torch.float32,), direction=Direction.MULTIPLIER
                )
            for key, part in tensors.items():
                scheme = self.scheme if part is self.scheme.parts[0] else None
                yield Row(key, names, part, view, scheme)


def find_experts(
    name: str, gated: bool, interleaved: bool, experts: int, weights: Weights, encoded: Weights
) -> Source | None:
    """Where a module of experts is stored, with the scheme of the first of its weights that is
    encoded; None if none of them is.
    """
    for gate, up, down in (*PER_EXPERT, ("", "gate_up_proj" if gated else "up_proj", "down_proj")):
        projections = ((gate, up) if gated and gate else (up,)), (down,)
        star = "*." if gate else ""
        names = (tuple(star + below for below in each) for each in projections)
        keys = "gate_up" if gated else "up", "down"
        below = dict(zip(keys, names, strict=True))
        source = Source(name, FLOATS, below, interleaved and not gate)
        for projection in keys:
            for each in source.weights(projection, experts):
                for one in each:
                    if (entry := encoded.get(one)) is not None and one in weights:
                        return replace(source, scheme=entry.scheme)
    return None


def weights_of(
    source: Source, shapes: Mapping[str, tuple[int, int, int]], stored: Weights
) -> list[StoredWeight]:
    """All weights that make up a module of experts, in whatever schemes. shapes: [E, N, K] of each
    projection. CheckpointError for one that is missing or has another shape.
    """
    taken: list[StoredWeight] = []
    for projection, names in source.names.items():
        experts, rows, k = shapes[projection]
        shape = (rows // len(names), k) if "*" in names[0] else (experts, rows, k)
        wanted = [name for each in source.weights(projection, experts) for name in each]
        if missing := [name for name in wanted if name not in stored]:
            raise CheckpointError(
                f"no encoded {some(missing)}",
                expected=f"all {len(wanted)} weights of {projection}",
                where=source.name,
            )
        for weight in (stored[name] for name in wanted):
            if weight.shape != shape:
                raise CheckpointError(
                    f"{weight.name} is {_said(weight.scheme)} {list(weight.shape)}",
                    expected=f"{_said(source.scheme)} {list(shape)}",
                    where=source.name,
                )
            taken.append(weight)
    return taken


def _said(scheme: Scheme) -> str:
    """Its name, and which of several encodings that it may have."""
    return f"{scheme.name} ({scheme.encoding.name})" if scheme.encoding else scheme.name
