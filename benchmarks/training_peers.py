"""Who computes the cells of h200_training.py. Each contender takes the same tensors, and autograd
differentiates what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from training_cells import Inputs, LayerInputs, LinearInputs

import fusion_moe  # noqa: F401

ops = torch.ops.fusion_moe


@dataclass(frozen=True)
class Contender:
    """run() -> results, whose gradients are `seeds`; wanted: what gets a gradient. exact: whether
    there is something to compare.
    """

    run: Callable[[], Tensor | Sequence[Tensor]]
    wanted: Sequence[Tensor]
    seeds: Tensor | Sequence[Tensor]
    exact: bool = True

    def forward(self) -> None:
        """As in inference."""
        with torch.no_grad():
            self.run()

    def both(self) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.run(), self.wanted, self.seeds)

    def results(self) -> list[Tensor]:
        """The result and all gradients."""
        y = self.run()
        return [y.detach(), *torch.autograd.grad(y, self.wanted, self.seeds)]


def _on(inputs: Inputs, run: Callable[[], Tensor]) -> Contender:
    return Contender(run, inputs.wanted, inputs.seed)


def ours(on: Inputs, activation_format: str = "bf16") -> Contender:
    """This library's operations."""
    how = {"weight_format": "bf16", "activation_format": activation_format}
    if isinstance(on, LinearInputs):
        return _on(on, lambda: ops.grouped_mm(on.x, [on.weight], on.ends, **how))
    return _on(on, lambda: ops.fused_experts(on.x, on.ids, on.w, [on.gate_up], [on.down], **how))


def mxfp8(on: Inputs) -> Contender:
    """The same by the MXFP8 recipe, emulated: its numbers are others on purpose."""
    return replace(ours(on, "mxfp8"), exact=False)


def grouped_mm(on: Inputs) -> Contender:
    """torch's grouped product; for a layer as in transformers' experts: their function if it is
    installed, else the same steps.
    """
    if isinstance(on, LinearInputs):
        return _on(on, lambda: F.grouped_mm(on.x, on.weight.mT, offs=on.ends))
    if theirs := _transformers():
        module = _experts(on)
        return _on(on, lambda: theirs(module, on.x, on.ids, on.w))
    return _on(on, lambda: _steps(on))


@cache
def _transformers() -> Callable[..., Tensor] | None:
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError:
        return None
    return grouped_mm_experts_forward


def _experts(on: LayerInputs) -> Any:
    """What transformers' function reads of a module."""
    return SimpleNamespace(
        gate_up_proj=on.gate_up,
        down_proj=on.down,
        num_experts=len(on.down),
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        is_concatenated=True,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        act_fn=F.silu,
        _apply_gate=_swiglu,
    )


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _steps(on: LayerInputs) -> Tensor:
    """Sort, gather, product, SwiGLU, product, weights, back to the order of slots, sum over each
    token's.
    """
    slots = on.ids.shape[1]
    sorted_ids, order = on.ids.flatten().sort()
    counts = torch.histc(
        sorted_ids.int() if on.x.is_cuda else sorted_ids.float(),
        bins=len(on.down),
        min=0,
        max=len(on.down) - 1,
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    y = F.grouped_mm(on.x[order // slots], on.gate_up.mT, offs=ends)
    y = F.grouped_mm(_swiglu(y), on.down.mT, offs=ends)
    y = y * on.w.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(len(on.x), slots, -1).sum(1)


def liger(on: Inputs) -> Contender:
    """Liger-Kernel's fused_moe, in Triton."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    assert isinstance(on, LayerInputs)
    ids = on.ids.int()
    return _on(on, lambda: LigerFusedMoEFunction.apply(on.x, on.gate_up, on.down, ids, on.w))


def loop(on: Inputs) -> Contender:
    """A linear layer for each group, of sizes that the host knows."""
    assert isinstance(on, LinearInputs)
    counts = on.counts
    return _on(
        on,
        lambda: torch.cat(
            [F.linear(x, w) for x, w in zip(on.x.split(counts), on.weight, strict=True)]
        ),
    )


def dense(on: Inputs) -> Contender:
    """Dense products of the same M, N and K, forward and backward: no mixture of experts, what the
    card can do.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=on.x.device, dtype=torch.bfloat16)

    made = [
        (random(on.cell.rows, k).requires_grad_(), random(n, k).requires_grad_())
        for n, k in on.cell.products
    ]
    seeds = [random(on.cell.rows, n) for n, _ in on.cell.products]
    return Contender(
        lambda: [F.linear(x, w) for x, w in made],
        [t for both in made for t in both],
        seeds,
        exact=False,
    )


LAYER: Mapping[str, Callable[[Inputs], Contender]] = {
    "fusion_moe": ours,
    "mxfp8": mxfp8,
    "torch": grouped_mm,
    "liger": liger,
    "dense": dense,
}
LINEAR: Mapping[str, Callable[[Inputs], Contender]] = {
    "fusion_moe": ours,
    "mxfp8": mxfp8,
    "torch": grouped_mm,
    "loop": loop,
    "dense": dense,
}
