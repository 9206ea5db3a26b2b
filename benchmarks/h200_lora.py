"""LoRA beside frozen experts in 4 bits on one H100 or H200: a layer's forward and backward.

    python benchmarks/h200_lora.py [--out FILE.jsonl] [--cells 'qwen3:*'] [--repeats 10] [--minutes
        5] [--commit HASH]
    python benchmarks/h200_lora.py [--out FILE.jsonl] --table        what the file has
    python benchmarks/h200_lora.py --device cpu --tiny

Cells: a layer's experts from the router's ids to tokens, with adapters of rank 16 on both
projections, `qwen3:2048:uniform`: NVFP4 in the size of Qwen3-30B-A3B, MXFP4 in that of gpt-oss-120b
(SwiGLU without biases). Gradients are those of tokens, router weights and adapters. Contenders get
the same numbers in one process:

    fusion_moe        weights in 4 bits, in the order of `prepare_`
    fusion_moe bf16   the same operation with bf16 weights
    torch             torch's grouped product with bf16 weights, and adapters as two more products
    dequantized       that, with weights in 4 bits that each forward makes bf16 of (compiled by
                      Inductor), and autograd keeps

Results and gradients are compared with torch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from h200_cells import MODELS
from h200_training import Watch, compare, resumed, summary
from torch import Tensor
from torch.nn import functional as F
from training_cells import TINY, Layer
from training_peers import Contender, steps

from fusion_moe.encodings import ENCODINGS, Encoding, Quantized, dequantize, quantize
from fusion_moe.layouts import W16X64

ops = torch.ops.fusion_moe
RANK, SCALE = 16, 2.0
FORMATS = {"qwen3": "nvfp4", "gpt-oss": "mxfp4", "tiny": "nvfp4"}
TOKENS = (512, 2048, 8192)
NAMES = ("y", "dx", "drouter", "dA gate_up", "dB gate_up", "dA down", "dB down")


@dataclass(frozen=True)
class Adapted:
    """A layer whose weights are in 4 bits, and adapters: A bf16[E, r, K], B bf16[E, N, r] of both
    projections.
    """

    cell: Layer
    device: str

    @property
    def encoding(self) -> Encoding:
        """Of the weights."""
        return ENCODINGS[FORMATS[self.cell.name]]

    @cached_property
    def on(self) -> Any:
        """Tokens, ids, router weights and bf16 weights, which are what the weights in 4 bits stand
        for.
        """
        on = self.cell.inputs(self.device)
        for name in ("gate_up", "down"):
            object.__setattr__(on, name, dequantize(getattr(self, name), torch.bfloat16))
        return on

    @cached_property
    def gate_up(self) -> Quantized:
        """[E, 2I, H]"""
        return self._weight(0)

    @cached_property
    def down(self) -> Quantized:
        """[E, H, I]"""
        return self._weight(1)

    @cached_property
    def adapters(self) -> tuple[Tensor, ...]:
        """A and B of gate_up, then of down."""
        g = torch.Generator(self.device).manual_seed(1)
        made = []
        for n, k in self.cell.products:
            for shape, scale in (((RANK, k), k**-0.5), ((n, RANK), RANK**-0.5)):
                t = torch.randn(self.cell.model.experts, *shape, device=self.device, generator=g)
                made.append((t * scale).bfloat16().requires_grad_())
        return tuple(made)

    def contender(self, run: Callable[[], Tensor]) -> Contender:
        """Who computes it so."""
        return Contender(run, (self.on.x, self.on.w, *self.adapters), self.on.seed)

    def _weight(self, i: int) -> Quantized:
        n, k = self.cell.products[i]
        g = torch.Generator(self.device).manual_seed(2 + i)
        each = (
            torch.randn(n, k, device=self.device, generator=g) * k**-0.5
            for _ in range(self.cell.model.experts)
        )
        parts = zip(
            *(quantize(matrix[None], encoding=self.encoding) for matrix in each), strict=True
        )
        return Quantized(*(torch.cat(part) for part in parts), encoding=self.encoding)


def ours(layer: Adapted) -> Contender:
    """Weights in 4 bits."""
    layout = "w16x64" if layer.device == "cuda" else "linear"
    gate_up, down = (_stored(w, layout) for w in (layer.gate_up, layer.down))
    return _operation(layer, gate_up, down, layer.encoding.name, layout)


def ours_bf16(layer: Adapted) -> Contender:
    """The operation with plain weights."""
    return _operation(layer, [layer.on.gate_up], [layer.on.down], "bf16", "linear")


def _operation(
    layer: Adapted,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    weight_format: str,
    layout: str,
) -> Contender:
    on, (a1, b1, a2, b2) = layer.on, layer.adapters
    how: dict[str, Any] = {
        "weight_format": weight_format,
        "weight_layout": layout,
        "lora_scale": SCALE,
    }
    factors = {"gate_up_lora_a": a1, "gate_up_lora_b": b1, "down_lora_a": a2, "down_lora_b": b2}
    return layer.contender(
        lambda: ops.fused_experts(on.x, on.ids, on.w, gate_up, down, **factors, **how)
    )


def torchs(layer: Adapted) -> Contender:
    """torch's grouped product."""
    return layer.contender(lambda: _steps(layer, layer.on.gate_up, layer.on.down))


