"""Fine-tune a mixture-of-experts model whose experts stay in NVFP4, from text to a merged
checkpoint that transformers and vLLM load.

    python examples/finetune.py --small     # the small model of this repository, on a CPU
    python examples/finetune.py --model DIR --text FILE ... --out DIR --steps 1000
    python examples/finetune.py --config qwen3-30b --sequence 4096 --batch 1 --steps 200

PEFT's LoRA on experts and attention, transformers' Trainer. The same command after a run was killed
goes on from its last checkpoint. The adapter that was the best on held-out text is saved in
OUT/adapter, and the model with it merged, in NVFP4, in OUT/merged. The text is this repository's
documentation, without --text; every tenth file is held out.

--small trains twice, the second time killed and resumed, and exits with 1 unless both took the same
steps bit for bit, the best adapter came back, and transformers loads the merged model that was
saved.

--config measures: random weights of a model's sizes, tokens/s and peak memory with NVFP4 experts,
and with the same numbers in bf16 with torch's grouped_mm and PEFT alone (--base: only one of them).
Exits with 1 if the smoothed losses of the two are ever, in the second half, farther apart than
those of two seeds in bf16. The learning rate rises during a tenth of the steps, and stays low: at
2e-3 from the start, random weights diverge by chance, whichever the base. The vocabulary is the
small model's: of a deep model the projection to a large one is a small part, of a few layers it
would be most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from train_moe import apart, smoothed
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

import fusion_moe
from fusion_moe.encodings import NVFP4, dequantize, quantize
from fusion_moe.integrations.transformers.bench import SIZES as ALL_SIZES
from fusion_moe.transformers import NVFP4Config, from_pretrained

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
DOCS = sorted((Path(__file__).resolve().parents[1] / "docs").rglob("*.md"))
# of these, what differs from the small model; depth, vocabulary and positions do not
SIZES = {
    name: {
        entry: sizes[entry]
        for entry in sizes
        if entry.endswith(("_size", "_heads", "_dim", "_experts", "_tok")) and entry != "vocab_size"
    }
    for name, sizes in ALL_SIZES.items()
}
LORA = {
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "task_type": "CAUSAL_LM",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 3  # steps before those that are timed
Blocks = list[dict[str, torch.Tensor]]


def blocks_of(tokenizer: Any, files: Sequence[Path], length: int) -> Blocks:
    """The files' text, one after the other, in blocks of `length` tokens."""
    tokens: list[int] = []
    for file in files:
        tokens += [tokenizer.eos_token_id, *tokenizer(file.read_text(encoding="utf-8")).input_ids]
    whole = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    return [{"input_ids": block, "labels": block} for block in whole]


def base_of(args: argparse.Namespace) -> Any:
    """The frozen model, in bf16, with experts in NVFP4 or (--base bf16) rounded to its numbers."""
    if args.config:
        config = AutoConfig.from_pretrained(
            MODEL,
            num_hidden_layers=args.layers,
            max_position_embeddings=args.sequence,
            **SIZES[args.config],
        )
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if args.base == "bf16":
            return in_bf16_(model)
        fusion_moe.quantize_(model)
        return model
    # experts in floats, and in FP8, become NVFP4 while they are read; in fewer bits they stay so
    where: dict[str, Any] = {"device_map": DEVICE}
    if args.gpu_memory:  # experts that have no room there stay in the host's memory
        device: Any = 0 if DEVICE == "cuda" else "pretended"
        where = {"device_map": "auto", "max_memory": {device: args.gpu_memory}, "kv_tokens": 0}
    return from_pretrained(
        args.model, dtype=torch.bfloat16, quantization_config=NVFP4Config(), **where
    )


@torch.no_grad()
def in_bf16_(model: Any) -> Any:
    """Rounds the experts' weights to the numbers that NVFP4 has, and computes them by torch."""
    for layer in model.model.layers:
        for weight in layer.mlp.experts.parameters():
            for matrix in weight:
                rounded = dequantize(
                    quantize(matrix[None], NVFP4, scales=NVFP4Config().scales), torch.bfloat16
                )
                matrix.copy_(rounded[0])
    model.set_experts_implementation("grouped_mm")
    return model


