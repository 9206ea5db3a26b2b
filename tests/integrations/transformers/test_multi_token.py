"""Layers for multi-token prediction, which `generate(use_mtp=True)` reads in floats beside a model
with encoded experts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import modeling_layers

from fusion_moe.checkpoints import quantize
from fusion_moe.transformers import from_pretrained
from tests.families.models import COMMON, E, H, K, randomized

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_layers, "MtpModel"),
    reason="this version of transformers predicts one token",
)
TOKENS = torch.arange(3, 12)[None]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose MTP layer has the weights of the last layer."""
    path = tmp_path_factory.mktemp("mtp")
    own = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_mtp_layers": 1,
    }
    torch.manual_seed(0)
    model = transformers.MellumForCausalLM(
        transformers.MellumConfig(**COMMON | {"num_experts": E, "num_experts_per_tok": K} | own)
    )
    randomized(model).save_pretrained(path)
    tensors, one = load_file(path / "model.safetensors"), torch.ones(H)
    tensors |= {
        name.replace("model.layers.1", "mtp.layers.0"): t.clone()
        for name, t in tensors.items()
        if "layers.1." in name
    }
    tensors |= {
        f"mtp.{name}.weight": one.clone()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    save_file(
        tensors | {"mtp.fc.weight": torch.randn(H, 2 * H) / 9},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


def as_compressed_tensors(path: Path) -> Path:
    """ModelOpt's NVFP4 under the names of compressed-tensors."""

    def renamed(name: str, t: Tensor) -> tuple[str, Tensor]:
        if name.endswith("weight_scale_2"):
            return name.replace("weight_scale_2", "weight_global_scale"), 1 / t.reshape(1)
        return f"{name}_packed" if t.dtype == torch.uint8 else name, t

    save_file(
        dict(renamed(*item) for item in load_file(path / "model.safetensors").items()),
        path / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "hf_quant_config.json").unlink()
    return path


@pytest.mark.parametrize(
    "renamed", [lambda path: path, as_compressed_tensors], ids=["modelopt", "compressed-tensors"]
)
def test_layers_in_floats_beside_encoded_experts(renamed, floats, tmp_path):
    model = from_pretrained(renamed(quantize(floats, tmp_path / "encoded")), dtype=torch.float32)
    further, wanted = (
        modeling_layers.MtpModel.from_pretrained(m).layers.state_dict()
        for m in (model, transformers.MellumForCausalLM.from_pretrained(floats))
    )
    assert further.keys() == wanted.keys()
    assert all(torch.equal(further[name], wanted[name]) for name in wanted)
    assert torch.equal(
        model.generate(TOKENS, use_mtp=True, **GREEDY), model.generate(TOKENS, **GREEDY)
    )
