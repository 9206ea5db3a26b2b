"""The last steps of loading a model, after its parameters were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..checkpoints import Scheme, StoredPart
from ..checkpoints.values import check_scale
from ..errors import Error
from ..nn.frozen.base import own_parameters, place_
from ..nn.frozen.packed import PackedModule
from ..nn.frozen.projections import Projections
from .sources import ExpertsSource
from .stored_module import StoredModule


def cast_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters to the dtypes that the model had before. Before 5.21, transformers does not
    do so if anything is quantized.
    """
    for name, module in model.named_modules():
        for key, p in (
            [] if isinstance(module, PackedModule) else module.named_parameters(name, recurse=False)
        ):
            p.data = p.data.to(dtypes.get(key, p.dtype))


def check_scales(model: nn.Module, sources: Mapping[str, ExpertsSource]) -> None:
    """NonFiniteError, with the module's name, for scales that no quantizer writes; CheckpointError
    for those that are the wrong way round.

    sources: where modules of experts were loaded from.
    """
    for name, module in model.named_modules():
        for scheme, part, scale, key in _scales(module, sources.get(name)):
            try:
                check_scale(scheme, part, scale, key)
            except Error as error:
                raise error.at(name) from None


def _scales(
    module: nn.Module, source: ExpertsSource | None
) -> Iterator[tuple[Scheme, StoredPart, Tensor, str]]:
    """The scales that a module was loaded with, and their names there. Those of FP8 experts were
    checked when they were read.
    """
    if isinstance(module, StoredModule):
        for part, scale in list(module.parts().items())[1:]:
            yield module.stored.scheme, part, scale, part.suffix.removeprefix(".")
    elif (
        isinstance(module, Projections)
        and source is not None
        and source.scheme.encoding is not None
    ):
        for projection, keys in module.part_names.items():
            for part, scale, key in zip(
                source.scheme.parts[1:], module.weight_of(projection)[1:], keys[1:], strict=True
            ):
                yield source.scheme, part, scale.detach(), key


def freeze_(model: nn.Module) -> None:
    """Freezes encoded weights and puts them on large pages: transformers makes every float require
    a gradient, even block scales.
    """
    for module in model.modules():
        if isinstance(module, PackedModule):
            for p in own_parameters(module):
                p.requires_grad_(False)
            place_(module)
