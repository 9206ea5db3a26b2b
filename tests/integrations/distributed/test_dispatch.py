"""What a dispatcher gets of a module's calls, without other ranks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from fusion_moe.errors import DtypeError, ShapeError
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
        divide_forward(divided, dispatcher, 8)
    want = plain(x, ids, w, scale=2.0)
    assert divided(scale=2.0, top_k_weights=w, top_k_index=ids, hidden_states=x).equal(want)
    assert divided(x, top_k_weights=w, top_k_index=ids, scale=2.0).equal(want)
    assert divided(x, ids, w, 2.0).equal(want)
    assert all(d.seen == [[(3, 8), (3, 2), (3, 2)]] * 3 for d in dispatchers)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        divided(x, ids, w, other=1)
    compiled = torch.compile(divided, backend="eager", fullgraph=True)
    assert compiled(top_k_weights=w, top_k_index=ids, hidden_states=x, scale=2.0).equal(want)


def test_a_wrong_call_is_an_error_before_others_get_it():
    """Others would wait for what never comes, or take what they get for something else."""
    x, ids, w = torch.randn(2, 3, 8), torch.zeros(6, 2, dtype=torch.int64), torch.rand(6, 2)
    divided, dispatcher = Experts(), Noting()
    divide_forward(divided, dispatcher, 8)
    shapes = r"hidden_states \[.*expected \[\.\.\., 8\] of . tokens, and twice \[., k\]"
    for error, said, wrong in (
        (ShapeError, shapes, (x[..., :5], ids, w)),
        (ShapeError, shapes, (x[:1], ids, w)),
        (ShapeError, shapes, (x, ids[:5], w[:5])),
        (ShapeError, shapes, (x, ids, w[:5])),
        (ShapeError, shapes, (x, ids[:, :1], w)),
        (ShapeError, shapes, (x, ids[:, 0], w[:, 0])),
        (DtypeError, "top_k_index is torch.float32", (x, ids.float(), w)),
        (DtypeError, "top_k_index is torch.int8", (x, ids.to(torch.int8), w)),
    ):
        with pytest.raises(error, match=said):
            divided(*wrong)
    assert not dispatcher.seen
    with contextlib.suppress(RuntimeError):  # as this class of experts cannot
        divided(x, ids.int(), w)
    assert dispatcher.seen == [[(2, 3, 8), (6, 2), (6, 2)]]
