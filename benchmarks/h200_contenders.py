"""Who computes the cells of h200_moe.py: this library, and torch. Humming is in h200_humming.py,
other kernels for FP8 in h200_fp8_peers.py.

Each contender takes the same weights and returns, for a cell, calls to be captured in a CUDA graph.
Products start from rows sorted by expert, except in Humming's indexed mode, which gathers them. The
MLP starts from expert ids and ends with tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from h200_cells import Cell, Layer, Layers, Model, Routed, expert, routed_once
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, silu

import fusion_moe
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import FP8_E8M0, Encoding, Quantized, dequantize, quantize
from fusion_moe.layouts import W16X64, Padding

_AT_ONCE = 2**28  # elements of a weight that change their form at once
_MOST_BF16 = 24e9  # bytes of weights in bf16


class Call(NamedTuple):
    """run() -> bf16 [M, N] or, for the MLP, [T, H]. slots: whether its rows are in the order of
    slots, and not sorted by expert.
    """

    run: Callable[[], Tensor]
    layer: int
    to: Routed
    slots: bool = False

    def rows(self, found: Tensor) -> Tensor:
        """What it returned, rows sorted by expert."""
        return found[self.to.order] if self.slots else found


class Contender:
    """One way to compute. `exact`: whether its result is to be checked."""

    exact = True

    def __init__(self, model: Model, layers: Layers):
        self.model, self.layers = model, layers

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        """The call for one layer and one routing."""
        raise NotImplementedError

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Whatever takes long and need not be repeated for each cell."""


