"""Modules with one encoded weight, a linear layer as a rule: loaded as they are stored, then made
what computes with the weight. And the other steps after the parameters of a model were read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..checkpoints import Scheme, StoredPart, StoredWeight
from ..checkpoints.values import check_scale
from ..encodings import Quantized
from ..errors import Error
from ..nn import QuantizedLinear
from ..nn.frozen.base import own_parameters, place_
from ..nn.frozen.packed import PackedModule
from ..nn.frozen.projections import Projections
from .sources import ExpertsSource


class StoredModule(nn.Module):
    """Placeholder for a module while the parts of its weight are loaded, under their names in
    files. It is never called.
    """

    def __init__(self, module: nn.Module, weight: StoredWeight, input_scale: bool):
        """module: on the meta device, with a parameter `weight`. input_scale: whether to keep the
        scale of activations.
        """
        super().__init__()
        self._parameters.update(
            {key: p for key, p in module._parameters.items() if key != "weight"}
        )
        self._buffers.update(module._buffers)
        self._modules = module._modules
        self.__dict__["module"] = module  # not a submodule: its names are this module's
        self.stored, self.dtype = weight, module.get_parameter("weight").dtype
        for part in weight.scheme.parts:
            entry = weight.entries[part.part]
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            self.register_parameter(part.name, nn.Parameter(empty, requires_grad=False))
        if input_scale:
            self.register_buffer("input_scale", torch.empty((), dtype=torch.float32, device="meta"))

    def parts(self) -> dict[StoredPart, Tensor]:
        """The parts of the weight, each as the encoding has it."""
        return {
            part: part.to_part(self.get_parameter(part.name).detach())
            for part in self.stored.scheme.parts
        }

    def computing(self) -> nn.Module:
        """The module that computes: a QuantizedLinear for a linear layer in an encoding, else the
        module itself with a weight in floats.
        """
        scheme, module, parts = self.stored.scheme, self.__dict__["module"], self.parts().values()
        if scheme.encoding is not None and type(module) is nn.Linear:
            q = Quantized(*parts, encoding=scheme.encoding)
            module = QuantizedLinear(q, self._parameters["bias"])
            if "input_scale" in self._buffers:
                module.register_buffer("input_scale", self._buffers["input_scale"])
            return module
        floats = scheme.floats(parts).to(self.dtype)
        loaded = self._parameters | {"weight": nn.Parameter(floats, requires_grad=False)}
        module._parameters.update({key: loaded[key] for key in module._parameters})
        module._buffers.update({key: self._buffers[key] for key in module._buffers})
        return module


def finish_(model: nn.Module) -> None:
    """Replaces all placeholders in a model, one after the other."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredModule):
            computing = module.computing()
            model.set_submodule(name, computing)
            # accelerate's, which moves inputs between devices
            if (hook := getattr(module, "_hf_hook", None)) is not None:
                from accelerate.hooks import add_hook_to_module

                add_hook_to_module(computing, hook)


def cast_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters to the dtypes that the model had before. Before 5.21, transformers does not
    do so if anything is quantized.
    """
    for name, module in model.named_modules():
        if not isinstance(module, PackedModule):
            for key, p in module.named_parameters(name, recurse=False):
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
            yield module.stored.scheme, part, scale, part.name
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
