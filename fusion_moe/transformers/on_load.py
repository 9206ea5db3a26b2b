"""Experts that are quantized while a model in floating point is loaded, one projection at a
time.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps

from ..encodings import check_finite
from ..nn import quantize_
from ..nn.config import QuantizationConfig
from ..nn.conversion.contract import ExpertsContract, contract_of
from ..nn.frozen.base import rounded

Contracts = dict[str, ExpertsContract]  # the contracts of the original expert modules, by name


def prepare_to_quantize(model: Any, config: QuantizationConfig) -> Contracts:
    """Replaces the experts of a model on the meta device, as `quantize_` does, with its errors."""
    contracts = {
        name: found for name, m in model.named_modules() if (found := _contract(m)) is not None
    }
    floats = {
        f"{name}.{key}": getattr(model.get_submodule(name), key)
        for name, found in contracts.items()
        for key in found.names
    }
    quantize_(model, config)
    # before 5.21, transformers casts what it reads to the dtype of the existing parameter
    for name, p in floats.items():
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, nn.Parameter(p.detach(), requires_grad=False))
    return contracts


def _contract(module: Any) -> ExpertsContract | None:
    if type(module).__name__ != "Llama4TextExperts":
        return contract_of(module)
    experts, intermediate, hidden = module.down_proj.shape
    return ExpertsContract(
        experts,
        hidden,
        intermediate,
        has_gate=True,
        has_bias=False,
        transposed=True,
        concatenated=True,
        post_expert_norm=False,
    )


class QuantizeExperts(ConversionOps):
    """A float projection of experts in transformers' form -> its parts in an encoding; a bias ->
    the same in the order of our rows.
    """

    def __init__(self, contracts: Contracts):
        self.contracts = contracts

    def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Any]:
        """The results by parameter name."""
        tensors = [(name, t[0] if isinstance(t, list) else t) for name, t in input_dict.items()]
        return {k: v for name, t in tensors for k, v in self._converted(name, t, model).items()}

    def _converted(self, name: str, t: Any, model: Any) -> dict[str, Any]:
        base, _, key = name.rpartition(".")
        contract = self.contracts[base]
        if key.endswith("_bias"):
            return {name: contract.up_rows(t) if key.startswith(contract.up_name) else t}
        module = model.get_submodule(base)
        check_finite(t, module.encoding, name)
        down = key == "down_proj"
        floats, runs = (contract.down(t), 1) if down else (contract.up(t), 1 + contract.has_gate)
        parts = rounded(floats, module.encoding, runs, scales=module.scales)
        keys = module.part_names[key.removesuffix("_proj")]
        return {f"{base}.{k}": part for k, part in zip(keys, parts, strict=True)}
