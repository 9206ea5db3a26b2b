"""Quantization-aware training of the small real model, beside nvidia-modelopt's: losses, seconds of
a step, memory at its peak.

    python benchmarks/qat.py [--device cpu] [--steps 6] [--tokens 512]
                                            # needs transformers; nvidia-modelopt for its row, which
                                            # rounds to NVFP4 on GPUs only. Writes results/qat.md

The model is `examples/tiny_qwen3_moe` in float32 under bf16 autocast, its experts' weights rounded
to NVFP4 (W4A16), on the same batches and with the same AdamW. `float` trains it unrounded, by
transformers' own experts. Each contender runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results import table, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import fusion_moe

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from heldout import load_heldout  # noqa: E402

MODEL = EXAMPLES / "tiny_qwen3_moe"


def rounded_by_modelopt(model: Any) -> Any:
    """Its experts' weights, and nothing else."""
    import modelopt.torch.quantization as mtq

    config = mtq.W4A16_NVFP4_CFG
    config["quant_cfg"].append({"quantizer_name": "*self_attn*", "enable": False})
    tokens = torch.zeros(1, 8, dtype=torch.long, device=model.device)
    return mtq.quantize(model, config, lambda m: m(tokens))


def rounded(model: Any, how: str) -> Any:
    """By `qat_`."""
    fusion_moe.qat_(model, straight_through=how)
    return model


CONTENDERS = {
    "float": lambda model: model,
    "modelopt": rounded_by_modelopt,
    "qat_ exact": lambda model: rounded(model, "exact"),
    "qat_ saved": lambda model: rounded(model, "saved"),
}


def peak(device: str) -> float:
    """MB so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measured(name: str, device: str, steps: int, tokens: int) -> dict[str, float]:
    """Losses of the first and the last step, the seconds of the fastest, MB beside the model."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).train()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = torch.tensor(tokenizer("".join(load_heldout(max_bytes=90_000))).input_ids, device=device)
    before = peak(device)
    model = CONTENDERS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds = [], []
    for step in range(steps):
        batch = text[step * tokens : (step + 1) * tokens].view(-1, 256)
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits
        seconds.append(time.perf_counter() - start)
    return {
        "first": losses[0],
        "last": losses[-1],
        "seconds": min(seconds),
        "mb": peak(device) - before,
    }


def main() -> None:
    """Measures each contender in a process, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--only", choices=CONTENDERS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measured(args.only, args.device, args.steps, args.tokens)))
        return
    rows = []
    for name in CONTENDERS:
        sizes = "--steps", str(args.steps), "--tokens", str(args.tokens)
        given = sys.argv[0], "--only", name, "--device", args.device, *sizes
        done = subprocess.run([sys.executable, *given], capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append(
            (
                name,
                f"{found['first']:.4f}",
                f"{found['last']:.4f}",
                f"{found['seconds']:.2f}",
                f"{found['mb']:.0f}",
            )
        )
        print(*rows[-1], flush=True)
    head = "", "loss of the first step", "of the last", "seconds of a step", "MB beside the model"
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    threads = torch.get_num_threads()
    about = f"{where}, {threads} threads, {args.steps} steps of {args.tokens} tokens."
    write("qat", "python benchmarks/qat.py", about, table(head, rows))


if __name__ == "__main__":
    main()
