"""Experts and linear layers that are quantized while a model in floating point is loaded, one
projection at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps

from ...encodings import check_finite
from ...errors import Error
from ...messages import skipping
from ...nn import ExpertsContract, QuantizationConfig, contract_of, quantize_
from ...nn.frozen import PackedModule, rounded

# what describes the original modules that are replaced, by name; None: a linear layer
Contracts = dict[str, ExpertsContract | None]


def prepare_to_quantize(model: Any, config: QuantizationConfig) -> Contracts:
    """Replaces the experts of a model on the meta device, and its linear layers if config says so,
    as `quantize_` does, with its errors.
    """
    before = dict(model.named_modules())
    contracts = {name: layout_of(m) for name, m in before.items()}
    # there are no numbers yet: weights are requantized once they are read
    quantize_(model, replace(config, weights="packed"))
    replaced = {
        name: contract
        for name, contract in contracts.items()
        if (contract or type(before[name]) is nn.Linear)
        and isinstance(model.get_submodule(name), PackedModule)
    }
    # before 5.21, transformers casts what it reads to the dtype of the existing parameter
    for name, contract in replaced.items():
        for key in floats_of(contract):
            p = nn.Parameter(getattr(before[name], key).detach(), requires_grad=False)
            setattr(model.get_submodule(name), key, p)
    return replaced


def floats_of(contract: ExpertsContract | None) -> tuple[str, ...]:
    """The names of the parameters in floats of a module of experts that are quantized as they are
    read, by its contract; None: a linear layer, whose is "weight".
    """
    return ("weight",) if contract is None else contract.names


def layout_of(module: Any) -> ExpertsContract | None:
    """`contract_of` a module of experts, or of those of Llama-4, which have none; else None."""
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
    """A float projection of experts in transformers' form, or the weight of a linear layer -> its
    parts in an encoding; a bias of experts -> the same in the order of our rows.
    """

    def __init__(self, contracts: Contracts):
        self.contracts = contracts

    def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Any]:
        """The results by parameter name."""
        tensors = [(name, t[0] if isinstance(t, list) else t) for name, t in input_dict.items()]
        return {k: v for name, t in tensors for k, v in self._converted(name, t, model).items()}

    def _converted(self, name: str, t: Any, model: Any) -> dict[str, Any]:
        base, _, key = name.rpartition(".")
        contract, module, runs = self.contracts[base], model.get_submodule(base), 1
        if contract and key.endswith("_bias"):
            return {name: contract.up(t) if key.startswith(contract.up_name) else t}
        try:
            check_finite(t, module.encoding, name)
        except Error as error:
            raise error.advise(skipping(base)) from None
        if contract is None:
            t = t[None]
        elif key == "down_proj":
            t = contract.down(t)
        else:
            t, runs = contract.up(t), 1 + contract.has_gate
        parts = rounded(t, module.encoding, runs, scales=module.scales)
        keys = module.part_names[key.removesuffix("_proj")]
        return {
            f"{base}.{k}": part if contract else part[0]
            for k, part in zip(keys, parts, strict=True)
        }
