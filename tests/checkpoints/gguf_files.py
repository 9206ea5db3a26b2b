"""GGUF files of tiny models: tensors under the names that the package gguf has for those of
safetensors, metadata under its own keys, quantized by it where it can.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_checkpoints import model_of
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "glm4_moe": "glm4moe",
    "qwen3_5_moe_text": "qwen35moe",
}
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen2_moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    "minimax_m2": {"rotary_dim": 32},
    "glm4_moe": {
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
        "num_hidden_layers": 3,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
}
_FLOATS = re.compile(r"\.(gate|router|shared_expert_gate)\.|_proj_bias|conv1d")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)(\.\w+)")


def model_for(family: str) -> Any:
    """The model whose weights `write_gguf` writes."""
    model = model_of(family, torch.float32, **{**SIZES, **OF_FAMILY.get(family, {})})
    for name, t in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            t.copy_(torch.arange(len(t)) / 8)
    return model


def write_gguf(
    file: Path,
    family: str,
    experts: str = "MXFP4",
    others: str = "F32",
    split: int = 0,
    without: tuple[str, ...] = (),
    further: int = 0,
    **add: Any,
) -> Path:
    """Writes a random model, with these types of ggml for matrices of experts, and for all others
    but the routers. split: after how many tensors, 0 for one file; without: those that are left
    out; further: layers for multi-token prediction that the metadata says; add: other tensors.
    """
    import gguf

    config, tensors = _written(family)
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    _add_metadata(writer, config, further)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, t in tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name, "weight"
        found = names.get_name(base)
        assert found is not None, name
        kind = experts if t.dim() == 3 else others if t.dim() == 2 and suffix == "weight" else "F32"
        kind = "F32" if "ffn_gate_inp" in found or "ssm_conv1d" in found else kind
        qtype = gguf.GGMLQuantizationType[kind]
        full = found if found.endswith("ssm_a") else f"{found}.{suffix}"
        if full not in without:
            writer.add_tensor(full, blocks_of(t, kind), raw_dtype=qtype)
    for name, values in add.items():
        writer.add_tensor(name, torch.as_tensor(values, dtype=torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@torch.no_grad()
def rounded_model(family: str, experts: str, others: str) -> Any:
    """The model whose weights `write_gguf` writes, as gguf rounds them."""
    model = model_for(family).eval()
    for name, p in model.named_parameters():
        of_experts = p.dim() == 3
        if of_experts and family == "gpt_oss":
            p.copy_(_through_gguf(p.mT, experts).mT)
        elif p.dim() > 1 and not _FLOATS.search(name):
            p.copy_(_through_gguf(p, experts if of_experts else others))
    return model


def _through_gguf(t: Tensor, kind: str) -> Tensor:
    import gguf

    qtype = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(t.detach().contiguous().numpy(), qtype)
    return torch.from_numpy(gguf.quants.dequantize(blocks, qtype))


def blocks_of(t: Tensor, kind: str) -> np.ndarray:
    """Floats as ggml stores them: as gguf quantizes; NVFP4 as this library does, with 1 for the
    scale of the matrix; other types with random bytes and small scales.
    """
    import gguf

    qtype = gguf.GGMLQuantizationType[kind]
    if kind == "NVFP4":
        return nvfp4_blocks(t)
    try:
        return gguf.quants.quantize(t.numpy(), qtype)
    except NotImplementedError:
        numbers, size = gguf.GGML_QUANT_SIZES[qtype]
        made = np.random.default_rng(0).integers(0, 256, (t.numel() // numbers, size), np.uint8)
        at = {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "Q4_K": [0, 2], "Q5_K": [0, 2]}
        for i in at.get(kind, [0]):
            made[:, i : i + 2] = np.frombuffer(np.float16(2**-9).tobytes(), np.uint8)
        return made.reshape(*t.shape[:-1], -1)


def nvfp4_blocks(t: Tensor) -> np.ndarray:
    """Of every 64 numbers four scales, then the codes of each 16: the first 8 in low nibbles."""
    from fusion_moe.encodings import NVFP4, quantize

    q = quantize(t.flatten(0, -2), NVFP4, torch.ones(()))
    packed = q.codes.numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1, 4, 2, 8)
    nibbles = (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*codes.shape[:2], 32)
    scales = q.block_scale.view(torch.uint8).numpy().reshape(*codes.shape[:2], 4)
    return np.concatenate([scales, nibbles], -1).reshape(*t.shape[:-1], -1)


@cache
def _written(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model's configuration, and its tensors by names as llama.cpp has them before it maps
    them.
    """
    model = model_for(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model.config, _stacked(load_file(Path(folder, "model.safetensors")), family)


def _stacked(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """All experts of a projection in one tensor; and what llama.cpp changes in a family."""
    found: dict[str, list[Tensor]] = {}
    for name, t in tensors.items():
        expert = _EXPERT.fullmatch(name)
        found.setdefault("{}.{}{}".format(*expert.groups()) if expert else name, []).append(t)
    stacked = {name: torch.stack(t) if len(t) > 1 else t[0] for name, t in found.items()}
    for name in list(stacked):
        if family == "gpt_oss" and "experts." in name:
            base, _, projection = name.rpartition(".")
            t = stacked.pop(name)
            t = t.mT if t.dim() == 3 else t
            suffix = ".bias" if projection.endswith("_bias") else ".weight"
            projection = projection.removesuffix("_bias")
            if projection == "gate_up_proj":
                stacked[f"{base}.gate_proj{suffix}"] = t[:, 0::2].contiguous()
                stacked[f"{base}.up_proj{suffix}"] = t[:, 1::2].contiguous()
            else:
                stacked[f"{base}.{projection}{suffix}"] = t.contiguous()
        if family == "mixtral" and (".q_proj" in name or ".k_proj" in name):
            heads = SIZES["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            halves = stacked[name].unflatten(0, (heads, 2, -1))
            stacked[name] = halves.transpose(1, 2).flatten(0, 2).contiguous()
        if name.endswith("e_score_correction_bias"):
            stacked[f"{name.removesuffix('_bias')}.bias"] = stacked.pop(name)
        if name.endswith("shared_expert_gate.weight"):
            stacked[name] = stacked[name][0]
        if family == "qwen3_5_moe_text":
            _change_qwen35(name, stacked)
    return stacked


def _change_qwen35(name: str, tensors: dict[str, Tensor]) -> None:
    """The heads of values by their place among those of a head of keys; 1 + factors of norms."""
    of = OF_FAMILY["qwen3_5_moe_text"]
    keys, values = of["linear_num_key_heads"], of["linear_num_value_heads"]
    t, leaf = tensors[name], name.rpartition("linear_attn.")[2]
    if "linear_attn." not in name:
        tensors[name] = t + 1 if name.endswith("norm.weight") else t
        return
    heads = [key * (values // keys) + i for i in range(values // keys) for key in range(keys)]
    size = of["linear_value_head_dim"] if "proj_a" not in leaf and "proj_b" not in leaf else 1
    order = [head * size + i for head in heads for i in range(size)]
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * of["linear_key_head_dim"]
        t = t.squeeze(1) if leaf == "conv1d.weight" else t
        tensors[name] = t[[*range(before), *(before + i for i in order)]]
    elif leaf == "out_proj.weight":
        tensors[name] = t[:, order].contiguous()
    elif leaf in ("A_log", "dt_bias"):
        tensors[name] = -t[heads].exp() if leaf == "A_log" else t[heads]
        if leaf == "dt_bias":
            tensors[name.removesuffix("dt_bias") + "dt_proj.bias"] = tensors.pop(name)
    elif leaf != "norm.weight":
        tensors[name] = t[order]


def _add_metadata(writer: Any, config: Any, further: int = 0) -> None:
    import gguf

    writer.add_block_count(config.num_hidden_layers + further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_vocab_size(config.vocab_size)
    tokens = ["t", *"0123456789", "t0"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + [f"<{i}>" for i in range(len(tokens), config.vocab_size)])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(
        getattr(config, "moe_intermediate_size", config.intermediate_size)
    )
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rotary := getattr(config, "rotary_dim", None):
        writer.add_rope_dimension_count(rotary)
    if config.model_type == "glm4_moe":
        writer.add_rope_dimension_count(SIZES["head_dim"] // 2)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(further)
    if config.model_type == "qwen3_5_moe_text":
        writer.add_rope_dimension_count(SIZES["head_dim"] // 4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_full_attention_interval(2)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
