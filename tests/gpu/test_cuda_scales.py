"""Rules for scales of blocks on a GPU choose the scales that they choose on a CPU."""

from __future__ import annotations

import pytest
import torch

from fusion_moe.encodings import FP8, INT4, MXFP4, NVFP4, quantize, search
from fusion_moe.nn.frozen.weight import rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("encoding", "rule"),
    [(NVFP4, "four_over_six"), (NVFP4, "mse"), (MXFP4, "mse"), (INT4, "mse")],
)
def test_the_bytes_of_a_cpu(encoding, rule, monkeypatch):
    monkeypatch.setattr(search, "_PANEL", 2**18)  # several, the last one short
    rand = torch.Generator().manual_seed(0)
    x = torch.randn(3, 96, 1024, generator=rand) * torch.rand(3, 96, 1, generator=rand) ** 3
    x[0, 0] = 0
    want, got = (quantize(t.bfloat16(), encoding, scales=rule) for t in (x, x.cuda()))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("encoding", [NVFP4, MXFP4, INT4, FP8], ids=lambda e: e.name)
def test_what_quantize_makes(encoding):
    """By each format's own rule, gate and up with scales of their own, no whole blocks of FP8."""
    x = torch.randn(3, 2 * 160, 224, generator=torch.Generator().manual_seed(0)).bfloat16()
    rule = search.usual_rule(encoding)
    want, got = (rounded(t, encoding, 2, scales=rule) for t in (x, x.cuda()))
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
