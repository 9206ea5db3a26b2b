"""Weights that eager calls keep in the layout of the target's kernels: as long as nobody writes to
them, and as long as they live.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from forgetting import kept_bytes
from torch import Tensor, nn

import fusion_moe
from fusion_moe import options
from fusion_moe.bodies import stored
from fusion_moe.layouts import SF128X4
from fusion_moe.layouts.layout import as_bytes
from fusion_moe.ops import nvfp4_grouped_mm, nvfp4_quantize

G, N, K = 3, 48, 64
X = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16()
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


class Layer(nn.Module):
    """Scales in sf128x4, which no kernel of a CPU reads fastest."""

    def __init__(self, seed: int = 0):
        super().__init__()
        w = torch.randn(G, N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()
        codes, scale, factor = nvfp4_quantize(w)
        for name, t in (("codes", codes), ("scale", SF128X4.forward(scale)), ("factor", factor)):
            self.register_buffer(name, t)

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self.codes, self.scale, self.factor
        return nvfp4_grouped_mm(x, *parts, ENDS, weight_layout="sf128x4")

    def alone(self, x: Tensor) -> Tensor:
        with options.override(keep_weights=False):
            return self(x)


@pytest.fixture(autouse=True)
def kept():
    gc.collect()
    assert kept_bytes() == 0
    with options.override(keep_weights=True), torch.no_grad():
        yield
    gc.collect()
    assert kept_bytes() == 0  # freed with the layers


def size() -> int:
    """Of the scales: codes lie as in the linear layout."""
    return G * N * K // 16


def test_made_at_the_second_call_and_freed_with_the_weight():
    layer = Layer()
    want = layer.alone(X)
    for there in (0, size(), size()):
        assert layer(X).equal(want)
        assert kept_bytes() == there
    with torch.inference_mode():
        assert layer(X).equal(want)
    other = Layer(1)
    for _ in range(2):
        assert other(X).equal(other.alone(X))
    assert kept_bytes() == 2 * size()
    del layer
    gc.collect()
    assert kept_bytes() == size()


def flipped(t: Tensor) -> None:
    """In reverse order of groups."""
    t = as_bytes(t)
    t.copy_(t.flip(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["codes", "scale", "factor"])
@pytest.mark.parametrize(
    "write",
    [
        flipped,
        lambda t: flipped(t[:2]),
        lambda t: as_bytes(t.detach()).fill_(2),
        lambda t: as_bytes(t)[2].zero_(),
    ],
)
def test_a_write_is_seen(name, write):
    layer = Layer()
    before = [layer(X) for _ in range(3)][-1]
    write(getattr(layer, name))
    for _ in range(3):
        after = layer(X)
        assert after.equal(layer.alone(X))
    assert not after.equal(before)


def test_other_tensors_in_a_module_are_others():
    layer = Layer()
    for seed in range(3):
        layer.load_state_dict(Layer(seed).state_dict())
        layer.codes = layer.codes.clone()
        for _ in range(2):
            assert layer(X).equal(layer.alone(X))
    gc.collect()
    assert kept_bytes() <= size()


def test_others_at_the_same_address_are_others():
    layer, factors = Layer(), torch.arange(1.0, 2 * G + 1)
    scale = layer.scale
    for layer.factor in (factors[:G], factors[::2], factors[:1].expand(G)):
        for _ in range(3):
            assert layer(X).equal(layer.alone(X))
    layer.scale = scale[:1].expand_as(scale)
    for _ in range(3):
        assert layer(X).equal(layer.alone(X))


def test_each_storage_of_the_same_memory_counts_its_own_writes():
    layer = Layer()
    memory = as_bytes(layer.scale).numpy()
    one, other = (torch.from_numpy(memory).view(layer.scale.dtype) for _ in range(2))
    layer.scale = one
    layer(X), layer(X)
    flipped(one)
    layer.scale = other
    for _ in range(3):
        assert layer(X).equal(layer.alone(X))


def test_weights_that_change_are_not_made_again():
    layer = Layer()
    for _ in range(stored.FEW):
        layer(X), layer(X)
        assert kept_bytes() == size()
        flipped(layer.codes)
    for _ in range(3):
        assert layer(X).equal(layer.alone(X))
    assert kept_bytes() == 0


def test_explain_says_how_much():
    (fusion,) = fusion_moe.explain(Layer(), X).fusions
    layouts = [layout for s in fusion.segments for layout in s.layouts]
    assert layouts == [("sf128x4", "eager calls keep a copy in linear, of 576 B")]
