"""Directories that an earlier version wrote load, and hold the same numbers.

`written/quantize` and `written/save_pretrained` are one tiny Qwen3-MoE with experts in NVFP4: by
`checkpoints.quantize` from its files, and by transformers' `save_pretrained` after `quantize_`.
Nobody writes them again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from fusion_moe.transformers import from_pretrained

WRITTEN = Path(__file__).parent / "written"
DIGEST = "396221e5f2d7d9ce6938c4b2fe5931f63ed6da2b70c70d89e792eea7aa1be380"


def digest(model: nn.Module) -> str:
    """Of the names and bytes of all tensors."""
    found = hashlib.sha256()
    for name, t in sorted(model.state_dict().items()):
        found.update(name.encode() + t.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("by", ["quantize", "save_pretrained"])
def test_a_directory_of_an_earlier_version_loads(by):
    model = from_pretrained(WRITTEN / by, dtype=torch.bfloat16)
    assert digest(model) == DIGEST
    assert model(torch.arange(1, 5)[None]).logits.isfinite().all()
