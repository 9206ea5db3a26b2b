"""Directories that were written load as models, with the logits of what they were written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from files import MADE
from torch import Tensor

from fusion_moe.checkpoints import convert

transformers = pytest.importorskip("transformers")


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(
            torch.randint(3, 32, (2, 9), generator=torch.Generator().manual_seed(0))
        ).logits


def load(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from fusion_moe.transformers import from_pretrained

    return from_pretrained(path, dtype=dtype)


@pytest.mark.parametrize("name", ["ct-qwen3_moe", "ct-mixtral", "ct-gpt_oss", "mxfp4-gpt_oss"])
def test_converted(name: str, tmp_path: Path) -> None:
    a, b = logits(load(convert(MADE / name, tmp_path / "dst"))), logits(load(MADE / name))
    assert ((a - b).norm() / b.norm()).item() <= 1e-5


def test_dense(tmp_path: Path) -> None:
    """As transformers' own class, from float32."""
    dense = convert(MADE / "modelopt-qwen3_moe", tmp_path / "dst", "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    a, b = logits(model), logits(load(MADE / "modelopt-qwen3_moe"))
    assert model.dtype == torch.float32
    assert ((a - b).norm() / b.norm()).item() <= 1e-5
