"""Finds where the weights of a module of experts are stored in files, by their names in the model.

They are E weights for each projection, `…experts.3.gate_proj`, or one weight for all experts,
`…experts.gate_up_proj`. The stored weights decide what is encoded and how, not the model's family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..checkpoints import Scheme, StoredWeight
from ..checkpoints.experts import PER_EXPERT
from ..errors import CheckpointError
from ..nn.frozen.projections import Projections
from .names import tail

INPUT_SCALES = (".input_scale", "_input_scale")
SHOWN = 3  # how many names a message shows

Stored = Mapping[str, StoredWeight]


@dataclass(frozen=True)
class ExpertsSource:
    """Where a module of experts is stored: its name in the model, and below it the names that make
    up each projection, gate before up.

    `*` stands for the index of an expert. in_turns: gate and up rows alternate in the file.
    input_scale: the suffix of the scales of activations, which are kept; "" if there are none.
    """

    name: str
    scheme: Scheme
    names: tuple[tuple[str, ...], tuple[str, ...]]
    in_turns: bool = False
    input_scale: str = ""

    @property
    def tail(self) -> str:
        """The part of the name that the modules of all layers share."""
        return tail(self.name)

    @property
    def joined(self) -> bool:
        """Whether each expert has weights of its own."""
        return "*" in self.names[0][0]

    def weights(self, names: Sequence[str], experts: int) -> Iterator[str]:
        """The names of the weights that make up a projection."""
        for name in names:
            yield from (
                f"{self.name}.{name.replace('*', str(e))}"
                for e in range(experts if self.joined else 1)
            )


def find_experts(name: str, gated: bool, in_turns: bool, stored: Stored) -> ExpertsSource | None:
    """Where a module of experts is stored, by the first of its weights that is found; None if none
    of them is encoded.
    """
    for gate, up, down in PER_EXPERT:
        names = ((f"*.{gate}", f"*.{up}") if gated else (f"*.{up}",)), (f"*.{down}",)
        for one in (*names[0], *names[1]):
            if (found := stored.get(f"{name}.{one.replace('*', '0')}")) is not None:
                return ExpertsSource(name, found.scheme, names)
    names = ("gate_up_proj" if gated else "up_proj",), ("down_proj",)
    for (one,) in names:
        if (found := stored.get(f"{name}.{one}")) is not None:
            return ExpertsSource(name, found.scheme, names, in_turns)
    return None


def weights_of(source: ExpertsSource, module: Projections, stored: Stored) -> list[StoredWeight]:
    """All weights that make up a module of experts. CheckpointError for one that is missing or has
    another scheme or shape.
    """
    taken: list[StoredWeight] = []
    for projection, names in zip(module.projections, source.names, strict=True):
        experts, rows, k = module.shape_of(projection)
        shape = (rows // len(names), k) if source.joined else (experts, rows, k)
        wanted = list(source.weights(names, experts))
        if missing := [name for name in wanted if name not in stored]:
            raise CheckpointError(
                f"no encoded {some(missing)}",
                expected=f"all {len(wanted)} weights of {projection}",
                where=source.name,
            )
        for weight in (stored[name] for name in wanted):
            if weight.scheme != source.scheme or weight.shape != shape:
                found = f"{weight.name} is {weight.scheme.name} {list(weight.shape)}"
                raise CheckpointError(
                    found, expected=f"{source.scheme.name} {list(shape)}", where=source.name
                )
            taken.append(weight)
    return taken


def some(names: Sequence[str]) -> str:
    """A few names for a message."""
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
