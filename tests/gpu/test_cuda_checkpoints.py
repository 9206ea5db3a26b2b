"""Directories of other packages on a GPU: each weight multiplies in the encoding that its file has,
in kernels of ours, and computes what the reference does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fusion_moe import options
from fusion_moe.backends.cuda import readers
from fusion_moe.nn import QuantizedLinear
from fusion_moe.nn.frozen.packed import PackedModule
from fusion_moe.transformers import from_pretrained

MADE = Path(__file__).parents[1] / "checkpoints" / "made"
ENCODINGS = {
    "bnb-qwen3_moe": "nf4",
    "bnb-qwen3_moe-linear": "nf4",
    "awq-qwen3_moe": "uint4_128_f16",
    "auto_round-gptq": "int4_128_f16",
    "ct-qwen3_moe-w4a16_asym": "uint4_128",
    "ct-qwen3_moe-w8a16": "int8_channel",
}
PROMPT = torch.arange(3, 19)[None]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENCODINGS)
@torch.no_grad()
def test_a_model_computes_what_the_reference_does(name: str) -> None:
    on_cpu = from_pretrained(MADE / name, dtype=torch.float32).eval()
    on_gpu = from_pretrained(MADE / name, dtype=torch.bfloat16, device_map="cuda").eval()
    packed = [m for m in on_gpu.modules() if isinstance(m, PackedModule)]
    assert {m.encoding.name for m in packed} == {ENCODINGS[name]}
    assert (ENCODINGS[name], "linear") in readers.readable()
    assert any(isinstance(m, QuantizedLinear) for m in packed)
    for tokens in PROMPT, PROMPT[:, :1]:  # kernels for some rows and for few
        got = on_gpu(tokens.cuda()).logits.float().cpu()
        with options.override(target="reference"):
            want = on_cpu(tokens).logits
        assert (got - want).norm() / want.norm() < 0.03
