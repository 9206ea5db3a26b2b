"""Directories of other packages on a GPU: each weight multiplies in the encoding that its file has,
in kernels of ours, and computes what the same model computes on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

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
def test_a_model_computes_what_it_does_on_a_cpu(name: str) -> None:
    on_cpu = from_pretrained(MADE / name, dtype=torch.float32).eval()
    on_gpu = from_pretrained(MADE / name, dtype=torch.bfloat16, device_map="cuda").eval()
    packed = [m for m in on_gpu.modules() if isinstance(m, PackedModule)]
    assert {m.encoding.name for m in packed} == {ENCODINGS[name]}
    assert (ENCODINGS[name], "linear") in readers.readable()
    assert any(isinstance(m, QuantizedLinear) for m in packed)
    want, got = on_cpu(PROMPT).logits, on_gpu(PROMPT.cuda()).logits.float().cpu()
    assert (got - want).norm() / want.norm() < 0.03
    step = on_gpu(PROMPT[:, :1].cuda()).logits.float().cpu()  # kernels for few rows
    first = on_cpu(PROMPT[:, :1]).logits
    assert (step - first).norm() / first.norm() < 0.03
