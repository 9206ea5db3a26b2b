"""Train a small Qwen3-MoE three times from one seed, with experts by transformers' eager loop, by
torch's grouped_mm, and by fusion_moe.

    python examples/train_moe.py [--steps 40]
    python examples/train_moe.py --recipe fp8 [--steps 500]

Everything but the experts is the same: weights, batches, bf16 autocast, AdamW. The text is
examples/tiny_qwen3_moe/heldout.jsonl. No two orders of bf16 additions round alike, so losses drift
apart; torch's own two implementations show how far. Exits with 1 if fusion_moe's smoothed loss is
farther from the nearer of these two than twice their difference.

--recipe trains by fusion_moe alone: in bf16 from two seeds, and from the first one with the
operands of the experts' products rounded as in Transformer Engine's MXFP8BlockScaling (mxfp8) or
Float8BlockScaling (fp8; fp8_f32: with scales that are no powers of two). Exits with 1 if its
smoothed loss is ever, in the second half, farther from bf16's than those of the two seeds get from
each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from heldout import load_heldout
from torch import Tensor
from train_tiny_qwen3_moe import (
    encode,
    make_optimizer,
    model_config,
    rate_at,
    sample_batch,
    train_step,
)
from transformers import AutoTokenizer, Qwen3MoeForCausalLM
from transformers.utils import logging

import fusion_moe.transformers  # registers experts_implementation="fusion_moe"
from fusion_moe.recipe import Float8BlockScaling, MXFP8BlockScaling

OURS, THEIRS = "fusion_moe", ("eager", "grouped_mm")
MODEL = Path(__file__).parent / "tiny_qwen3_moe"
LEARNING_RATE, WEIGHT_DECAY = 2e-3, 0.1
SMOOTHING = 0.7  # coefficient of the exponential moving average of losses
ALLOWED = 2.0
RECIPES = {
    "bf16": None,
    "mxfp8": MXFP8BlockScaling(),
    "fp8": Float8BlockScaling(power_2_scale=True),
    "fp8_f32": Float8BlockScaling(power_2_scale=False),
}


def losses_with(
    experts: str,
    tokens: Tensor,
    args: argparse.Namespace,
    tokenizer: AutoTokenizer,
    recipe: str = "bf16",
    seed: int = 0,
) -> Tensor:
    """The loss of each step of one training."""
    name = experts if args.recipe == "bf16" else f"{recipe}, {seed}"
    torch.manual_seed(seed)
    config = model_config(tokenizer)
    config.num_hidden_layers = args.layers
    model = Qwen3MoeForCausalLM(config).to(args.device).train()
    model.set_experts_implementation(experts)
    optimizer = make_optimizer(model, WEIGHT_DECAY)
    losses, start = [], time.monotonic()
    torch.manual_seed(seed)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at((step + 1) / args.steps, LEARNING_RATE)
        with fusion_moe.autocast(recipe=RECIPES[recipe]):
            losses.append(
                train_step(model, optimizer, *sample_batch(tokens, args.batch, args.context))
            )
        if (step + 1) % max(10, args.steps // 10) == 0 or step + 1 == args.steps:
            seconds = time.monotonic() - start
            print(
                f"{name:<12}step {step + 1:>4} of {args.steps}  loss {losses[-1].item():.4f}  "
                f"{seconds:.0f} s",
                flush=True,
            )
    return torch.stack(losses).cpu()


def smoothed(losses: Tensor) -> Tensor:
    """The moving average after each step."""
    averages = [losses[0]]
    for loss in losses[1:]:
        averages.append(SMOOTHING * averages[-1] + (1 - SMOOTHING) * loss)
    return torch.stack(averages)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two smoothed losses at any step."""
    return (a - b).abs().max().item()


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="of the optimizer (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows a step")
    parser.add_argument("--context", type=int, default=64, help="tokens a window")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--recipe", choices=RECIPES, default="bf16", help="what else to train with")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="a GPU where there is one",
    )
    args = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = encode(tokenizer, load_heldout()).to(args.device)
    if args.recipe == "bf16":
        _beside_torch(tokens, args, tokenizer)
    else:
        _by_recipe(tokens, args, tokenizer)


def _beside_torch(tokens: Tensor, args: argparse.Namespace, tokenizer: AutoTokenizer) -> None:
    curves = {
        experts: smoothed(losses_with(experts, tokens, args, tokenizer, seed=args.seed))
        for experts in (*THEIRS, OURS)
    }
    for experts, curve in curves.items():
        print(f"{experts:<12}smoothed loss {curve[-1]:.5f}")
    theirs = apart(*(curves[experts] for experts in THEIRS))
    ours = min(apart(curves[OURS], curves[experts]) for experts in THEIRS)
    print(
        f"torch's two are up to {theirs:.5f} apart, fusion_moe up to {ours:.5f} from the nearer "
        f"one; allowed: {ALLOWED * theirs:.5f}"
    )
    if not ours <= ALLOWED * theirs:
        sys.exit("fusion_moe's loss leaves torch's")


def _by_recipe(tokens: Tensor, args: argparse.Namespace, tokenizer: AutoTokenizer) -> None:
    runs = (("bf16", args.seed), ("bf16", args.seed + 1), (args.recipe, args.seed))
    curves = [
        smoothed(losses_with(OURS, tokens, args, tokenizer, recipe, seed)) for recipe, seed in runs
    ]
    for (recipe, seed), curve in zip(runs, curves, strict=True):
        print(f"{recipe + ', seed ' + str(seed):<20}smoothed loss {curve[-1]:.5f}")
    usual, other, rounded = (curve[len(curve) // 2 :] for curve in curves)
    spread, off = apart(usual, other), apart(usual, rounded)
    print(
        f"in the second half the seeds are up to {spread:.5f} apart, {args.recipe} up to {off:.5f} "
        "from bf16"
    )
    if not off <= spread:
        sys.exit(f"the loss with {args.recipe} leaves that in bf16")


if __name__ == "__main__":
    main()