class Killed(TrainerCallback):
    """Kills the process after a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Clock(TrainerCallback):
    """Times when steps end; peak memory is that of the steps that count."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            if state.global_step == WARM:
                torch.cuda.reset_peak_memory_stats()
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Of a step."""
        ends = self.times[WARM:] if len(self.times) > WARM + 1 else self.times
        return statistics.median(b - a for a, b in pairwise(ends))


def trainer_of(args: argparse.Namespace, train: Blocks, held_out: Blocks, **how: Any) -> Trainer:
    """Of new adapters on the base."""
    base = base_of(args)
    if args.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(args.seed)
    model = get_peft_model(base, LoraConfig(**LORA))
    usual = {
        "output_dir": str(args.out),
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "learning_rate": args.learning_rate or (5e-4 if args.config else 2e-3),
        "warmup_steps": args.steps // 10 if args.config else 0,
        "bf16": True,
        "torch_compile": args.compile,
        "use_cpu": DEVICE == "cpu",
        "logging_steps": 1,
        "seed": args.seed,
        "label_names": ["labels"],
        "report_to": [],
        "disable_tqdm": True,
    }
    callbacks = [Killed(args.kill_after)] if args.kill_after else []
    return Trainer(
        model,
        TrainingArguments(**usual | how),
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=callbacks,
    )


def texts(tokenizer: Any, args: argparse.Namespace) -> tuple[Blocks, Blocks]:
    """Blocks to train on, and held-out ones."""
    held_out = args.text[::10]
    train = [file for file in args.text if file not in held_out]
    found = tuple(blocks_of(tokenizer, files, args.sequence) for files in (train, held_out))
    return found[0], found[1][: args.held_out]


def finetune(args: argparse.Namespace) -> Trainer:
    """From text to the best adapter, in OUT/adapter."""
    saves = {"eval_strategy": "steps", "save_strategy": "steps", "save_total_limit": 2}
    every = {"eval_steps": args.save_every, "save_steps": args.save_every}
    trainer = trainer_of(
        args,
        *texts(AutoTokenizer.from_pretrained(args.model), args),
        load_best_model_at_end=True,
        **saves | every,
    )
    last = get_last_checkpoint(args.out) if args.out.exists() else None
    print(f"{args.out}: " + (f"goes on from {Path(last).name}" if last else "begins"), flush=True)
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(args.out / "adapter"))
    return trainer


def merge(trainer: Trainer, args: argparse.Namespace) -> Any:
    """The model with the adapter in its weights, rounded to NVFP4 again; saved in OUT/merged."""
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(args.out / "merged")
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out / "merged")
    print(f"serve it: vllm serve {args.out / 'merged'} --quantization fusion_moe")
    return merged


# What --small shows -------------------------------------------------------------------------------


@torch.no_grad()
def loss_of(model: Any, blocks: Blocks) -> float:
    """The mean loss of a token."""
    model.eval()
    losses = []
    with torch.autocast(DEVICE, torch.bfloat16):
        for block in blocks:
            on = {name: t[None].to(DEVICE) for name, t in block.items()}
            losses.append(model(**on).loss.item())
    return statistics.fmean(losses)


def losses_of(trainer: Trainer) -> list[float]:
    """Of all steps, also those before a checkpoint that it went on from."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same_adapters(one: Any, two: Any) -> bool:
    """Bit for bit."""
    a, b = ({n: p for n, p in m.named_parameters() if "lora_" in n} for m in (one, two))
    return a.keys() == b.keys() and all(torch.equal(p, b[n]) for n, p in a.items())


