"""Adapters beside experts in 4 bits on a GPU: the results of a training
step, and its replay in CUDA graphs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusion_moe
from fusion_moe.nn import NVFP4Experts, add_lora_, prepare_

pytestmark = pytest.mark.gpu

EXPERTS, SLOTS, TOKENS, HIDDEN, INNER = 8, 2, 96, 256, 192


class Layer(nn.Module):
    """Experts with adapters that add something."""

    def __init__(self):
        super().__init__()
        gate_up, down = (
            torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5,
            torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5,
        )
        self.experts = NVFP4Experts.from_float(gate_up, down)
        add_lora_(self, rank=16, dtype=torch.bfloat16)
        for name, p in self.named_parameters():
            if name.endswith("_lora.B"):
                nn.init.normal_(p, std=0.25)

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return self.experts(x, ids, w)


def arguments(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids of which some experts have none, and router weights."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(TOKENS, EXPERTS - seed % 4, generator=g).topk(SLOTS).indices
    return (
        torch.randn(TOKENS, HIDDEN, generator=g).bfloat16().cuda(),
        ids.cuda(),
        torch.rand(TOKENS, SLOTS, generator=g).cuda(),
    )


def step(layer: nn.Module, x: Tensor, ids: Tensor, w: Tensor) -> list[Tensor]:
    """The result, and the gradients of tokens, router weights and adapters."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    adapters = [p for p in layer.parameters() if p.requires_grad]
    y = layer(x, ids, w)
    return [y.detach(), *torch.autograd.grad(y, [x, w, *adapters], torch.ones_like(y))]


def prepared() -> Layer:
    """On the GPU, in the order that its kernels read."""
    torch.manual_seed(0)
    layer = Layer().cuda()
    prepare_(layer)
    return layer


def test_a_step_is_that_of_the_cpu():
    torch.manual_seed(0)
    want = step(Layer(), *(t.cpu() for t in arguments(1)))
    found = step(prepared(), *arguments(1))
    for a, b in zip(found, want, strict=True):
        a, b = a.double().cpu(), b.double()
        assert (a - b).norm() <= 2e-2 * b.norm()
    fusion_moe.synchronize()


def test_graphs_replay_with_other_ids():
    layer = prepared()
    x, ids, w = arguments(0)
    step(layer, x, ids, w)  # the backward's kernels are compiled when it first runs
    graphed = torch.cuda.make_graphed_callables(
        copy.deepcopy(layer), (x.requires_grad_(), ids, w.requires_grad_())
    )
    for seed in range(4):
        assert all(map(torch.equal, step(graphed, *arguments(seed)), step(layer, *arguments(seed))))
    fusion_moe.synchronize()


@pytest.mark.parametrize("rank", [4, 24])
def test_several_adapters_in_a_graph(rank):
    """Which adapter a token has, and what adapters are, are read at each replay. With ranks of 4
    the added product is in the accumulators, with 24 it has a kernel of its own.
    """
    slots, layer = 3, prepared().experts
    of = torch.arange(slots).repeat_interleave(rank).cuda()
    sizes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    lora = {"lora_of": torch.full((TOKENS,), -1).cuda()}
    for name, (n, k) in sizes.items():
        shapes = {"a": (EXPERTS, len(of), k), "b": (EXPERTS, n, len(of))}
        lora |= {f"{name}_lora_{f}": torch.zeros(s).bfloat16().cuda() for f, s in shapes.items()}
        lora[f"{name}_lora_of"] = of
    for name in "gate_up_lora", "down_lora":
        delattr(layer, name)
    x, ids, w = arguments(0)
    layer(x, ids, w, lora)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x, ids, w, lora)
    factors = {name: t for name, t in lora.items() if t.is_floating_point()}
    for seed in range(1, 4):
        g = torch.Generator().manual_seed(seed)
        lora["lora_of"].copy_(torch.randint(-1, slots, (TOKENS,), generator=g))
        for t in factors.values():
            t.copy_(torch.randn(t.shape, generator=g) * t.shape[-1] ** -0.5)
        for into, new in zip((x, ids, w), arguments(seed), strict=True):
            into.copy_(new)
        graph.replay()
        for slot in range(-1, slots):
            own = {
                name: (t[:, of == slot] if name.endswith("a") else t[..., of == slot]).contiguous()
                for name, t in factors.items()
            }
            here, want = lora["lora_of"] == slot, layer(x, ids, w, own if slot >= 0 else None)
            want = want[here].double()
            assert (found[here].double() - want).norm() <= 2**-7 * want.norm()
    fusion_moe.synchronize()
