"""Tiny models of families, and the classes of experts of all families of the transformers that is
installed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
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
LOCAL = {"intermediate_size": I, "num_local_experts": E}
QWEN = {"num_experts": E, "decoder_sparse_step": 1, "mlp_only_layers": []}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": I,
}
GROUPS = {"n_routed_experts": E, "n_group": 1, "topk_group": 1}
LATENT = {
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
NEMOTRON = {
    "num_hidden_layers": None,
    "layers_block_type": ["moe", "attention"],
    "moe_shared_expert_intermediate_size": I,
    "moe_latent_size": 32,
    "num_nextn_predict_layers": 0,
}
GEMMA = {
    "enable_moe_block": True,
    "num_experts": E,
    "top_k_experts": K,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", QWEN),
    "qwen3_next": ("Qwen3NextConfig", QWEN | LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", QWEN | LINEAR),
    "olmoe": ("OlmoeConfig", QWEN | {"intermediate_size": I}),
    "mixtral": ("MixtralConfig", LOCAL),
    "minimax_m2": ("MiniMaxM2Config", LOCAL | {"rotary_dim": 16}),
    "gpt_oss": ("GptOssConfig", LOCAL | {"layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3Config", GROUPS | LATENT),
    "nemotron_h": ("NemotronHConfig", GROUPS | NEMOTRON),
    "gemma4": ("Gemma4TextConfig", GEMMA),
    "llama4": (
        "Llama4TextConfig",
        LOCAL | {"intermediate_size_mlp": 2 * I, "num_experts_per_tok": 1, "moe_layers": [0, 1]},
    ),
}


def model_of(family: str) -> nn.Module:
    """A small random model, in float32."""
    name, changes = MODELS[family]
    settings = {k: v for k, v in (COMMON | changes).items() if v is not None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**settings), dtype=torch.float32
    )
    return randomized(model).eval()


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
