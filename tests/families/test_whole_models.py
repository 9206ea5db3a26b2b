"""`quantize_` on whole models of families: logits of a plain model with the weights that the NVFP4
bytes mean.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")

import torch

import fusion_moe
from fusion_moe.nn import Llama4MoE, NVFP4Experts, convert
from tests.families.decoded import plain_model, relative
from tests.families.models import E
from tests.families.tiny import logits, tiny

FAMILIES = (
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "olmoe",
    "mixtral",
    "minimax_m2",
    "gpt_oss",
    "deepseek_v3",
    "nemotron_h",
    "gemma4",
    "llama4",
)
KINDS = {"llama4": Llama4MoE}


def tokens() -> torch.Tensor:
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits(family):
    original = tiny(family)
    model = copy.deepcopy(original)
    fusion_moe.quantize_(model)
    got, want, unquantized = (
        logits(m, tokens()) for m in (model, plain_model(model, original), original)
    )
    assert any(type(m) is KINDS.get(family, NVFP4Experts) for m in model.modules())
    assert relative(got, want) <= 1e-5
    assert relative(want, unquantized) > 1e-3  # the experts matter


@pytest.mark.judges("modelopt")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@torch.no_grad()
def test_bytes_are_modelopts(family):
    original = next(m for m in tiny(family).modules() if hasattr(m, "is_concatenated"))
    made = convert(original, fusion_moe.NVFP4Config(scales="max"))
    up = original.gate_up_proj if original.has_gate else original.up_proj
    up, down = (t.mT if original.is_transposed else t for t in (up, original.down_proj))
    matrices = [up]
    if original.has_gate:
        matrices = up.chunk(2, 1) if original.is_concatenated else [up[:, 0::2], up[:, 1::2]]
    assert same_bytes(made.weight_of(made.projections[0]), modelopts(matrices))
    assert same_bytes(made.weight_of("down"), modelopts([down]))


def modelopts(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Matrices of all experts [E, N, K], one above the other: codes, block scales, decode scales by
    nvidia-modelopt.
    """
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    made = [[NVFP4QTensor.quantize(m[e].contiguous(), 16) for m in matrices] for e in range(E)]
    codes = torch.stack([torch.cat([q._quantized_data for q, _, _ in expert]) for expert in made])
    block_scale = torch.stack(
        [torch.cat([scale.view(torch.uint8) for _, scale, _ in expert]) for expert in made]
    )
    return [
        codes,
        block_scale,
        torch.tensor([[scale.item() for _, _, scale in expert] for expert in made]),
    ]


def same_bytes(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8).flatten(), b.view(torch.uint8).flatten())
        for a, b in zip(got, want, strict=True)
    )