def small(args: argparse.Namespace) -> bool:
    """Train, kill, resume, merge, load; whether all is as it should be."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # attention's gradients, on GPUs
    out, after = args.out, args.steps // 2 + 1
    args.out = out / "whole"
    whole = finetune(args)
    args.out = out / "killed"
    options = [option for option in sys.argv[1:] if option != "--small"]
    options += ["--out", str(args.out), "--kill-after", str(after)]
    killed = subprocess.run([sys.executable, __file__, *options], stderr=subprocess.DEVNULL)
    resumed = finetune(args)
    one, two = losses_of(whole), losses_of(resumed)
    print("losses " + " ".join(f"{loss:.4f}" for loss in two))
    best, held_out = Path(resumed.state.best_model_checkpoint), resumed.eval_dataset
    again = PeftModel.from_pretrained(base_of(args), best)
    found = {
        f"killed after step {after}": killed.returncode == -signal.SIGKILL,
        f"resumed: {len(one)} losses are equal": one == two,
        "resumed: adapters are equal": same_adapters(whole.model, resumed.model),
        f"the best, {best.name}, came back": same_adapters(again, resumed.model),
    }
    with again.disable_adapter():
        plain = loss_of(again, held_out)
    adapted = loss_of(again, held_out)
    merged = loss_of(merge(resumed, args), held_out)
    loaded = AutoModelForCausalLM.from_pretrained(
        args.out / "merged", dtype=torch.bfloat16, device_map=DEVICE
    )
    print(f"held-out loss {plain:.4f}, with the adapter {adapted:.4f}, merged {merged:.4f}")
    found |= {
        "merged, saved, loaded by transformers: loss is equal": loss_of(loaded, held_out) == merged,
        "merging kept more than half of what was learned": merged < (plain + adapted) / 2,
    }
    for what, is_so in found.items():
        print(f"{what}: {'yes' if is_so else 'NO'}")
    return all(found.values())


# What --config measures ---------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Prints tokens/s and peak memory of one training; writes them, and losses, to OUT."""
    clock = Clock()
    trainer = trainer_of(
        args, *texts(AutoTokenizer.from_pretrained(MODEL), args), save_strategy="no"
    )
    trainer.add_callback(clock)
    trainer.train()
    found = {
        "losses": losses_of(trainer),
        "tokens/s": args.batch * args.sequence / clock.seconds(),
        "GB": peak_bytes() / 1e9,
    }
    print(
        f"{args.base:<6} seed {args.seed}: {found['tokens/s']:,.0f} tokens/s, peak "
        f"{found['GB']:.2f} GB, loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}",
        flush=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.base}-{args.seed}.json").write_text(json.dumps(found))


def peak_bytes() -> int:
    """Of a GPU's memory, or of the process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compare(args: argparse.Namespace) -> bool:
    """Measures both bases, each in a process of its own; whether losses are as near as those of two
    seeds.
    """
    found = []
    for base, seed in (("nvfp4", args.seed), ("bf16", args.seed), ("bf16", args.seed + 1)):
        how = ["--base", base, "--seed", str(seed), "--out", str(args.out)]
        subprocess.run([sys.executable, __file__, *sys.argv[1:], *how], check=True)
        found.append(json.loads((args.out / f"{base}-{seed}.json").read_text()))
    ours, theirs = found[:2]
    a, b, c = (smoothed(torch.tensor(f["losses"]))[args.steps // 2 :] for f in found)
    off, spread = apart(a, b), apart(b, c)
    print(
        f"nvfp4 / bf16: {ours['tokens/s'] / theirs['tokens/s']:.2f}x the tokens/s, "
        f"{ours['GB'] / theirs['GB']:.2f}x the peak; smoothed losses up to {off:.4f} apart, those "
        f"of two seeds {spread:.4f}"
    )
    return off <= spread


def options() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--small", action="store_true", help="kill and resume, and show what is equal")
    add("--config", choices=SIZES, help="measure with random weights of these sizes")
    add("--base", choices=("nvfp4", "bf16"), help="with --config: the experts' weights")
    add("--layers", type=int, default=4, help="with --config (default: %(default)s)")
    add("--model", type=Path, default=MODEL, help="its directory, in floats or quantized")
    add("--text", type=Path, nargs="+", default=DOCS, help="text files to learn from")
    add("--out", type=Path, help="directory to write; a temporary one without it")
    add("--steps", type=int, default=12, help="of the optimizer (default: %(default)s)")
    add("--batch", type=int, default=4, help="sequences a step (default: %(default)s)")
    add("--sequence", type=int, default=128, help="tokens of one (default: %(default)s)")
    add("--held-out", type=int, default=8, help="sequences to evaluate (default: %(default)s)")
    add("--save-every", type=int, default=4, help="so many steps (default: %(default)s)")
    add("--learning-rate", type=float, help="the largest (default: 2e-3; with --config 5e-4)")
    add("--gradient-checkpointing", action="store_true", help="less memory, more time")
    add("--gpu-memory", help="for weights, such as 12GiB; other experts stay in memory")
    add("--compile", action="store_true", help="torch.compile: less time of the host")
    add("--seed", type=int, default=0, help="of adapters and batches (default: %(default)s)")
    add("--kill-after", type=int, help="kill the process after so many steps")
    args = parser.parse_args()
    args.out = args.out or Path(tempfile.mkdtemp(prefix="finetune_"))
    return args


def main() -> None:
    """Does what the options say."""
    args = options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.small:
        sys.exit(not small(args))
    if args.config and args.base:
        measure(args)
    elif args.config:
        sys.exit(not compare(args))
    else:
        merge(finetune(args), args)


if __name__ == "__main__":
    main()
