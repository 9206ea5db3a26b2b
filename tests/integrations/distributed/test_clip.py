"""clip_grad_norm_ in one process: as torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_moe.distributed import clip_grad_norm_


def parameters():
    made = [nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    for i, p in enumerate(made[:2]):  # the last has no gradient
        p.grad = torch.full((3, 4), 10.0 + i)
    return made


@pytest.mark.parametrize(
    "given",
    [lambda p: p[0], lambda p: p, iter, lambda p: p[2], lambda p: []],
    ids=["one", "list", "iterator", "no grad", "none"],
)
def test_as_torch(given):
    ours, theirs = parameters(), parameters()
    norms = clip_grad_norm_(given(ours), 1.0), nn.utils.clip_grad_norm_(given(theirs), 1.0)
    torch.testing.assert_close(*norms)
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(p.grad, q.grad)
