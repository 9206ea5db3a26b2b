"""Who computes the cells of h200_training.py. Each contender takes the same tensors, and autograd
differentiates what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from training_cells import LayerInputs

import fusion_moe
from fusion_moe.nn import GroupedLinear, Sequential, SwiGLU

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


def _on(inputs: LayerInputs, run: Callable[[], Tensor]) -> Contender:
    return Contender(run, inputs.wanted, inputs.seed)


def ours(on: LayerInputs, activation_format: str = "bf16") -> Contender:
    """This library's operation."""
    how = {"weight_format": "bf16", "activation_format": activation_format}
    return _on(on, lambda: ops.fused_experts(on.x, on.ids, on.w, [on.gate_up], [on.down], **how))


def rounded(on: LayerInputs, activation_format: str) -> Contender:
    """The same by a recipe, whose numbers are others on purpose."""
    return replace(ours(on, activation_format), exact=False)


def of_rows(
    on: LayerInputs, recipe: fusion_moe.recipe.Recipe | None = None, held: bool | None = None
) -> Contender:
    """Layers on rows that are sorted already, of as many experts and rows. held: whether they read
    weights that were quantized before, as a microbatch does that is not the first one.
    """
    experts, hidden, inner = on.down.shape
    like = {"bias": False, "device": on.x.device, "dtype": on.x.dtype}
    mlp = Sequential(
        GroupedLinear(experts, hidden, 2 * inner, **like),
        SwiGLU(),
        GroupedLinear(experts, inner, hidden, **like),
    )
    x, seed = (torch.randn_like(on.x).repeat(on.ids.shape[1], 1) for _ in "xy")
    sizes = torch.bincount(on.ids.flatten(), minlength=experts)

    def run(first: bool | None) -> Tensor:
        with fusion_moe.autocast(recipe):
            made: Tensor = mlp(x, sizes, sizes, is_first_microbatch=first)
            return made

    if held:
        run(True)
    first = False if held else None
    return Contender(lambda: run(first), [x.requires_grad_(), *mlp.parameters()], seed, exact=False)


def grouped_mm(on: LayerInputs) -> Contender:
    """transformers' experts on torch's grouped product, if they are installed, else the same
    steps.
    """
    if theirs := _transformers():
        module = _experts(on)
        return _on(on, lambda: theirs(module, on.x, on.ids, on.w))
    return _on(on, lambda: steps(on))


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


def steps(
    on: LayerInputs,
    gate_up: Callable[[Tensor, Tensor], Tensor] | None = None,
    down: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Sort, gather, product, SwiGLU, product, weights, back to the order of slots, sum over each
    token's. Products: of rows and their ends.
    """
    slots, experts = on.ids.shape[1], len(on.down)
    sorted_ids, order = on.ids.flatten().sort()
    ids = sorted_ids.int() if on.x.is_cuda else sorted_ids.float()
    ends = torch.histc(ids, bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    first = gate_up or (lambda x, ends: F.grouped_mm(x, on.gate_up.mT, offs=ends))
    second = down or (lambda x, ends: F.grouped_mm(x, on.down.mT, offs=ends))
    y = second(_swiglu(first(on.x[order // slots], ends)), ends)
    y = y * on.w.flatten()[order].unsqueeze(-1)
    return y[order.argsort()].view(len(on.x), slots, -1).sum(1)


@cache
def _compile_before_tuning() -> None:
    """Has Triton compile all configurations of a kernel in threads before it tries the first, which
    takes seconds instead of minutes.
    """
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs

    def compiled(tuner: Any, kwargs: dict[str, Any]) -> Any:
        configurations = pruned(tuner, kwargs)
        given = {name: v for name, v in (tuner.nargs | kwargs).items() if name != "warmup"}
        with ThreadPoolExecutor() as pool, AsyncCompileMode(pool, ignore_errors=True):
            for one in configurations:
                tuner.fn.warmup(**given, **one.all_kwargs())
        return configurations

    Autotuner.prune_configs = compiled


def liger(on: LayerInputs) -> Contender:
    """Liger-Kernel's fused_moe, in Triton."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    _compile_before_tuning()
    ids = on.ids.int()
    return _on(on, lambda: LigerFusedMoEFunction.apply(on.x, on.gate_up, on.down, ids, on.w))


def dense(on: LayerInputs) -> Contender:
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


# contender -> the activation_format of its recipe
RECIPES = {"mxfp8": "mxfp8", "fp8": "fp8_block", "fp8_wgrad_bf16": "fp8_block_wgrad_bf16"}
_FP8 = fusion_moe.recipe.Float8BlockScaling()
LAYER: Mapping[str, Callable[[LayerInputs], Contender]] = {
    "fusion_moe": ours,
    **{name: partial(rounded, activation_format=form) for name, form in RECIPES.items()},
    "rows": of_rows,
    "rows_fp8": partial(of_rows, recipe=_FP8),
    "rows_fp8_held": partial(of_rows, recipe=_FP8, held=True),
    "torch": grouped_mm,
    "liger": liger,
    "dense": dense,
}
