"""A tiny model of each family of transformers with experts: its own class, with its towers for
images and sound if it has them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from tests.families.models import COMMON, LINEAR, E, H, I, K, randomized

Entries = dict[str, Any]

# Sizes by the names that configurations have for them
_ATTENTION = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "o_lora_rank": 32,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "sliding_window": 8,
}
_TEXT = (
    COMMON
    | LINEAR
    | _ATTENTION
    | {
        "layer_types": None,
        "num_local_experts": E,
        "num_experts": E,
        "n_routed_experts": E,
        "moe_num_experts": E,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts_per_token": K,
        "top_k": K,
        "moe_k": K,
        "moe_topk": K,
        "n_shared_experts": 1,
        "num_shared_experts": 1,
        "moe_num_shared_experts": 1,
        "num_dense_layers": 1,
        "shared_intermediate_size": I,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    }
)
_TOWER = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": H,
    "intermediate_size": H,
    "num_heads": 2,
    "num_attention_heads": 2,
    "out_hidden_size": H,
    "num_position_embeddings": 64,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": H,
    "projector_input_dim": H,
    "projector_output_dim": H,
    "deepstack_visual_indexes": [0],
    "num_key_value_heads": 2,
    "head_dim": 32,
    "window_size": 28,
    "text_hidden_size": H,
}
_OTHERS_TOWER = {
    "hidden_size": H,
    "intermediate_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "image_size": 28,
    "patch_size": 14,
}
_SAM = {
    "output_channels": 32,
    "downsample_channels": [32, 64],
    "global_attn_indexes": [1],
    "mlp_dim": H,
    "image_size": 32,
    "patch_size": 16,
    "window_size": 2,
}
_MIXED, _DENSE_FIRST = (
    ["linear_attention", "full_attention"],
    {"mlp_layer_types": ["dense", "sparse"]},
)
_OCR = {"text_config": _DENSE_FIRST, "vision_config": {"sam_config": _SAM}}
_SWA = {
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "sliding_window_size": 8,
    "rel_extent": 16,
}

# the class of each family, and what its configuration needs beside
FAMILIES: dict[str, tuple[str, Entries]] = {
    "afmoe": ("AfmoeForCausalLM", {}),
    "aria": (
        "AriaForConditionalGeneration",
        {"projector_patch_to_query_dict": {4: 4}, "vision_config": _OTHERS_TOWER},
    ),
    "axk1": ("AXK1ForCausalLM", {"head_dim": 16}),
    "axk2": ("AXK2ForCausalLM", {}),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        {"layer_types": _MIXED, "n_group": 1, "topk_group": 1},
    ),
    "beam": ("BeamForCausalLM", _DENSE_FIRST),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2": ("DeepseekOcr2ForConditionalGeneration", _OCR),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"head_dim": 16}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {}),
    "diffusion_gemma": (
        "DiffusionGemmaForBlockDiffusion",
        {
            "text_config": {"num_experts": E, "top_k_experts": K, "global_head_dim": 32},
            "canvas_length": 9,
            "vision_config": _OTHERS_TOWER
            | {
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "position_embedding_size": 16,
            },
        },
    ),
    "dots1": ("Dots1ForCausalLM", {}),
    "dots3_note": (
        "Dots3NoteForConditionalGeneration",
        {
            "text_config": {
                "layer_types": ["full_attention"] * 2,
                "use_dsa": True,
                "shared_experts_intermediate_size": I,
            },
            "vision_config": _DENSE_FIRST
            | {
                "num_local_experts": 2 * E,
                "per_layer_config": {},
                "adapter_in_dim": H,
                "adapter_out_dim": H,
                "moe_intermediate_size": I,
            },
            "audio_config": {
                "adapter_input_size": H,
                "adapter_out_dim": H,
                "downsample_hidden_size": 16,
            },
        },
    ),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        {
            "text_config": {
                "moe_intermediate_size": [I, I],
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 8]},
            }
        },
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "flint": ("FlintForCausalLM", {}),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True,
            "top_k_experts": K,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 0,
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        {
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [2, 3, 3],
                }
            }
        },
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        {
            "text_config": _DENSE_FIRST
            | {
                "index_topk": 16,
                "qk_rope_head_dim": 0,
                "head_dim": 0,
                "linear_num_heads": 2,
                "linear_head_dim": 32,
                "layer_types": _MIXED,
            },
            "vision_config": {"projection_intermediate_size": H},
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {"intermediate_size": I}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
        },
    ),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "hy_v4_vl": (
        "HYV4VLForConditionalGeneration",
        {
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}
            },
            "vision_config": {"max_image_size": 28},
        },
    ),
    "inkling": (
        "InklingForConditionalGeneration",
        {
            "text_config": _SWA | _DENSE_FIRST,
            "audio_config": {"mel_vocab_size": 16, "n_mel_bins": 8},
            "vision_config": {"patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3},
        },
    ),
    "inkling2": (
        "Inkling2ForConditionalGeneration",
        {
            "text_config": _SWA | {"unpadded_vocab_size": 90},
            "vision_config": {"projection_hidden_dim": H, "posemb_grid_size": 4},
        },
    ),
    "inkling2_loop": (
        "Inkling2LoopForConditionalGeneration",
        {
            "text_config": _SWA
            | {
                "unpadded_vocab_size": 90,
                "n_layers_per_attn_res_block": 1,
                "loop_layer_index_start": 1,
                "loop_layer_index_end": 2,
                "loop_num_passes": 2,
                "loop_gate_rank": 8,
            },
            "vision_config": _OTHERS_TOWER
            | {
                "model_type": "inkling2_vision",
                "text_hidden_size": H,
                "projection_hidden_dim": H,
                "posemb_grid_size": 4,
            },
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "intermediate_size": I,
            "mamba_dt_rank": 4,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {"layer_types": _MIXED, "linear_num_heads": 2, "linear_head_dim": 32},
    ),
    "kolibri1": ("Kolibri1ForCausalLM", {}),
    "laguna": ("LagunaForCausalLM", {}),
    "lara_mini": ("LaraMiniForCausalLM", {"layer_types": _MIXED}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {
                "intermediate_size": I,
                "intermediate_size_mlp": 2 * I,
                "num_experts_per_tok": 1,
                "moe_layers": [0, 1],
            },
            "vision_config": {"pixel_shuffle_ratio": 1.0},
        },
    ),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"intermediate_size": I, "rotary_dim": 16}),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", {"projector_hidden_size": H}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        {"vision_config": _OTHERS_TOWER | {"model_type": "pixtral"}},
    ),
    "mixtral": ("MixtralForCausalLM", {"intermediate_size": I}),
    "muse_spark": (
        "MuseSparkForConditionalGeneration",
        {
            "text_config": _DENSE_FIRST | {"moe_hidden_size": H},
            "out_hidden_size": H,
            "projector_hidden_size": H,
            "audio_config": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": None,
            "layers_block_type": ["moe", "attention"],
            "moe_shared_expert_intermediate_size": I,
            "moe_latent_size": 32,
            "num_nextn_predict_layers": 0,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"intermediate_size": I}),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterForTokenClassification",
        {"intermediate_size": I},
    ),
    "phimoe": ("PhimoeForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {"text_config": {"layer_types": _MIXED}}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {"layer_types": _MIXED}),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeForConditionalGeneration",
        {
            "thinker_config": {
                "audio_config": {
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": H,
                    "d_model": H,
                    "output_dim": H,
                    "downsample_hidden_size": 16,
                },
            },
            "talker_config": {
                "text_config": {"shared_expert_intermediate_size": I},
                "code_predictor_config": {"num_code_groups": 4},
                "num_code_groups": 4,
                "thinker_hidden_size": H,
                "spatial_merge_size": 2,
            },
            "code2wav_config": {
                "decoder_dim": 32,
                "codebook_size": 16,
                "num_quantizers": 4,
                "num_hidden_layers": 1,
            },
        },
    ),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {}),
    "qwen4_exp": (
        "Qwen4ExpForConditionalGeneration",
        {
            "text_config": {
                "layer_types": _MIXED,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 32,
                "indexer_budget": 8,
                "indexer_compress_ratio": 4,
            },
        },
    ),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "unlimited_ocr": ("UnlimitedOcrForConditionalGeneration", _OCR),
    "zaya": ("ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 32}),
}
_NAMES = set(dir(transformers))  # of the one that is installed
FAMILIES = {family: row for family, row in FAMILIES.items() if row[0] in _NAMES}


def tiny(family: str) -> Any:
    """A random model in float32."""
    name, changes = FAMILIES[family]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    return randomized(
        made._from_config(_config(made.config_class, changes), dtype=torch.float32)
    ).eval()


def _config(kind: type[PreTrainedConfig], changes: Entries) -> PreTrainedConfig:
    """A configuration of small sizes, with those of its parts."""
    parts = {key: part for key, part in kind.sub_configs.items() if part.__name__ != "AutoConfig"}
    names = kind().to_dict().keys() - parts.keys()
    known = (
        _TOWER
        if any(word in kind.__name__ for word in ("Vision", "Audio", "Sam", "Code2Wav"))
        else _TEXT
    )
    entries = {key: value for key, value in known.items() if key in names}
    entries |= {key: value for key, value in changes.items() if key not in parts}
    made = {key: _config(part, changes.get(key, {})) for key, part in parts.items()}
    return kind(**{key: value for key, value in entries.items() if value is not None}, **made)


def of_text(model: Any) -> Any:
    """The part of a model that computes logits of text. Of Llama-4 the text model, since in
    transformers 5.24 the class around it fails in its forward, for want of image_outputs.
    """
    if type(model).__name__.startswith("Llama4ForCond"):
        return model.language_model
    return getattr(model, "thinker", model)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Those of a model for tokens."""
    return of_text(model)(input_ids=ids).logits
