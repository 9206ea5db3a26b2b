"""transformers' WeightConverters for encoded experts, made from the names in the files.

A converter is for all layers: it matches what follows the layer's number. Converters with longer
names come first, since before transformers 5.21 a pattern also matches the beginning of a longer
name.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..checkpoints import Direction, StoredPart
from ..nn.frozen.projections import Projections
from .names import parameter_of
from .operations import QuantizeEightBit, StoredExperts
from .sources import ExpertsSource

Row = tuple[list[str], str, ConversionOps]  # patterns in the file, the parameter, the operation
MATRIX_SCALE = StoredPart("input_scale", "", (torch.float32,), direction=Direction.MULTIPLIER)


class Converter(WeightConverter):
    """A WeightConverter that is cheap to copy: transformers copies one for each tensor that it
    reads.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Converter:
        copied = copy.copy(self)
        # the only attributes that a copy changes
        copied.collected_tensors, copied.layer_targets = defaultdict(list), defaultdict(set)
        return copied


def expert_converters(sources: Iterable[tuple[ExpertsSource, Projections]]) -> list[Converter]:
    """The converters that join the tensors of experts into the parameters of their modules."""
    converters: dict[tuple[str, ...], Converter] = {}
    for source, module in sources:
        for projection, names in zip(module.projections, source.names, strict=True):
            for patterns, target, operation in _of_projection(source, module, projection, names):
                if (*patterns, target) not in converters:
                    converters[(*patterns, target)] = Converter(patterns, target, [operation])
    return list(converters.values())


def _of_projection(
    source: ExpertsSource, module: Projections, projection: str, names: Sequence[str]
) -> Iterator[Row]:
    """The rows for each part, the bias, and the scales of activations."""
    below, parts = rf"{source.tail}\.", source.scheme.parts
    parameters = module.part_names[projection]
    in_turns = source.in_turns and projection == "gate_up"

    def row(suffix: str, parameter: str, part: StoredPart | None) -> Row:
        operation = StoredExperts(part, source.joined, in_turns)
        return [f"{below}{name}{suffix}" for name in names], below + parameter, operation

    if source.scheme.encoding is None:
        # before transformers 5.21, `.weight` also matches the beginning of their names
        scales_first = parts[::-1]
        yield (
            [f"{below}{name}{p.suffix}" for p in scales_first for name in names],
            below + parameters[0],
            QuantizeEightBit(parameters),
        )
    else:
        yield from (
            row(p.suffix, parameter, p) for p, parameter in zip(parts, parameters, strict=True)
        )
    if getattr(module, f"{projection}_proj_bias") is not None:
        yield row(".bias" if source.joined else "_bias", f"{projection}_proj_bias", None)
    if source.input_scale:
        yield row(source.input_scale, f"{projection}_input_scale", MATRIX_SCALE)


def longest_first(converters: Iterable[Any]) -> list[Any]:
    """The converters in the order in which transformers may try them."""
    return sorted(converters, key=lambda c: -max(map(len, c._original_source_patterns)))


def without(theirs: Iterable[Any], ours: Iterable[Converter]) -> list[Any]:
    """transformers' conversions except those for parameters that our conversions make."""
    targets = {parameter_of(target) for c in ours for target in c._original_target_patterns}
    return [
        c
        for c in theirs
        if not any(
            isinstance(c, WeightConverter) and parameter_of(t) in targets
            for t in c._original_target_patterns
        )
    ]
