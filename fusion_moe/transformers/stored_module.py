"""Modules with one encoded weight, a linear layer as a rule: loaded as they are stored, then made
what computes with the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checkpoints import StoredPart, StoredWeight
from ..checkpoints.fp8 import dequantize_fp8
from ..encodings import NVFP4, Quantized, dequantize
from ..nn import NVFP4Linear, QuantizedLinear


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
            self.register_parameter(
                part.suffix.removeprefix("."), nn.Parameter(empty, requires_grad=False)
            )
        if input_scale:
            self.register_buffer("input_scale", torch.empty((), dtype=torch.float32, device="meta"))

    def parts(self) -> dict[StoredPart, Tensor]:
        """The parts of the weight, each as the encoding has it."""
        return {
            part: part.to_part(self.get_parameter(part.suffix.removeprefix(".")).detach())
            for part in self.stored.scheme.parts
        }

    def made(self) -> nn.Module:
        """The module that computes: a QuantizedLinear for a linear layer in an encoding, else the
        module itself with a weight in floats.
        """
        encoding, module, parts = (
            self.stored.scheme.encoding,
            self.__dict__["module"],
            self.parts().values(),
        )
        if encoding is not None and type(module) is nn.Linear:
            made = (NVFP4Linear if encoding == NVFP4 else QuantizedLinear)(
                Quantized(*parts, encoding=encoding), self._parameters["bias"]
            )
            if "input_scale" in self._buffers:
                made.register_buffer("input_scale", self._buffers["input_scale"])
            return made
        floats = (
            dequantize_fp8(*parts)
            if encoding is None
            else dequantize(Quantized(*parts, encoding=encoding))
        )
        module.weight = nn.Parameter(floats.to(self.dtype), requires_grad=False)
        module._parameters.update(
            {key: self._parameters[key] for key in module._parameters if key != "weight"}
        )
        module._buffers.update({key: self._buffers[key] for key in module._buffers})
        return module


def finish_(model: nn.Module) -> None:
    """Replaces all placeholders in a model, one after the other."""
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredModule):
            made = module.made()
            model.set_submodule(name, made)
            # accelerate's, which moves inputs between devices
            if (hook := getattr(module, "_hf_hook", None)) is not None:
                from accelerate.hooks import add_hook_to_module

                add_hook_to_module(made, hook)
