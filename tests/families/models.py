"""Sizes of tiny models, and the classes of experts of all families of the transformers that is
installed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from torch import nn

# experts, experts of a token, hidden and intermediate features
E, K, H, I, LAYERS = 4, 2, 64, 32, 2
DECORATED = re.compile(r"^@use_experts_implementation\b.*\n(?:@.*\n)*class (\w+)", re.MULTILINE)

COMMON = {
    "vocab_size": 96,
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": K,
    "intermediate_size": 2 * I,
    "moe_intermediate_size": I,
    "tie_word_embeddings": False,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": I,
}


def randomized(module: nn.Module) -> nn.Module:
    """The module, its matrices and biases random: some are zeros, or not initialized."""
    for name, p in module.named_parameters():
        if p.dim() >= 2 or "bias" in name:
            nn.init.normal_(p, std=0.2)
    return module


class AnyConfig:
    """Sizes of experts by the names that families have for them."""

    _experts_implementation = "eager"

    def __init__(self, hidden: int = H, intermediate: int = I):
        self._known = (
            ("limit", 7.0),
            ("alpha", 1.702),
            ("softcap", 30.0),
            ("eps", 1e-6),
            ("mlp_hidden_act", "relu2"),
            ("hidden_activation", "gelu_pytorch_tanh"),
            ("act", "silu"),
            ("per_tok|top_k", K),
            ("latent", None),
            ("num.*expert|^n_.*expert", E),
            ("intermediate", intermediate),
            ("hidden|dim", hidden),
        )

    def __getattr__(self, name: str) -> Any:
        found = (
            []
            if name.startswith("_")
            else [v for pattern, v in self._known if re.search(pattern, name)]
        )
        if not found:
            raise AttributeError(name)
        return found[0]


def decorated() -> Iterator[tuple[str, str]]:
    """family, class: those that `use_experts_implementation` decorates."""
    for file in _files():
        for name in DECORATED.findall(file.read_text(encoding="utf-8")):
            yield file.parent.name, name


def _files() -> list[Path]:
    return sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))


def class_of(family: str, name: str) -> type[nn.Module]:
    """A class of a family's modules."""
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def occurrences() -> int:
    """How often the decorator stands in the code of models, whatever is below it."""
    return sum(
        file.read_text(encoding="utf-8").count("\n@use_experts_implementation") for file in _files()
    )
