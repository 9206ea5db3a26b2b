"""The experts of the tiny Qwen3-MoE in NVFP4, divided between processes: what each process holds,
and the text that all of them generate.

    torchrun --nproc-per-node 2 examples/expert_parallel.py [--plan ep | tp | ep_tp]
    torchrun --nproc-per-node 4 examples/expert_parallel.py --dispatch symmetric

Runs on CPUs, over gloo; without torchrun, in one process. With --dispatch each process sends its
own tokens to the experts, here the same text in each; "symmetric" through memory that all share.
Before the experts are divided, each process has all of them and generates without the others.
Exits with 1 unless the texts are the same and logits agree within float32's rounding.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import fusion_moe
from fusion_moe.distributed import DISPATCH, PLANS, parallelize_
from fusion_moe.nn import Experts

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPT, TOKENS, LIMIT = "def mean(values):\n", 48, 1e-4


def generated(model: Any, prompt: Any) -> torch.Tensor:
    """The tokens of the prompt and the most likely ones after it."""
    return model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[1, T, vocabulary], for tokens in one call."""
    with torch.no_grad():
        return model(tokens).logits


def held(model: torch.nn.Module) -> str:
    """What this process holds of a layer's experts, and how many bytes in all layers."""
    layers = [m for m in model.modules() if isinstance(m, Experts)]
    experts, _, features = layers[0].weight_of("down").shape
    first = layers[0].first_expert or 0
    return (
        f"experts {first} to {first + experts - 1} of each layer, {features} features each, "
        f"{sum(m.nbytes for m in layers):,} bytes"
    )


def main() -> int:
    """0 if all processes generated the same as a single one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plan",
        choices=PLANS,
        default="ep",
        help="divide the experts, the features of each, or both (default: ep)",
    )
    parser.add_argument(
        "--dispatch",
        choices=DISPATCH,
        help="each process has its own tokens, and how they get to experts",
    )
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "RANK" not in os.environ:  # torchrun sets these
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    ranks = int(os.environ["WORLD_SIZE"])
    if args.plan == "ep_tp" and ranks % 2:
        parser.error(f"--plan ep_tp on {ranks} processes: expected an even number")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, ranks // 2) if args.plan == "ep_tp" else (ranks,))

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    fusion_moe.quantize_(model)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    before, alone = held(model), generated(model, prompt)
    expected = logits(model, alone)

    own = {"tokens": "sharded", "dispatch": args.dispatch} if args.dispatch else {}
    divided = parallelize_(model, mesh, plan=args.plan, **own)
    start = time.perf_counter()
    together = generated(model, prompt)
    seconds = time.perf_counter() - start
    difference = ((logits(model, alone) - expected).norm() / expected.norm()).item()
    same = together.equal(alone) and difference <= LIMIT

    found: list[Any] = [None] * mesh.size()
    dist.all_gather_object(found, (held(model), same))
    if dist.get_rank() == 0:
        print(f"one process:  {before}")
        print("\n".join(f"rank {rank}:       {what}" for rank, (what, _) in enumerate(found)))
        print(f"\n{tokenizer.decode(together[0])}\n")
        print(
            f"{TOKENS} tokens in {seconds:.2f} s, {len(divided)} layers, plan {args.plan!r}"
            + (f", dispatch {args.dispatch!r}" if args.dispatch else "")
            + f" on {mesh.size()} ranks;",
            end=" ",
        )
        print(
            f"text {'equal to' if all(ok for _, ok in found) else 'DIFFERENT from'} one "
            f"process's, logits differ by {difference:.0e}"
        )
    dist.destroy_process_group()
    return 0 if all(ok for _, ok in found) else 1


if __name__ == "__main__":
    code = main()
    gc.collect()  # the mesh, which keeps gloo's threads: they abort if the interpreter ends first
    sys.exit(code)