def in_panels(weight: Quantized, form: Callable[[Quantized], Quantized]) -> Quantized:
    """A weight in another form, which is made of a few experts at a time."""
    experts, n, k = weight.shape
    step = max(1, _AT_ONCE // (n * k))
    found = [form(weight.of(t[i : i + step] for t in weight)) for i in range(0, experts, step)]
    return found[0].of(torch.cat(t) for t in zip(*found, strict=True))


# This library -------------------------------------------------------------------------------------


def tiled(weight: Quantized) -> Quantized:
    """The weight in the layout w16x64."""
    return in_panels(weight, lambda q: q.of(W16X64.pack(*q, encoding=q.encoding)))


def widened(weight: Quantized, shape: tuple[int, int], runs: int) -> Quantized:
    """[E, N, K] with zeros, so that it is whole tiles, as `prepare_` does it."""
    return weight.of(Padding(weight.shape[1:], shape, runs).pack(*weight, encoding=weight.encoding))  # type: ignore[arg-type]


class Ours(Contender):
    """fusion_moe's operations, weights in the layout that its kernels read."""

    layout = W16X64.name

    @cached_property
    def weights(self) -> list[Layer]:
        inner, hidden = -(-self.model.intermediate // 64) * 64, self.model.hidden
        shapes = ((2 * inner, hidden), 2), ((hidden, inner), 1)
        return [
            Layer(*(tiled(widened(w, *to)) for w, to in zip(layer, shapes, strict=True)))
            for layer in self.layers
        ]

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Compiles all kernels at once."""
        with fusion_moe.preparing():
            for cell in cells:
                self.run(cell, 0, routed_once(cell, 0)).run()

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        ops, w = torch.ops.fusion_moe, self.weights[layer]
        if cell.part == "mlp":
            run = partial(
                ops.expert_mlp, to.x, to.ids, to.w, *w.gate_up, *w.down, weight_layout=self.layout
            )
        else:
            run = partial(
                ops.nvfp4_grouped_mm,
                to.rows(cell.part),
                *w.of(cell.part),
                to.ends,
                weight_layout=self.layout,
            )
        return Call(run, layer, to)


class Linear(Ours):
    """The same, weights as they are stored."""

    layout = "linear"

    @cached_property
    def weights(self) -> list[Layer]:
        return self.layers


class Fp8(Ours):
    """Weights rounded to e4m3 once, with a power of two for 128 x 128, and rows before each
    product.
    """

    layout, activation_format = "linear", "fp8"

    @cached_property
    def weights(self) -> list[Layer]:
        return self.layers.each(FP8_E8M0.name, partial(rounded, encoding=FP8_E8M0))

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        ops, w = torch.ops.fusion_moe, self.weights[layer]
        how = {
            "weight_format": FP8_E8M0.name,
            "weight_layout": self.layout,
            "activation_format": self.activation_format,
        }
        if cell.part == "mlp":
            run = partial(ops.fused_experts, to.x, to.ids, to.w, [*w.gate_up], [*w.down], **how)
        else:
            run = partial(ops.grouped_mm, to.rows(cell.part), [*w.of(cell.part)], to.ends, **how)
        return Call(run, layer, to)


class W8A16(Fp8):
    """The same weights, in tiles, and rows of 16 bits."""

    layout, activation_format = W16X64.name, "bf16"

    @cached_property
    def weights(self) -> list[Layer]:
        return [Layer(*map(tiled, layer)) for layer in super().weights]


class Both(Ours):
    """NVFP4 weights and rows of 16 bits for few rows an expert; FP8 for many."""

    @cached_property
    def fp8(self) -> Fp8:
        return Fp8(self.model, self.layers)

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        experts, few = self.model.experts, TARGETS["cuda"].requantized_from
        assert few is not None
        average = few(torch.device("cuda"), experts, self.model.hidden, self.model.intermediate)
        return (self.fp8 if cell.rows >= average * experts else super()).run(cell, layer, to)


def rounded(weight: Quantized, encoding: Encoding) -> Quantized:
    """An NVFP4 weight in another encoding."""
    return in_panels(weight, lambda q: quantize(dequantize(q), encoding))


# torch --------------------------------------------------------------------------------------------


class Torch(Contender):
    """torch's grouped product in bf16, and eager operations around it."""

    @cached_property
    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """bf16 [E, 2I, H], [E, H, I] of some layers: of all if they fit."""
        size = 2 * sum(n * k for n, k in self.model.products("mlp")) * self.model.experts
        return [
            (_bf16(layer.gate_up), _bf16(layer.down))
            for layer in self.layers[: max(1, int(_MOST_BF16 // size))]
        ]

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        layer %= len(self.weights)
        both = self.weights[layer]
        if cell.part == "mlp":
            return Call(partial(_mlp, to.x, to.ids, to.w, *both), layer, to)
        return Call(
            partial(grouped_mm, to.rows(cell.part), both[cell.part == "gemm2"].mT, offs=to.ends),
            layer,
            to,
        )


def _bf16(weight: Quantized) -> Tensor:
    made = torch.empty(weight.shape, dtype=torch.bfloat16, device="cuda")
    for e in range(len(made)):
        made[e] = expert(weight, e)
    return made


def _mlp(x: Tensor, ids: Tensor, w: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(
        sorted_ids,
        torch.arange(len(gate_up), dtype=ids.dtype, device=ids.device),
        right=True,
        out_int32=True,
    )
    gate, up = grouped_mm(x[order // ids.shape[1]], gate_up.mT, offs=ends).chunk(2, -1)
    y = grouped_mm(silu(gate) * up, down.mT, offs=ends)
    y = torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)
    return torch.bmm(w[:, None], y).squeeze(1)


class Dense(Contender):
    """torch's dense products in bf16 of the same M, N and K: no mixture of experts, what the card
    can do.
    """

    exact = False

    @cached_property
    def weights(self) -> dict[tuple[int, int], Tensor]:
        return {nk: torch.randn(nk, device="cuda").bfloat16() for nk in self.model.products("mlp")}

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        inputs = {self.model.hidden: to.sorted_x, self.model.intermediate: to.sorted_h}
        sizes = self.model.products(cell.part)
        return Call(
            lambda: [linear(inputs[k], self.weights[n, k]) for n, k in sizes][-1], layer, to
        )


class DenseFp8(Dense):
    """The same in FP8, with a scale for each row and column, and tensor cores' own accumulators."""

    @cached_property
    def weights(self) -> dict[tuple[int, int], Tensor]:
        return {nk: w.to(torch.float8_e4m3fn) for nk, w in super().weights.items()}

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        inputs = {x.shape[1]: x.to(torch.float8_e4m3fn) for x in (to.sorted_x, to.sorted_h)}
        ones = torch.ones(max(to.ids.numel(), *sum(self.weights, ())), device="cuda")

        def product(n: int, k: int) -> Tensor:
            scales = ones[: len(inputs[k]), None], ones[None, :n]
            return torch._scaled_mm(
                inputs[k],
                self.weights[n, k].mT,
                *scales,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        sizes = self.model.products(cell.part)
        return Call(lambda: [product(*size) for size in sizes][-1], layer, to)
