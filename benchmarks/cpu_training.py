"""Forward and backward of an expert layer on the CPU, beside the experts of transformers: a loop
over experts, and "grouped_mm".

    python benchmarks/cpu_training.py --tokens 512 2048 --dtypes bf16 f32 --threads 2

The layer has the sizes of Qwen3-30B-A3B scaled down: 16 experts, 8 for each token, H 1024, I 384.
All run in one process, in turns, with gradients of the activations, the router's weights and both
weights. Milliseconds: the median, and the lower and the upper quartile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import fusion_moe

EXPERTS, SLOTS, HIDDEN, INNER = 16, 8, 1024, 384
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
OURS, PEERS = "fusion_moe", ("eager", "grouped_mm")

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [T, H], ids i64 [T, k], w [T, k] -> [T, H]


def peer(implementation: str, gate_up: Tensor, down: Tensor) -> Layer:
    """The experts of transformers with these weights."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=SLOTS,
        experts_implementation=implementation,
    )
    experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    return experts


class Ours(torch.nn.Module):
    """The same, by one operation."""

    def __init__(self, gate_up: Tensor, down: Tensor, dtype: str):
        super().__init__()
        self.gate_up, self.down, self.dtype = (
            torch.nn.Parameter(gate_up),
            torch.nn.Parameter(down),
            dtype,
        )

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        made: Tensor = torch.ops.fusion_moe.fused_experts(
            x, ids, w, [self.gate_up], [self.down], weight_format=self.dtype
        )
        return made


def step(layer: Layer, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """Forward and backward: the gradients of x, of w and of the weights."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return list(torch.autograd.grad(layer(x, ids, w), [x, w, *layer.parameters()], dy))  # type: ignore[attr-defined]


def measure(dtype: str, tokens: int, rounds: int) -> dict[str, list[float]]:
    """The milliseconds of each, round by round; all compute the same, which is checked."""
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(tokens, HIDDEN, generator=g).to(DTYPES[dtype]) for _ in range(2))
    w, ids = torch.rand(tokens, EXPERTS, generator=g).softmax(-1).topk(SLOTS)
    w = (w / w.sum(-1, keepdim=True)).to(DTYPES[dtype])
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    weights = [(torch.randn(shape, generator=g) / 32).to(DTYPES[dtype]) for shape in shapes]
    layers: dict[str, Layer] = {
        OURS: Ours(*weights, dtype),
        **{name: peer(name, *weights) for name in PEERS},
    }
    steps = {name: partial(step, layer, x, ids, w, dy) for name, layer in layers.items()}
    check({name: one() for name, one in steps.items()}, 0.02 if dtype == "bf16" else 1e-5)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, one in steps.items():
            start = time.perf_counter()
            one()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def check(found: dict[str, list[Tensor]], tolerance: float) -> None:
    """AssertionError unless gradients agree, by the mean square of their difference."""
    for name in PEERS:
        for a, b in zip(found[OURS], found[name], strict=True):
            error = (
                a.float() - b.float()
            ).square().mean().sqrt() / b.float().square().mean().sqrt()
            assert error < tolerance, f"{name}: {tuple(a.shape)} differ by {float(error):.2g}"


def line(name: str, times: Sequence[float]) -> str:
    """One row of the table."""
    low, median, high = statistics.quantiles(times, n=4)
    return f"  {name:12} {median:8.1f} ms  ({low:.1f} .. {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, {args.threads} threads")
    for dtype in args.dtypes:
        for tokens in args.tokens:
            times = measure(dtype, tokens, args.rounds)
            best = min(statistics.median(times[name]) for name in PEERS)
            print(
                f"{dtype}, {tokens} tokens: {best / statistics.median(times[OURS]):.2f} times "
                "as fast as the faster of the others"
            )
            print("\n".join(line(name, of) for name, of in times.items()), flush=True)


if __name__ == "__main__":
    main()
