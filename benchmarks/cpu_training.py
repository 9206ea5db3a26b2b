"""Forward and backward of an expert layer on the CPU: all weights beside transformers' experts,
or adapters over frozen MXFP4 weights beside KTransformers' fine-tuning kernels.

    python benchmarks/cpu_training.py [--tokens 512 2048] [--dtypes bf16 f32] [--threads 2]
    python benchmarks/cpu_training.py --lora [--tokens 64 512 2048]  # cpu_peers.py: kt-kernel

Weights: the sizes of Qwen3-30B-A3B scaled down, 16 experts, 8 for each token, H 1024, I 384.
Adapters: its own sizes, rank 16; kt-kernel has an A for gate and one for up, which are the one that
ours shares. All get the same numbers and take turns in one process; gradients are compared first.
Milliseconds, of CPU time for one thread, of wall time for more: the median, and the lower and the
upper quartile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from cpu_moe import MODELS, PAUSE, Clock, Model, clock, random_weights
from cpu_peers import KtKernel
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import fusion_moe
from fusion_moe.encodings import MXFP4

SMALL, QWEN3 = Model("scaled down", 1024, 384, 16, 8), MODELS["qwen3"]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
RANK, ALPHA, KERNEL = 16, 32.0, "MXFP4_SFT_MOE"
Step = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]  # x, ids, w, dy -> gradients


def step_of(layer: Callable[[Tensor, Tensor, Tensor], Tensor], factors: Sequence[Tensor]) -> Step:
    """Forward and backward: the gradients of x [T, H], of w [T, k] and of factors."""

    def step(x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return list(torch.autograd.grad(layer(x, ids, w), [x, w, *factors], dy))

    return step


def weights(dtype: str) -> dict[str, Step]:
    """All weights get gradients."""
    m = SMALL
    shapes = (m.experts, 2 * m.intermediate, m.hidden), (m.experts, m.hidden, m.intermediate)
    both = [(torch.randn(shape) / 32).to(DTYPES[dtype]).requires_grad_() for shape in shapes]
    ours = partial(
        torch.ops.fusion_moe.fused_experts, gate_up=both[:1], down=both[1:], weight_format=dtype
    )
    found = {"fusion_moe": step_of(ours, both)}
    for name in ("eager", "grouped_mm"):
        config = Qwen3MoeConfig(
            hidden_size=m.hidden,
            moe_intermediate_size=m.intermediate,
            num_experts=m.experts,
            num_experts_per_tok=m.slots,
            experts_implementation=name,
        )
        theirs = Qwen3MoeExperts(config)
        theirs.gate_up_proj, theirs.down_proj = map(torch.nn.Parameter, both)
        found[name] = step_of(theirs, list(theirs.parameters()))
    return found


def adapters(kt: KtKernel | None) -> dict[str, Step]:
    """Frozen weights in 4 bits; A and B of gate_up, then of down, get gradients."""
    m, frozen = QWEN3, random_weights(MXFP4)
    factors = tuple(
        (torch.randn(shape) / 16).bfloat16().requires_grad_()
        for n, k in ((2 * m.intermediate, m.hidden), (m.hidden, m.intermediate))
        for shape in ((m.experts, RANK, k), (m.experts, n, RANK))
    )
    names = "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"
    ours = partial(
        torch.ops.fusion_moe.fused_experts,
        gate_up=list(frozen[0]),
        down=list(frozen[1]),
        weight_format=MXFP4.name,
        lora_scale=ALPHA / RANK,
        **dict(zip(names, factors, strict=True)),
    )
    found = {"fusion_moe": step_of(ours, factors)}
    if kt is not None and kt.has(KERNEL):
        own = tuple(factor.detach() for factor in factors)
        found["kt-kernel"] = kt.lora(KERNEL, *frozen, own, ALPHA)
    return found


def measure(
    now: Clock, steps: Mapping[str, Step], m: Model, dtype: torch.dtype, tokens: int, rounds: int
) -> None:
    """Prints the times of each; AssertionError unless their gradients agree."""
    x, dy = (torch.randn(tokens, m.hidden).to(dtype) for _ in range(2))
    w, ids = torch.rand(tokens, m.experts).softmax(-1).topk(m.slots)
    call = x, ids, (w / w.sum(-1, keepdim=True)).to(dtype), dy
    want, *others = [step(*call) for step in steps.values()]
    for other in others:
        for a, b in zip(want, other, strict=True):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            assert error < 0.02, f"gradients {tuple(a.shape)} differ by {error:.2g}"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            time.sleep(PAUSE)
            start = now()
            step(*call)
            times[name].append(1e3 * (now() - start))
    print(f"{tokens} tokens, {str(dtype).removeprefix('torch.')}")
    ours = statistics.median(times["fusion_moe"])
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        print(f"  {name:12} {median:8.1f} ms ({low:.1f} .. {high:.1f}) {median / ours:.2f}x ours")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, {args.threads} threads")
    kt = None
    if args.lora:
        try:
            kt = KtKernel(args.threads, max(args.tokens), QWEN3.slots)
        except ImportError as error:
            print(f"kt-kernel: {error}")
    now = clock([kt] if kt else [], args.threads)
    for dtype in ["bf16"] if args.lora else args.dtypes:
        steps, model = (adapters(kt), QWEN3) if args.lora else (weights(dtype), SMALL)
        for tokens in args.tokens:
            measure(now, steps, model, DTYPES[dtype], tokens, args.rounds)


if __name__ == "__main__":
    main()
