"""What h200_training.py measures: layers and single products, their weights and inputs, and how far
results may be apart.

M rows (tokens x experts a token), H hidden, I intermediate features, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from h200_cells import MODELS, ZIPF, Model
from torch import Tensor

ROUTINGS = ("uniform", "zipf")
TOKENS = (4096, 8192, 32768)
SIZES = {name: MODELS[name] for name in ("qwen3", "gpt-oss", "mixtral", "deepseek")}
TINY = Model("tiny", 8, 2, 64, 32)
FAR = 2e-2  # what two results in bf16 may differ, relative Frobenius norm
_CHECKED_EXPERTS = 8


@dataclass(frozen=True)
class Layer:
    """The experts of a layer, from the router's ids to tokens: SwiGLU without biases, in the sizes
    of a model.
    """

    name: str
    model: Model
    tokens: int
    routing: str

    @property
    def key(self) -> str:
        """As --cells names it."""
        return f"{self.name}:{self.tokens}:{self.routing}"

    @property
    def rows(self) -> int:
        """Rows of the products."""
        return self.tokens * self.model.slots

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each product of the forward pass."""
        return self.model.products("mlp")

    def inputs(self, device: str) -> LayerInputs:
        """Random ones."""
        g = torch.Generator(device).manual_seed(0)
        e, h, i = self.model.experts, self.model.hidden, self.model.intermediate
        ids, w = _routed(self.model, self.tokens, self.routing, g)
        x, seed = (torch.randn(self.tokens, h, device=device, generator=g).bfloat16() for _ in "xy")
        gate_up, down = _weight((e, 2 * i, h), g), _weight((e, h, i), g)
        return LayerInputs(self, x.requires_grad_(), ids, w.requires_grad_(), gate_up, down, seed)


@dataclass(frozen=True)
class LayerInputs:
    """x bf16[T, H], ids i64[T, k], w bf16[T, k], gate_up bf16[E, 2I, H], down bf16[E, H, I], seed
    bf16[T, H]: the result's gradient.
    """

    cell: Layer
    x: Tensor
    ids: Tensor
    w: Tensor
    gate_up: Tensor
    down: Tensor
    seed: Tensor

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return self.x, self.w, self.gate_up, self.down

    names = ("y", "dx", "drouter", "dgate_up", "ddown")


def cells(tiny: bool) -> list[Layer]:
    """All of them."""
    sizes, tokens = ({"tiny": TINY}, (48,)) if tiny else (SIZES, TOKENS)
    return [
        Layer(name, model, t, r) for name, model in sizes.items() for t in tokens for r in ROUTINGS
    ]


def flops(cell: Layer) -> int:
    """Of the forward pass, two for each multiply-add; the backward has twice as many."""
    return sum(2 * cell.rows * n * k for n, k in cell.products)


def _weight(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Normal, so that products of normal numbers are about 1 in size. Expert by expert: a float32
    copy of all may not fit.
    """
    made = torch.empty(shape, dtype=torch.bfloat16, device=g.device)
    for one in made:
        one.copy_(torch.randn(shape[1:], device=g.device, generator=g) / shape[-1] ** 0.5)
    return made.requires_grad_()


def _routed(model: Model, tokens: int, routing: str, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """k different experts for each token, all as likely; or expert i in proportion to 1 / i^ZIPF.
    -> ids i64[T, k], w bf16[T, k]
    """
    # exponential
    score = -torch.rand(tokens, model.experts, device=g.device, generator=g).clamp_min(1e-20).log_()
    if routing == "zipf":
        score *= (torch.randperm(model.experts, device=g.device, generator=g) + 1.0) ** ZIPF
    ids = score.topk(model.slots, largest=False).indices
    w = torch.rand(ids.shape, device=g.device, generator=g) + 0.1
    return ids, (w / w.sum(1, keepdim=True)).bfloat16()


# What is right ------------------------------------------------------------------------------------


def digest(results: Sequence[Tensor]) -> list[Tensor]:
    """What is kept of results to be compared: all of a matrix; of gradients of weights [E, N, K]
    some experts, and the norm of each.
    """
    kept = []
    for t in results:
        some = (
            torch.linspace(0, len(t) - 1, min(_CHECKED_EXPERTS, len(t))).long().unique().tolist()
            if t.dim() == 3
            else None
        )
        kept.append(
            t
            if some is None
            else torch.cat([t[some].float().flatten(), torch.stack([e.float().norm() for e in t])])
        )
    return kept


def apart(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    """The relative Frobenius norm of each difference."""
    return [
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, want, strict=True)
    ]
