"""Slots of experts that are elsewhere, on a GPU: of their rows nothing is written that is not read,
and nothing read that is not written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_kernels import close, poison
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize

pytestmark = pytest.mark.gpu
OPS = torch.ops.fusion_moe
E, HERE, FIRST, K, H, I = 24, 6, 12, 4, 512, 256  # experts of all, and of these
LORA = {"gate_up": (2 * I, H), "down": (H, I)}
WAYS: dict[str, dict[str, Any]] = {
    "nvfp4": {"weight_format": "nvfp4"},
    "lora": {"weight_format": "nvfp4", "lora": 16},
    "bias": {"weight_format": "mxfp4", "bias": True},
    "floats": {"weight_format": "bf16"},
    "fp8": {"weight_format": "fp8_e8m0", "activation_format": "fp8"},
}
EACH = [
    pytest.param(way, marks=[pytest.mark.needs("mma.e4m3")] if "activation_format" in more else [])
    for way, more in WAYS.items()
]


def layer(
    weight_format: str, lora: int = 0, bias: bool = False, **more: Any
) -> tuple[list[list[Tensor]], dict[str, Any], list[Tensor]]:
    """The experts' weights, what else a call gets, and which tensors train."""
    g, encoding = torch.Generator("cuda").manual_seed(0), ENCODINGS[weight_format]

    def drawn(*shape: int, std: float) -> Tensor:
        return torch.randn(shape, device="cuda", generator=g).mul(std).bfloat16()

    weights, trained = [], list[Tensor]()
    for name, (n, k) in LORA.items():
        w = drawn(HERE, n, k, std=k**-0.5)
        weights.append([*quantize(w, encoding)] if encoding.scales else [w.requires_grad_()])
        trained += [] if encoding.scales else weights[-1]
        if lora:
            a, b = drawn(HERE, lora, k, std=k**-0.5), drawn(HERE, n, lora, std=lora**-0.5)
            more |= {f"{name}_lora_a": a.requires_grad_(), f"{name}_lora_b": b.requires_grad_()}
            trained += [a, b]
        if bias:
            more[f"{name}_bias"] = drawn(HERE, n, std=1)
    return weights, {"weight_format": weight_format, "first_expert": FIRST, **more}, trained


def tokens(count: int, seed: int, here: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and w; here: how many of the slots name one of these experts."""
    g = torch.Generator("cuda").manual_seed(seed)
    chance = torch.full((E,), (1 - here) / (E - HERE), device="cuda")
    chance[FIRST : FIRST + HERE] = here / HERE
    ids = torch.multinomial(chance.expand(count, E) + 1e-9, K, generator=g) if count else chance
    x = torch.randn(count, H, device="cuda", generator=g).bfloat16()
    return x, ids.long().view(count, K), torch.rand(count, K, device="cuda", generator=g)


@pytest.mark.parametrize("order", ["free", "row"])
@pytest.mark.parametrize("way", EACH)
def test_memory_of_nan(way, order):
    """Few rows, whose kernels sort ids themselves, and many; forward, then with gradients."""
    weights, more, trained = layer(**WAYS[way])
    trains = "activation_format" not in more

    def step(x: Tensor, ids: Tensor, w: Tensor, with_gradients: bool) -> list[Tensor]:
        at = [t.detach().requires_grad_() for t in (x, w)]
        poison()
        with torch.set_grad_enabled(with_gradients):
            y = OPS.fused_experts(at[0], ids, at[1], *weights, **more)
        poison()
        seed = x.flip(-1)
        return [y, *(torch.autograd.grad(y, [*at, *trained], seed) if with_gradients else ())]

    for count, here in ((1, 0.25), (5, 0.25), (60, 0.25), (900, 0.25), (900, 0), (900, 1)):
        given = tokens(count, count, here)
        for with_gradients in (False, True)[: 1 + trains]:
            with options.override(target="reference"):
                want = step(*given, with_gradients)
            with options.override(target="cuda", order=order):
                found = step(*given, with_gradients)
                again = step(*given, with_gradients)
            fusion_moe.synchronize()
            for a, b, c in zip(found, want, again, strict=True):
                close(a, b, 2e-2)
                assert a.equal(c)
            elsewhere = (given[1] < FIRST) | (given[1] >= FIRST + HERE)
            assert not found[0][elsewhere.all(1)].any()
            if with_gradients:
                assert not found[2][elsewhere].any()


@pytest.mark.parametrize("way", EACH)
def test_graphs_of_other_ids(way):
    """Of which more or fewer are here: what one replay writes, the next one does not read."""
    weights, more, _ = layer(**WAYS[way])
    for count in (5, 300):
        x, ids, w = tokens(count, 0, 1)
        with torch.no_grad(), options.override(target="cuda"):
            with fusion_moe.preparing():
                OPS.fused_experts(x, ids, w, *weights, **more)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = OPS.fused_experts(x, ids, w, *weights, **more)
            for seed, here in enumerate((1, 0.25, 0, 0.5)):
                for into, new in zip((x, ids, w), tokens(count, seed, here), strict=True):
                    into.copy_(new)
                poison()
                graph.replay()
                assert y.equal(OPS.fused_experts(x, ids, w, *weights, **more))
    fusion_moe.synchronize()
