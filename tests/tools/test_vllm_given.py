"""tools/engines_gpu/given.py: small checkpoints of published entries of config.json are read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from fusion_moe.checkpoints import Directory
from fusion_moe.transformers import from_pretrained

TOOL = Path(__file__).parents[2] / "tools" / "engines_gpu" / "given.py"
_COMMON: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 96}
_COMMON |= {"moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2}
_COMMON |= {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "head_dim": 64}
_COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# sizes are small; what is beside them is in the published files
GIVEN = {
    "deepseek": _COMMON
    | {"model_type": "deepseek_v3", "num_hidden_layers": 61, "first_k_dense_replace": 3}
    | {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
    | {"v_head_dim": 64, "quantization_config": _FP8},
    "glm": _COMMON
    | {"model_type": "glm4_moe", "num_hidden_layers": 46, "first_k_dense_replace": 1}
    | {"attention_bias": True, "rope_scaling": None, "rope_theta": 1000000},
    "minimax": _COMMON
    | {"model_type": "minimax_m2", "num_hidden_layers": 62, "attn_type_list": [1] * 62}
    | {"num_local_experts": 8, "rotary_dim": 32, "num_nextn_predict_layers": 0}
    | {"num_mtp_modules": 3, "bos_token_id": 1, "eos_token_id": 2, "quantization_config": _FP8},
    "qwen3.5": {
        "model_type": "qwen3_5_moe",
        "vision_config": {},
        "text_config": _COMMON
        | {"model_type": "qwen3_5_moe_text", "num_experts": 8, "num_hidden_layers": 40}
        | {"num_nextn_predict_layers": 0, "shared_expert_intermediate_size": 128}
        | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10},
    },
}


@pytest.mark.exhaustive
def test_a_model_of_any_config(tmp_path: Path) -> None:
    """Layers are few, entries of published quantization are gone, all weights are read."""
    files = []
    for name, entries in GIVEN.items():
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "config.json")
        files[-1].write_text(json.dumps(entries))
    command = [sys.executable, str(TOOL), str(tmp_path / "made"), *map(str, files)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    layers = {"deepseek": 5, "glm": 3, "minimax": 2, "qwen3.5": 2}
    for name in GIVEN:
        made = tmp_path / "made" / name
        config = json.loads((made / "config.json").read_text())
        assert config["num_hidden_layers"] == layers[name]
        assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
        assert "auto_map" not in config
        names = set(Directory.open(made).tensors)
        drafts = {n for n in names if n.startswith(f"model.layers.{layers[name]}.")}
        assert bool(drafts) == (name in ("deepseek", "glm"))
        model = from_pretrained(made)
        assert sum("Experts" in type(m).__name__ for m in model.modules()) == 2
        for entry in "attn_type_list", "layer_types":
            assert len(config.get(entry) or range(layers[name])) == layers[name]
    assert len(list((tmp_path / "made").iterdir())) == len(GIVEN)
