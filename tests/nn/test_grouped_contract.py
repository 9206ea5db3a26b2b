"""Grouped linear layers of users' files, found by what they compute: how they hold weights, what
their offsets are; and modules that look alike and are left alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from experts import copied, same_state
from torch import Tensor, nn

import fusion_moe
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import NVFP4GroupedLinear
from fusion_moe.nn.conversion.grouped import grouped_contract_of

SIZES = (3, 0, 4, 3)
ENDS = torch.tensor(SIZES).cumsum(0).int()
STARTS = ENDS - torch.tensor(SIZES).int()


class Grouped(nn.Module):
    """weight [G, K, N] if transposed, else [G, N, K]; a bias [G, N] if there is one."""

    def __init__(self, n: int, k: int, transposed: bool, starts: bool, bias: bool):
        super().__init__()
        drawn = torch.Generator().manual_seed(n + k)
        weight = torch.randn(len(SIZES), n, k, generator=drawn) / k**0.5
        self.experts = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        if bias:
            self.bias = nn.Parameter(torch.randn(len(SIZES), n, generator=drawn))
        self.transposed, self.starts = transposed, starts

    def forward(self, hidden_states: Tensor, offsets: Tensor) -> Tensor:
        ends = [*offsets.tolist()[1:], len(hidden_states)] if self.starts else offsets.tolist()
        rows = zip([0, *ends[:-1]], ends, strict=True)
        weights = self.experts if self.transposed else self.experts.mT
        parts = [hidden_states[a:b] @ w for (a, b), w in zip(rows, weights, strict=True)]
        if hasattr(self, "bias"):
            parts = [part + bias for part, bias in zip(parts, self.bias, strict=True)]
        return torch.cat(parts)


class SwiGLU(nn.Module):
    """Three grouped layers, as in a file of one's own."""

    def __init__(self, starts: bool):
        super().__init__()
        self.gate, self.up = (Grouped(32, 64, True, starts, False) for _ in "ab")
        self.down = Grouped(64, 32, True, starts, False)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x, offsets)) * self.up(x, offsets), offsets)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_new_weights_in_names_and_order_of_the_layer(transposed, bias):
    floats = nn.ModuleDict({"layer": Grouped(64, 64, transposed, True, bias)})
    model = copy.deepcopy(floats)
    fusion_moe.quantize_(model)
    before = copied(model)
    for tensors in (floats, *({name: t} for name, t in floats.state_dict().items())):
        fusion_moe.update_weights_(model, tensors)
        assert same_state(model.state_dict(), before)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (48, 64)])
def test_a_layer_computes_what_it_did(shape, transposed, starts, bias):
    """Square weights too, whose shape says nothing."""
    model = nn.ModuleDict({"layer": Grouped(*shape, transposed, starts, bias)}).requires_grad_(
        False
    )
    x, offsets = torch.randn(sum(SIZES), 64), STARTS if starts else ENDS
    want = model["layer"](x, offsets)
    fusion_moe.quantize_(model)
    layer = model["layer"]
    assert isinstance(layer, NVFP4GroupedLinear)
    assert layer.starts == starts
    weight = fusion_moe.nn.convert(Grouped(*shape, transposed, starts, bias)).weight
    assert layer.weight.equal(weight)
    assert (layer(x, offsets) - want).norm() < 0.12 * want.norm()


@pytest.mark.parametrize("starts", [False, True])
def test_layers_of_ones_own_module(starts):
    """All three are replaced; compiled, they are a program together."""
    model, offsets = nn.Sequential(SwiGLU(starts)).requires_grad_(False), STARTS if starts else ENDS
    x = torch.randn(sum(SIZES), 64)
    want = model[0](x, offsets)
    fusion_moe.quantize_(model)
    assert sum(isinstance(m, NVFP4GroupedLinear) for m in model.modules()) == 3
    with torch.inference_mode():
        got = model[0](x, offsets)
        compiled = torch.compile(model[0], backend="fusion_moe")(x, offsets)
    assert (got - want).norm() < 0.2 * want.norm()
    torch.testing.assert_close(compiled, got, rtol=1e-3, atol=1e-3)


class Sizes(Grouped):
    """Takes rows of groups, not offsets."""

    def forward(self, hidden_states: Tensor, offsets: Tensor) -> Tensor:
        return super().forward(hidden_states, offsets.cumsum(0).int())


class Doubled(Grouped):
    def forward(self, hidden_states: Tensor, offsets: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states, offsets)


class Scaled(Grouped):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(()))


class Three(Grouped):
    def forward(self, hidden_states: Tensor, offsets: Tensor, more: Tensor) -> Tensor:
        return super().forward(hidden_states, offsets) + more


def zeros(*args) -> nn.Module:
    layer = Grouped(*args)
    nn.init.zeros_(layer.experts)
    return layer


ALIKE = {
    "sizes of groups": Sizes,
    "another product": Doubled,
    "more than a weight": Scaled,
    "three arguments": Three,
    "all zero: nothing tells": zeros,
    "no values": lambda *args: Grouped(*args).to("meta"),
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_looks_alike_is_refused_in_full(what):
    layer = ALIKE[what](64, 64, True, False, False)
    assert grouped_contract_of(layer) is None
    with pytest.raises(UnsupportedError) as refused:
        fusion_moe.quantize_(nn.ModuleDict({"layer": layer}))
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    assert f"layer ({name})" in str(refused.value)
    assert f"@fusion_moe.register_converter({type(layer).__name__})" in str(refused.value)
