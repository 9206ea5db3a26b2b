"""What a dispatcher gets of a module's calls, without other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusion_moe.integrations.distributed.dispatch import divide_forward


class Experts(nn.Module):
    def forward(self, hidden_states, top_k_index, top_k_weights, scale=1.0):
        return hidden_states * top_k_weights.sum(-1, keepdim=True) * scale + top_k_index.sum()


class Noting:
    """Takes tensors as they are, and notes their sizes."""

    def __init__(self):
        self.seen = []

    def dispatch(self, module, given):
        self.seen.append([tuple(t.shape) for t in given])
        return given, len(self.seen)

    def combine(self, y, kept):
        return y


@pytest.mark.parametrize("times", [1, 2])
def test_tensors_come_in_the_order_of_parameters(times):
    """Also through a forward that is divided already."""
    x, ids, w = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2)
    plain, divided, dispatchers = Experts(), Experts(), [Noting() for _ in range(times)]
    for dispatcher in dispatchers:
        divide_forward(divided, dispatcher)
    want = plain(x, ids, w, scale=2.0)
    assert divided(scale=2.0, top_k_weights=w, top_k_index=ids, hidden_states=x).equal(want)
    assert divided(x, top_k_weights=w, top_k_index=ids, scale=2.0).equal(want)
    assert divided(x, ids, w, 2.0).equal(want)
    assert all(d.seen == [[(3, 8), (3, 2), (3, 2)]] * 3 for d in dispatchers)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        divided(x, ids, w, other=1)
    compiled = torch.compile(divided, backend="eager", fullgraph=True)
    assert compiled(top_k_weights=w, top_k_index=ids, hidden_states=x, scale=2.0).equal(want)