def dequantized(layer: Adapted) -> Contender:
    """bf16 made anew for each call."""
    made = torch.compile(dequantize, disable=layer.device == "cpu")

    def run() -> Tensor:
        with torch.no_grad():
            gate_up, down = (made(w, torch.bfloat16) for w in (layer.gate_up, layer.down))
        return _steps(layer, gate_up, down)

    return layer.contender(run)


def _steps(layer: Adapted, gate_up: Tensor, down: Tensor) -> Tensor:
    a1, b1, a2, b2 = layer.adapters

    def product(w: Tensor, a: Tensor, b: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        low = F.grouped_mm(x, a.mT, offs=ends) * SCALE
        return F.grouped_mm(x, w.mT, offs=ends) + F.grouped_mm(low, b.mT, offs=ends)

    return steps(layer.on, partial(product, gate_up, a1, b1), partial(product, down, a2, b2))


MAKES = {
    "torch": torchs,
    "fusion_moe": ours,
    "fusion_moe bf16": ours_bf16,
    "dequantized": dequantized,
}


def cells(tiny: bool) -> list[Layer]:
    """All of them."""
    if tiny:
        return [Layer("tiny", TINY, 48, "uniform")]
    return [
        Layer(name, MODELS[name], tokens, "uniform")
        for name in ("qwen3", "gpt-oss")
        for tokens in TOKENS
    ]


def measure(cell: Layer, repeats: int, device: str) -> dict[str, Any]:
    """The line of one cell."""
    layer = Adapted(cell, device)
    found = compare(
        {name: partial(make, layer) for name, make in MAKES.items()},
        MAKES,
        NAMES,
        repeats,
        Watch(device),
    )
    low = sum(n * RANK + RANK * k for n, k in cell.products)
    flops = 2 * cell.rows * (sum(n * k for n, k in cell.products) + low)
    return {
        "cell": cell.key,
        "rows": cell.rows,
        "flops": flops,
        "contenders": found,
    }


def _stored(weight: Quantized, layout: str) -> Sequence[Tensor]:
    """The parts in a layout, in memory of their own."""
    return [
        t.clone()
        for t in (W16X64.pack(*weight, encoding=weight.encoding) if layout == "w16x64" else weight)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/h200_lora.jsonl"),
        help="where a run is resumed; %(default)s",
    )
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small cell, to try the program")
    parser.add_argument(
        "--table", action="store_true", help="print what the file has, measure nothing"
    )
    parser.add_argument("--commit", default="")
    told = parser.parse_args()
    rows = resumed(told, cells(told.tiny), lambda cell: measure(cell, told.repeats, told.device))
    print(summary(rows))


if __name__ == "__main__":
    main()
