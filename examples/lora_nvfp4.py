"""Teach C++ to the tiny Qwen3-MoE, which knows Python: LoRA over its NVFP4 experts, compared with
plain torch on the same numbers.

    python examples/lora_nvfp4.py [--steps 40]

The text is torch's own C++ headers; a hash of a file's name decides whether it is trained on or
held out. Trains twice with the same adapters, batches, bf16 autocast and AdamW: with `quantize_`
and `add_lora_`, and with a loop over experts in torch with decoded weights and A and B as plain
parameters. Exits with 1 unless held-out bits per byte fall by a quarter and both end within half a
percent of each other.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from heldout import bits_per_byte_and_perplexity
from torch import Tensor, nn
from train_tiny_qwen3_moe import encode, sample_batch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import fusion_moe
from fusion_moe.encodings import dequantize

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
HEADERS = Path(torch.__file__).parent / "include"
# headers in ATen/ops are generated, and near copies of each other
FOLDERS, GENERATED = ("ATen", "c10", "torch"), "ops"
SMALLEST_FILE = 1000  # bytes of a held-out file
CONTEXT = 256  # tokens of a window
RANK, ALPHA, LEARNING_RATE, CLIPPED = 16, 32, 5e-3, 1.0
WANTED_FALL, ALLOWED_DIFFERENCE = 0.25, 0.005


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


class PlainExperts(nn.Module):
    """The computation of experts with adapters, in torch: a loop over experts with decoded
    weights.
    """

    def __init__(self, experts: fusion_moe.nn.Experts):
        super().__init__()
        for name in experts.projections:
            # rounded as by autocast
            self.register_buffer(name, dequantize(experts.weight_of(name), torch.bfloat16))
            setattr(self, f"{name}_lora", copy.deepcopy(getattr(experts, f"{name}_lora")))

    def project(self, name: str, rows: Tensor, expert: int) -> Tensor:
        """rows [M, K] -> [M, N]"""
        adapter = getattr(self, f"{name}_lora")
        added = F.linear(F.linear(rows, adapter.A[expert]), adapter.B[expert])
        return F.linear(rows, getattr(self, name)[expert]) + adapter.scale * added

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H], index int[T, k], weights [T, k] -> [T, H]"""
        out = torch.zeros_like(hidden)
        for expert in range(len(self.get_buffer("down"))):
            token, slot = (index == expert).nonzero(as_tuple=True)
            gate, up = self.project("gate_up", hidden[token], expert).chunk(2, -1)
            y = self.project("down", F.silu(gate) * up, expert) * weights[token, slot, None]
            out = out.index_add(0, token, y.to(out.dtype))
        return out


def models(seed: int) -> dict[str, Any]:
    """The two models, with equal adapters."""
    ours = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
    fusion_moe.quantize_(ours)
    torch.manual_seed(seed)
    fusion_moe.nn.add_lora_(ours, RANK, ALPHA)
    plain = (
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        .train()
        .requires_grad_(False)
    )
    for mine, theirs in zip(ours.model.layers, plain.model.layers, strict=True):
        theirs.mlp.experts = PlainExperts(mine.mlp.experts)
    return {"fusion_moe": ours, "plain torch": plain}


@dataclass
class Training:
    """A model in training: its adapters' optimizer, the held-out bits per byte before and after,
    the seconds of its steps.
    """

    model: Any
    bits: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.adapters, lr=LEARNING_RATE, weight_decay=0.0)

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> float:
        """Takes a step; returns the loss before it."""
        start = time.monotonic()
        self.optimizer.param_groups[0]["lr"] = rate
        with torch.autocast(inputs.device.type, torch.bfloat16):
            logits = self.model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.adapters, CLIPPED)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.monotonic() - start
        return loss.item()

    def measure(self, tokenizer: Any, held_out: list[str]) -> None:
        """Records the bits per byte of held-out text."""
        self.model.eval()
        with torch.autocast(self.model.device.type, torch.bfloat16):
            self.bits.append(
                bits_per_byte_and_perplexity(
                    self.model, tokenizer, held_out, CONTEXT, batch_size=8
                )[0]
            )
        self.model.train()


def train(trainings: dict[str, Training], tokens: Tensor, args: argparse.Namespace) -> None:
    """Trains all on the same batches."""
    torch.manual_seed(args.seed)
    for step in range(1, args.steps + 1):
        batch = sample_batch(tokens, args.batch, CONTEXT)
        losses = {
            name: training.step(*batch, LEARNING_RATE * (1 - (step - 1) / args.steps))
            for name, training in trainings.items()
        }
        if step % 5 == 0 or step == 1:
            print(
                f"step {step:>3} of {args.steps}  loss "
                f"{'  '.join(f'{name} {loss:.4f}' for name, loss in losses.items())}",
                flush=True,
            )


def verdict(trainings: dict[str, Training]) -> bool:
    """Prints the results; returns whether they are as expected."""
    for name, training in trainings.items():
        before, after = training.bits
        print(
            f"{name:<12} held-out bits per byte {before:.4f} -> {after:.4f} "
            f"({after / before - 1:+.1%}), steps {training.seconds:.0f} s"
        )
    (before, after), (_, plain) = (training.bits for training in trainings.values())
    fall, difference = 1 - after / before, abs(after / plain - 1)
    print(
        f"fall {fall:.1%}, wanted {WANTED_FALL:.0%}; difference {difference:.2%}, allowed "
        f"{ALLOWED_DIFFERENCE:.1%}"
    )
    return fall >= WANTED_FALL and difference <= ALLOWED_DIFFERENCE


def main() -> None:
    """Trains both, and compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="of the optimizer (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--held-out", type=int, default=24_000, help="bytes of held-out text")
    parser.add_argument(
        "--seed", type=int, default=0, help="of adapters and batches (default: %(default)s)"
    )
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train_on, held_out = texts(args.held_out)
    tokens = encode(tokenizer, train_on)
    print(
        f"{len(tokens)} training tokens of {len(train_on)} headers; held out: "
        f"{len(held_out)} headers"
    )
    trainings = {name: Training(model) for name, model in models(args.seed).items()}
    for training in trainings.values():
        training.measure(tokenizer, held_out)
    train(trainings, tokens, args)
    for training in trainings.values():
        training.measure(tokenizer, held_out)
    sys.exit(0 if verdict(trainings) else 1)


if __name__ == "__main__":
    main()
