"""A model that is larger than the device: experts in the host's memory, a cache of them on the
device, the rest copied or computed by the CPU in each step.

    python examples/offload.py                     # the small model; the CPU stands for a GPU
    python examples/offload.py --memory 1300KB     # with so much of the pretended device's memory
    python examples/offload.py --model DIR --memory 20GiB --gpu     # on a GPU

Prints what is where, then generates with the model and with the same one offloaded, several times
while the cache learns. Where the CPU stands for the GPU, texts and logits must be equal, bit for
bit; hits, copies and what the CPU computed are counted. At the end: what one step does, and the
program of its steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor
from transformers import AutoTokenizer, logging as transformers_logging

import fusion_moe.offload
from fusion_moe import NVFP4Config
from fusion_moe.messages.units import amount
from fusion_moe.offload.device import Counters
from fusion_moe.transformers import from_pretrained

SMALL = Path(__file__).parent / "tiny_qwen3_moe"
TURNS = 4


def loaded(path: Path) -> Any:
    """The model on the CPU, its experts in NVFP4 unless the directory has them in few bits."""
    more = {"quantization_config": NVFP4Config()} if path == SMALL else {}
    return from_pretrained(path, dtype=torch.bfloat16, **more).eval()


def generated(model: Any, ids: Tensor, tokens: int) -> Tensor:
    """The ids of the likeliest continuation."""
    ids = ids.to(model.device)
    return model.generate(ids, max_new_tokens=tokens, do_sample=False)[:, ids.shape[1] :].cpu()


def said(counters: Counters, seconds: float, tokens: int) -> str:
    c = counters
    return (
        f"{c.hit_rate:5.0%} hits, {c.copied:5,} experts copied, {c.computed:5,} computed, "
        f"{amount(c.bytes_copied, 'B'):>7} copied, {tokens / seconds:.1f} tokens/s"
    )


@torch.no_grad()
def main() -> int:
    """Whether all that must be equal is: 0, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SMALL, help="a directory in few bits")
    parser.add_argument("--memory", default="4MB", help="bytes of the device, such as 20GiB")
    parser.add_argument("--gpu", action="store_true", help="on GPU 0, not a pretended device")
    parser.add_argument("--prompt", default="Once upon a time", help="what is continued")
    parser.add_argument("--tokens", type=int, default=24, help="how many are generated")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids

    plain, model = loaded(arguments.model), loaded(arguments.model)
    want, logits = generated(plain, ids, arguments.tokens), plain(ids).logits
    device = 0 if arguments.gpu else "pretended"
    plan = fusion_moe.offload.offload_(
        model, {device: arguments.memory}, kv_tokens=ids.shape[1] + arguments.tokens
    )
    print(plan, end="\n\n")

    equal, before = True, Counters()
    for turn in range(TURNS):
        start = time.perf_counter()
        found = generated(model, ids, arguments.tokens)
        seconds = time.perf_counter() - start
        counters = fusion_moe.offload.counters(model).values()
        now = sum(counters, Counters())
        print(f"turn {turn + 1}: {said(now - before, seconds, arguments.tokens)}")
        equal, before = equal and found.equal(want), now
    print(f"\n{tokenizer.decode(found[0])!r}")
    if not arguments.gpu:
        same = model(ids).logits.equal(logits)
        print(f"the plain model's text: {equal}; its logits, bit for bit: {same}")
        equal = equal and same
    what, *programs = fusion_moe.offload.explain(model, ids[:, :1].to(model.device)).split("\n\n")
    print(f"\na step of one token:\n{what}\n\n{programs[0] if programs else ''}")
    return 0 if equal or arguments.gpu else 1


if __name__ == "__main__":
    sys.exit(main())
