"""A whole MoE block of Qwen3-30B-A3B on a GPU: norm, router, experts in NVFP4, residual.

python benchmarks/moe_block.py         # medians of CUDA graphs with 20 calls each, in us a call

The experts are this library's in all columns; what is compared is what stands before them:

eager       torch's operations, one kernel each
inductor    the same under torch.compile
fused       under torch.compile(backend="fusion_moe"), with torch's router
router      the same with `topk_router`, which is in the program of the experts
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from router import median_us
from torch import Tensor
from torch.nn.functional import linear, rms_norm

import fusion_moe
from fusion_moe.nn import NVFP4Experts
from fusion_moe.ops import topk_router

HIDDEN, INTERMEDIATE, EXPERTS, K = 2048, 768, 128, 8


def torchs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k], ids [T, k], as in Qwen3-MoE of transformers."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(K, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def ours(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same in one operation."""
    return topk_router(logits, K, renormalize=True, out_dtype=logits.dtype)


class Block(torch.nn.Module):
    """x bf16[T, H] -> [T, H]."""

    def __init__(
        self, experts: NVFP4Experts, gate: Tensor, route: Callable[[Tensor], tuple[Tensor, Tensor]]
    ):
        super().__init__()
        self.experts, self.gate, self.route = experts, gate, route
        self.norm = torch.ones_like(gate[0])

    def forward(self, x: Tensor) -> Tensor:
        """What a decoder layer does after attention."""
        rows = rms_norm(x, (x.shape[1],), self.norm, 1e-6)
        weights, ids = self.route(linear(rows, self.gate))
        return x + self.experts(rows, ids, weights)


def blocks(experts: NVFP4Experts, gate: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The block, each way."""
    plain, fused = Block(experts, gate, torchs), Block(experts, gate, ours)
    return {
        "eager": plain,
        "inductor": torch.compile(plain, dynamic=False),
        "fused": torch.compile(plain, dynamic=False, backend="fusion_moe"),
        "router": torch.compile(fused, dynamic=False, backend="fusion_moe"),
    }


def random_layer(
    hidden: int, intermediate: int, experts: int, device: str
) -> tuple[NVFP4Experts, Tensor]:
    """Experts and the weight of a router."""
    g = torch.Generator(device).manual_seed(0)
    gate_up, down, gate = (
        torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5
        for shape in (
            (experts, 2 * intermediate, hidden),
            (experts, hidden, intermediate),
            (experts, hidden),
        )
    )
    return NVFP4Experts.from_float(gate_up, down).to(device), gate


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args(arguments)
    experts, gate = random_layer(HIDDEN, INTERMEDIATE, EXPERTS, "cuda")
    fusion_moe.prepare_(experts)
    ways = blocks(experts, gate)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us a call")
    print("  ".join(["tokens", *(f"{name:>9}" for name in ways)]))
    for tokens in options.tokens:
        torch._dynamo.reset()  # all ways compile the same forward: Dynamo keeps few graphs of one
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        want, times = ways["eager"](x), []
        for call in ways.values():
            assert (call(x) - want).abs().max() <= 0.05 * want.abs().max()
            times.append(median_us(lambda call=call, x=x: call(x)))
        print("  ".join([f"{tokens:6}", *(f"{t:9.2f}" for t in times)]), flush=True)


if __name__ == "__main__":
    main()
