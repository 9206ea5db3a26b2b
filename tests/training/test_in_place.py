"""Results that are written in place, as residual connections do: hooks on them stay, FSDP2's among
them.
"""

from __future__ import annotations

import pytest
import torch
from layers import COUNTS, ROWS, G, K, N, layer, uniform

from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.layouts import Padding
from fusion_moe.nn import (
    GroupedLinear,
    GroupedSwiGLU,
    NVFP4Experts,
    NVFP4GroupedLinear,
    QuantizedLinear,
    ScaledSwiGLU,
    Sequential,
)

ENDS = COUNTS.cumsum(0).int()
IDS = torch.randint(0, G, (ROWS, 2), generator=torch.Generator().manual_seed(0))


def encoded(*shape):
    return quantize(uniform(*shape), NVFP4)


def grouped(bias=None, n=64):
    return NVFP4GroupedLinear.from_float(uniform(G, n, 32), bias)


CALLS = {
    "GroupedLinear": lambda x: layer(G, 32, N)(x, COUNTS),
    "GroupedLinear into a buffer": lambda x: layer(G, 32, N)(
        x, COUNTS, out=torch.empty(*x.shape[:-1], N)
    ),
    "GroupedLinear, delayed": lambda x: layer(G, 32, N, delay_wgrad_compute=True)(x, COUNTS),
    "Sequential": lambda x: Sequential(GroupedLinear(G, 32, 64), ScaledSwiGLU())(
        x, COUNTS, torch.ones(ROWS)
    ),
    "ScaledSwiGLU": lambda x: ScaledSwiGLU()(x, torch.ones(ROWS)),
    "NVFP4GroupedLinear": lambda x: grouped()(x, ENDS),
    "NVFP4GroupedLinear with a bias": lambda x: grouped(uniform(G, 64))(x, ENDS),
    "GroupedSwiGLU": lambda x: GroupedSwiGLU(grouped(), grouped())(x, ENDS),
    "QuantizedLinear": lambda x: QuantizedLinear(encoded(48, 32))(x),
    "NVFP4Experts": lambda x: NVFP4Experts.from_float(uniform(G, 64, 32), uniform(G, 32, 32))(
        x, IDS, torch.ones(ROWS, 2)
    ),
}


@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS)], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_hooks_of_a_result_that_is_written_in_place(call, shape):
    called = []
    y = call(uniform(*shape, 32).requires_grad_())
    assert not y._is_view()
    y.register_hook(called.append)
    y += 1
    y.sum().backward()
    assert [t.shape for t in called] == [y.shape]


def test_one_row_of_padded_experts():
    """Whose result is cut."""
    y = Padding((40, 32), (64, 32)).cut_rows(uniform(1, 64).requires_grad_().mul(2))
    assert y.shape == (1, 40)
    assert not y._is_view()


@pytest.mark.compiler
def test_compiled():
    called = []
    y = torch.compile(layer(G, K, N), backend="fusion_moe", fullgraph=True)(
        uniform(1, ROWS, K).requires_grad_(), COUNTS
    )
    y.register_hook(called.append)
    y += 1
    y.sum().backward()
    assert len(called) == 1
