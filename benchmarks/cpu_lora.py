"""Forward and backward of frozen MXFP4 experts with adapters on the CPU, beside KTransformers'
fine-tuning kernels, in one process.

    python benchmarks/cpu_lora.py --tokens 64 512 --threads 2        # cpu_peers.py says how to
        install kt-kernel

A layer of Qwen3-30B-A3B's size: 128 experts, 8 for each token, H 2048, I 768; rank 16. Both take
the same codes and scales, factors in bf16, activations and routings, and make gradients of the
activations, the router's weights and all factors, which are compared first. kt-kernel has an A for
gate and one for up: both are the one that ours shares, and its two gradients are added. It keeps
copies of the weights, in an order of its own; ours reads them as they are stored. They take turns.
Milliseconds, of CPU time for one thread, of wall time for more: the median, and the lower and the
upper quartile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from cpu_moe import MODELS, PAUSE, Clock, Weights, clock, random_weights
from cpu_peers import Factors, KtKernel, TrainingStep
from cpu_training import line
from torch import Tensor

import fusion_moe
from fusion_moe.encodings import MXFP4

RANK, ALPHA = 16, 32.0
MODEL = MODELS["qwen3"]
OURS, PEER, KERNEL = "fusion_moe", "kt-kernel", "MXFP4_SFT_MOE"


def random_factors() -> Factors:
    """A and B of gate_up, then of down: bf16, B not zero."""
    sizes = (2 * MODEL.intermediate, MODEL.hidden), (MODEL.hidden, MODEL.intermediate)
    return tuple(
        torch.randn(shape).bfloat16() / 16
        for n, k in sizes
        for shape in ((MODEL.experts, RANK, k), (MODEL.experts, n, RANK))
    )


def ours(weights: Weights, factors: Factors) -> TrainingStep:
    """The operation that nn.Experts calls, and its backward."""
    factors = tuple(factor.detach().requires_grad_() for factor in factors)
    layer = partial(
        torch.ops.fusion_moe.fused_experts,
        gate_up=list(weights[0]),
        down=list(weights[1]),
        gate_up_lora_a=factors[0],
        gate_up_lora_b=factors[1],
        down_lora_a=factors[2],
        down_lora_b=factors[3],
        weight_format=MXFP4.name,
        lora_scale=ALPHA / RANK,
    )

    def step(x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return list(torch.autograd.grad(layer(x, ids, w), [x, w, *factors], dy))

    return step


def inputs(tokens: int) -> tuple[Tensor, ...]:
    """The arguments of a step."""
    x, dy = (torch.randn(tokens, MODEL.hidden).bfloat16() for _ in range(2))
    w, ids = torch.randn(tokens, MODEL.experts).softmax(-1).topk(MODEL.slots)
    return x, ids, w / w.sum(-1, keepdim=True), dy


def check(a: list[Tensor], b: list[Tensor]) -> None:
    """AssertionError unless gradients agree, by the mean square of their difference."""
    for name, x, y in zip(
        ("x", "w", "gate_up A", "gate_up B", "down A", "down B"), a, b, strict=True
    ):
        error = float((x.float() - y.float()).norm() / y.float().norm())
        assert error < 0.02, f"gradients of {name} differ by {error:.2g}"


def measure(
    now: Clock, steps: dict[str, TrainingStep], tokens: int, rounds: int
) -> dict[str, list[float]]:
    """The milliseconds of each, round by round, after one that is not counted."""
    args = inputs(tokens)
    times: dict[str, list[float]] = {name: [] for name in steps}
    made = {name: step(*args) for name, step in steps.items()}
    if PEER in made:
        check(made[OURS], made[PEER])
    for _ in range(rounds):
        for name, step in steps.items():
            time.sleep(PAUSE)
            start = now()
            step(*args)
            times[name].append(1e3 * (now() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    weights, factors = random_weights(MXFP4), random_factors()
    steps = {OURS: ours(weights, factors)}
    print(f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, {args.threads} threads")
    kt = None
    try:
        kt = KtKernel(args.threads, max(args.tokens), MODEL.slots)
        print(f"kt-kernel {kt.version}")
        if kt.has(KERNEL):
            steps[PEER] = kt.lora(KERNEL, *weights, factors, ALPHA)
        else:
            print(f"kt-kernel has no {KERNEL} for this CPU")
    except ImportError as error:
        print(f"kt-kernel: {error}")
    now = clock([kt] if kt else [], args.threads)
    for tokens in args.tokens:
        times = measure(now, steps, tokens, args.rounds)
        medians = {name: statistics.median(of) for name, of in times.items()}
        print(
            f"{tokens} tokens"
            + (
                f": {medians[PEER] / medians[OURS]:.2f} times as fast as kt-kernel"
                if PEER in medians
                else ""
            )
        )
        print("\n".join(line(name, of) for name, of in times.items()), flush=True)


if __name__ == "__main__":
    main()
