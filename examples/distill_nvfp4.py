"""Distill the tiny Qwen3-MoE into itself with 4-bit experts: quantization-aware training whose loss
is the distance to the float model's predictions.

    python examples/distill_nvfp4.py [--steps 40] [--encoding mxfp4]

The text is torch's own C++ headers, which the model was not trained on; a hash of a file's name
decides whether it is trained on or held out. No label is read. Exits with 1 unless the divergence
from the float model on held-out text falls by a tenth, and `quantize_` at the end changes no logit.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train_tiny_qwen3_moe import encode, sample_batch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fusion_moe

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
HEADERS = Path(torch.__file__).parent / "include"
# headers in ATen/ops are generated, and near copies of each other
FOLDERS, GENERATED = ("ATen", "c10", "torch"), "ops"
SMALLEST_FILE = 1000  # bytes of a held-out file
CONTEXT = 256  # tokens of a window
LEARNING_RATE, WANTED_FALL = 2e-5, 0.1


def texts(held_out_bytes: int) -> tuple[list[str], list[str]]:
    """Headers to train on, and held-out headers: as many as fit of each tenth, by the hash of the
    name.
    """
    train, held_out, room = [], list[str](), held_out_bytes
    paths = (
        path
        for folder in FOLDERS
        for path in (HEADERS / folder).rglob("*.h")
        if path.parent.name != GENERATED
    )
    for path in sorted(paths, key=_hash):
        text = path.read_text(encoding="utf-8", errors="replace")
        if _hash(path) % 10:
            train.append(text)
        elif SMALLEST_FILE <= len(text) <= room:
            held_out.append(text)
            room -= len(text)
    return train, held_out


def _hash(path: Path) -> int:
    return int(hashlib.sha256(path.name.encode()).hexdigest(), 16)


def divergence(student: Any, teacher: Any, tokens: Tensor) -> Tensor:
    """KL(teacher | student) in nats for each token."""
    with torch.no_grad():
        wanted = teacher(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    found = student(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return F.kl_div(
        found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
    )


def main() -> int:
    """Trains and reports; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of the optimizer")
    parser.add_argument("--batch", type=int, default=2, help="windows a step")
    parser.add_argument(
        "--encoding", choices=["nvfp4", "mxfp4"], default="nvfp4", help="of the experts"
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train, held_out = (encode(tokenizer, kept) for kept in texts(held_out_bytes=60_000))
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval() for _ in range(2)
    )
    fusion_moe.qat_(student, args.encoding)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, args.steps)
    torch.manual_seed(0)
    some = sample_batch(held_out, 8, CONTEXT)[0]

    @torch.no_grad()
    def measured() -> float:
        return divergence(student, teacher, some).item()

    first = measured()
    for step in range(args.steps):
        tokens, _ = sample_batch(train, args.batch, CONTEXT)
        loss = divergence(student, teacher, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 0:
            print(f"step {step}: {loss.item():.4f} nats a token")
    last = measured()
    with torch.no_grad():
        trained = student(some).logits
        fusion_moe.quantize_(student)
        same = torch.equal(student(some).logits, trained)
    print(f"held out: {first:.4f} -> {last:.4f} nats a token; quantize_ changes no logit: {same}")
    return 0 if same and last <= (1 - WANTED_FALL) * first else 1


if __name__ == "__main__":
    sys.exit(main())
