"""adapter_config.json: the fields of PEFT's LoraConfig that apply to experts, and those refused
because they would be ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints import read_json, shown
from ...errors import CheckpointError, UnsupportedError
from ..adapter import is_alpha

CONFIG = "adapter_config.json"
_REFUSED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "target_modules",
)


@dataclass(frozen=True)
class LoraConfig:
    """rank and alpha of all adapters; targets: full parameter names, or suffixes of them:
    "mlp.experts.down_proj".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def targeted(self, name: str) -> bool:
        """Whether a parameter has an adapter."""
        return any(name == target or name.endswith(f".{target}") for target in self.targets)

    def written(self, base: str | None) -> dict[str, Any]:
        """The entries as PEFT writes them. base: the name or path of the model that is adapted."""
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "init_lora_weights": True,
            "target_modules": [],
            "target_parameters": list(self.targets),
        }


def read_config(directory: Path) -> LoraConfig:
    """The configuration of a directory. CheckpointError for an invalid one, UnsupportedError for
    other kinds of adapters.
    """
    file = directory / CONFIG
    config = read_json(file, "what save_lora or PEFT wrote")
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if kind != "LORA" or bias != "none":
        raise UnsupportedError(
            f"peft_type = {shown(kind)}, bias = {shown(bias)}",
            expected="LORA adapters without biases",
            where=str(file),
        )
    if used := [key for key in _REFUSED if config.get(key)]:
        raise UnsupportedError(
            ", ".join(f"{key} = {shown(config[key])}" for key in used),
            expected="adapters of experts' parameters alone, all of one rank",
            where=str(file),
        )
    rank, alpha = _number(config, "r", file), _number(config, "lora_alpha", file)
    alpha = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    targets = config.get("target_parameters")
    if not (isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)):
        raise CheckpointError(
            f"target_parameters = {shown(targets)}",
            expected="names of experts' parameters",
            where=str(file),
        )
    return LoraConfig(int(rank), alpha, tuple(targets))


def _number(config: Mapping[str, Any], key: str, file: Path) -> float:
    value: Any = config.get(key)
    if not is_alpha(value) or (key == "r" and not (1 <= value < 2**31 and value == int(value))):
        raise CheckpointError(
            f"{key} = {shown(value)}",
            expected="a positive integer of 31 bits"
            if key == "r"
            else "a finite number in float32",
            where=str(file),
        )
    return float(value)
