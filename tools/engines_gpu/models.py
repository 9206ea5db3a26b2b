"""Directories of models with random weights in the shapes and the layouts that people serve.

nvfp4     16 of the 48 layers of Qwen3-30B-A3B in ModelOpt's NVFP4
nvfp4-48  all of them
mxfp4     8 of the 24 layers of gpt-oss-20b in its own MXFP4
fp8       16 layers of Qwen3-30B-A3B with experts in FP8, a scale for each 128 x 128
bf16      4 layers of it as nobody quantized them
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

Tensors = dict[str, Tensor]
RANK = 16  # of adapters
_QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 50688,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 67072,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "torch_dtype": "bfloat16",
}


def make(folder: Path, name: str, layers: int | None = None, **sizes: int) -> Path:
    """Writes folder/name unless it is there, with some layers, by default those of its name; sizes:
    entries of config.json to have others.
    """
    made, (config, tensors) = folder / name, _MODELS[name]
    config = config | {"num_hidden_layers": layers or config["num_hidden_layers"]} | sizes
    if name == "mxfp4":
        kinds = "sliding_attention", "full_attention"
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    if (made / "config.json").exists():
        return made
    made.mkdir(parents=True, exist_ok=True)
    g = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    index = {}
    for file, held in (
        ("outside.safetensors", _outside(config, g)),
        *(
            (f"layer{i}.safetensors", tensors(config, i, g))
            for i in range(config["num_hidden_layers"])
        ),
    ):
        save_file({n: t.contiguous().cpu() for n, t in held.items()}, made / file)
        index.update(dict.fromkeys(held, file))
    written = {"metadata": {}, "weight_map": index}
    (made / "model.safetensors.index.json").write_text(json.dumps(written))
    write_tokenizer(made, config["vocab_size"])
    (made / "config.json").write_text(json.dumps(config))
    return made


def parameters(config: dict[str, Any], seed: int, form: str) -> Iterator[tuple[str, Tensor]]:
    """A trainer's, of Qwen3 in bfloat16 on the GPU, by transformers' names. form: "whole", all
    experts of a layer in one tensor, or "each".
    """
    g = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    experts = config["num_experts"]
    yield from ((name, t.to(g.device)) for name, t in _outside(config, g).items())
    for i in range(config["num_hidden_layers"]):
        for name, t in _around_experts(config, i, g).items():
            yield name, t.to(g.device)
        (*_, inner, hidden), _, _ = _projections(config)
        for name, n, k in ("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner):
            t, before = _normal(g, experts, n, k), f"model.layers.{i}.mlp.experts"
            if form == "whole":
                yield f"{before}.{name}", t
                continue
            parts = ["down_proj"] if name == "down_proj" else ["gate_proj", "up_proj"]
            for e, of in enumerate(t):
                for part, matrix in zip(parts, of.chunk(len(parts)), strict=True):
                    yield f"{before}.{e}.{part}.weight", matrix


def adapter(model: Path) -> Path:
    """Writes model/adapter unless it is there: PEFT's files of a model of Qwen3, with factors for
    each of its experts.
    """
    made, config = model / "adapter", json.loads((model / "config.json").read_text())
    if made.exists():
        return made
    g, tensors, experts = torch.Generator().manual_seed(0), Tensors(), config["num_experts"]
    for i, (name, n, k) in itertools.product(
        range(config["num_hidden_layers"]), _projections(config)
    ):
        for factor, shape in ("A", (RANK, k)), ("B", (n, RANK)):
            for e, t in enumerate(_normal(g, experts, *shape)):
                where = f"base_model.model.model.layers.{i}.mlp.experts.{e}.{name}"
                tensors[f"{where}.lora_{factor}.weight"] = t.clone()
    made.mkdir()
    save_file(tensors, made / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["experts"]}
    (made / "adapter_config.json").write_text(json.dumps(written))
    return made


def write_tokenizer(folder: Path, size: int) -> None:
    """One whose token i is the word "ti"."""
    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _normal(g: torch.Generator, *shape: int, std: float = 0.02) -> Tensor:
    return (torch.randn(*shape, device=g.device, generator=g) * std).bfloat16()


def _bytes(g: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, device=g.device, generator=g, dtype=torch.uint8)


def _outside(config: dict[str, Any], g: torch.Generator) -> Tensors:
    size = config["vocab_size"], config["hidden_size"]
    return {
        "model.embed_tokens.weight": _normal(g, *size, std=1.0),
        "lm_head.weight": _normal(g, *size),
        "model.norm.weight": torch.ones(size[1], dtype=torch.bfloat16),
    }


def _attention(
    config: dict[str, Any], layer: str, g: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    hidden, wide = config["hidden_size"], config["head_dim"]
    heads, few = config["num_attention_heads"] * wide, config["num_key_value_heads"] * wide
    for norm in "input_layernorm", "post_attention_layernorm":
        yield f"{layer}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for name, n, k in (
        ("q_proj", heads, hidden),
        ("k_proj", few, hidden),
        ("v_proj", few, hidden),
        ("o_proj", hidden, heads),
    ):
        yield f"{layer}.self_attn.{name}.weight", _normal(g, n, k)
        if config.get("attention_bias"):
            yield f"{layer}.self_attn.{name}.bias", _normal(g, n)


def _around_experts(config: dict[str, Any], i: int, g: torch.Generator) -> Tensors:
    layer, ones = f"model.layers.{i}", torch.ones(config["head_dim"], dtype=torch.bfloat16)
    made = dict(_attention(config, layer, g))
    made |= {f"{layer}.self_attn.{name}_norm.weight": ones.clone() for name in "qk"}
    made[f"{layer}.mlp.gate.weight"] = _normal(g, config["num_experts"], config["hidden_size"])
    return made


def _qwen3_layer(config: dict[str, Any], i: int, g: torch.Generator) -> Tensors:
    layer, experts, made = f"model.layers.{i}", config["num_experts"], _around_experts(config, i, g)
    parts = _PARTS[config.get("quantization_config", {}).get("quant_method")]
    for name, n, k in _projections(config):
        for suffix, of in parts(g, experts, n, k).items():
            made |= {f"{layer}.mlp.experts.{e}.{name}.{suffix}": t for e, t in enumerate(of)}
    return made


def _projections(config: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Names of an expert's weights, and their rows and columns."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    up = [(f"{name}_proj", inner, hidden) for name in ("gate", "up")]
    return [*up, ("down_proj", hidden, inner)]


def _nvfp4(g: torch.Generator, experts: int, n: int, k: int) -> Tensors:
    scales = torch.rand(experts, n, k // 16, device=g.device, generator=g) * 200 + 56
    return {
        "weight": _bytes(g, experts, n, k // 2).cpu(),
        "weight_scale": scales.to(torch.float8_e4m3fn).cpu(),
        # codes are 2.9 and scales 156 on average, weights then 0.02
        "weight_scale_2": torch.full((experts,), 0.02 / 2.9 / 156),
        "input_scale": torch.full((experts,), 0.01),
    }


def _fp8(g: torch.Generator, experts: int, n: int, k: int) -> Tensors:
    scales = torch.rand(experts, n // 128, k // 128, device=g.device, generator=g)
    values = _normal(g, experts, n, k, std=100.0).clamp(-448, 448)  # codes beyond are NaN
    return {
        "weight": values.to(torch.float8_e4m3fn).cpu(),
        "weight_scale_inv": (scales + 0.5).mul(2e-4).cpu(),
    }


def _bf16(g: torch.Generator, experts: int, n: int, k: int) -> Tensors:
    return {"weight": _normal(g, experts, n, k).cpu()}


_PARTS = {"modelopt": _nvfp4, "fp8": _fp8, None: _bf16}


def _gpt_oss_layer(config: dict[str, Any], i: int, g: torch.Generator) -> Tensors:
    layer, hidden, inner = f"model.layers.{i}", config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    made = dict(_attention(config, layer, g))
    made[f"{layer}.self_attn.sinks"] = _normal(g, config["num_attention_heads"], std=1.0)
    made[f"{layer}.mlp.router.weight"] = _normal(g, experts, hidden)
    made[f"{layer}.mlp.router.bias"] = _normal(g, experts)
    for name, n, k in ("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner):
        made |= {
            f"{layer}.mlp.experts.{name}_blocks": _bytes(g, experts, n, k // 32, 16),
            # codes are 2.9 on average, scales 2^-7.2, weights then 0.02
            f"{layer}.mlp.experts.{name}_scales": _bytes(g, experts, n, k // 32, low=118, high=121),
            f"{layer}.mlp.experts.{name}_bias": _normal(g, experts, n),
        }
    return made


def _nvfp4_config() -> dict[str, Any]:
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "producer": {"name": "modelopt", "version": "0.39"},
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "model.embed_tokens", "*self_attn*", "*mlp.gate"],
    }


_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        "lm_head",
        *(f"model.layers.{i}.mlp.gate" for i in range(48)),
        *(f"model.layers.{i}.self_attn.{p}_proj" for i in range(48) for p in "qkvo"),
    ],
}
_FLOATS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_MODELS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any], int, torch.Generator], Tensors]]]
_MODELS = {
    "nvfp4": (_QWEN3 | {"quantization_config": _nvfp4_config()}, _qwen3_layer),
    "nvfp4-48": (
        _QWEN3 | {"quantization_config": _nvfp4_config(), "num_hidden_layers": 48},
        _qwen3_layer,
    ),
    "mxfp4": (
        _GPT_OSS
        | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _FLOATS}},
        _gpt_oss_layer,
    ),
    "fp8": (_QWEN3 | {"quantization_config": _FP8}, _qwen3_layer),
    "bf16": (_QWEN3 | {"num_hidden_layers": 4}, _qwen3_layer),
}
NAMES = tuple(_MODELS)
