"""A tiny Qwen3-MoE of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}


def qwen3_moe(seed: int = 0, **changes: Any) -> Any:
    """A random model in float32, for inference. changes: of its configuration."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**SIZES | changes)
    return transformers.Qwen3MoeForCausalLM(config).eval()
