"""Fine-tuning steps by several libraries: tokens per second, peak GPU memory and losses, each
library in a process of its own. All get ready side by side, one at a time is measured.

    python benchmarks/finetune_peers.py --layers 4 --tokens 16384 4096
    python benchmarks/finetune_peers.py --config tiny --tokens 64 --only fusion_moe offloaded

A model of the sizes of examples/finetune.py with random weights, the same for all, and its text; in
sequences of 4,096 tokens, with gradient checkpointing, LoRA of rank 16 on experts and attention,
transformers' Trainer, AdamW. What a library quantizes is its own; for what it cannot run, a line
says why. Each has made a step of each size before the first that counts, and forgot it.

`lean` trains all layers of Qwen3-30B in 14 GB: rank 8, TRL's SFTTrainer, which has logits in
chunks, moments of AdamW in 8 bits, activations in the host's memory. --vocabulary 151936: with the
model's own embedding.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if sys.argv[-1] == "unsloth":
    import unsloth  # which wants to be before transformers

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from finetune import (
    DEVICE,
    DOCS,
    LORA,
    MODEL,
    SIZES,
    WARM,
    Blocks,
    Clock,
    blocks_of,
    in_bf16_,
    losses_of,
    peak_bytes,
)
from side_by_side import in_turns, ready

import fusion_moe
from fusion_moe.nn import Experts
from fusion_moe.offload.offload import PRETENDED, workspace
from fusion_moe.offload.plan import Model

SEQUENCE, STEPS = 4096, 5
ON_DEVICE = {"use_reentrant": False}


class InPlace(TrainingArguments):
    """For models that may not be moved."""

    place_model_on_device = False


def floats(args: argparse.Namespace, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, on the device."""
    config = AutoConfig.from_pretrained(
        MODEL,
        num_hidden_layers=args.layers,
        max_position_embeddings=SEQUENCE,
        pad_token_id=None,  # whose embedding is zero: norms multiply its gradient by 1,000 each
        **SIZES[args.config],
        **({"vocab_size": args.vocabulary} if args.vocabulary else {}),
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def checkpoint(args: argparse.Namespace) -> str:
    """The same in a directory, for libraries that read one."""
    directory = args.out / "checkpoint"
    with (args.out / "writing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one writes
        if not (directory / "tokenizer.json").exists():
            floats(args).save_pretrained(directory)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(directory)
    return str(directory)


# Contenders ---------------------------------------------------------------------------------------


def adapted(model: Any, lora: dict[str, Any] = LORA) -> Any:
    """With PEFT's adapters."""
    model.gradient_checkpointing_enable(ON_DEVICE)
    torch.manual_seed(0)
    result = get_peft_model(model, LoraConfig(**lora))
    if "target_parameters" in lora and not any(".experts." in n for n in _trained(result)):
        raise RuntimeError("PEFT put no adapters on experts")
    return result


def _trained(model: Any) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def ours(
    args: argparse.Namespace,
    away: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    lora: dict[str, Any] = LORA,
) -> Any:
    """Experts in NVFP4; away: a share of them on the device, the others in the host's memory."""
    model = floats(args, dtype)
    fusion_moe.quantize_(model)
    if away:
        experts = {n: m for n, m in model.named_modules() if isinstance(m, Experts)}
        sizes = Model.of_module(model, experts)
        on = 0 if DEVICE == "cuda" else PRETENDED
        room = sizes.rest + workspace("cuda:0" if DEVICE == "cuda" else PRETENDED)
        room += int(args.resident * sizes.experts)
        print(fusion_moe.offload_(model, {on: room}, kv_tokens=0))
    return adapted(model, lora)


def offloaded(args: argparse.Namespace) -> Any:
    """Ours, most experts in the host's memory."""
    return ours(args, away=True)


def offloaded_fp16(args: argparse.Namespace) -> Any:
    """The same in float16."""
    return ours(args, True, torch.float16)


def lean(args: argparse.Namespace) -> Any:
    """In as little memory as it takes."""
    return ours(args, away=True, lora=LORA | {"r": 8, "lora_alpha": 16})


def grouped_mm(args: argparse.Namespace) -> Any:
    """torch's grouped products, experts in bf16."""
    return adapted(in_bf16_(floats(args)))


def bitsandbytes(args: argparse.Namespace, lora: dict[str, Any] = LORA) -> Any:
    """Experts in NF4, by bitsandbytes' parametrization of any parameter."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model = floats(args)
    model.set_experts_implementation("grouped_mm")
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(layer.mlp.experts, name, quant_type="nf4")
    return adapted(model, lora)


def bitsandbytes_attention(args: argparse.Namespace) -> Any:
    """The same with adapters of attention alone."""
    return bitsandbytes(args, {k: v for k, v in LORA.items() if k != "target_parameters"})


def experts4bit(args: argparse.Namespace, offload: bool = False) -> Any:
    """experts4bit-qlora, as its own trainer sets it up."""
    from experts4bit_qlora import load_moe_4bit_streaming
    from experts4bit_qlora.engines.fast import enable_fast_train
    from experts4bit_qlora.lora import add_attention_lora, trainable_lora_param_ids

    model, _ = load_moe_4bit_streaming(
        checkpoint(args), DEVICE, torch.bfloat16, r=16, alpha=32, offload=offload
    )
    if not offload:
        model.to(DEVICE)
    add_attention_lora(model, 16, 32, torch.bfloat16)
    expert, attention = trainable_lora_param_ids(model)
    for p in model.parameters():
        p.requires_grad_(id(p) in expert | attention)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(ON_DEVICE)
    count = enable_fast_train(model, dgrad=True, absmax_dq=False if offload else None)
    assert count == args.layers, f"{count} layers on its fast path"
    model.enable_input_require_grads()
    return model


def experts4bit_offloaded(args: argparse.Namespace) -> Any:
    """The same, all experts in the host's memory."""
    model = experts4bit(args, offload=True)
    model.hf_device_map = {"": 0, "experts": "cpu"}  # accelerate moves no such model
    return model


def unsloth_(args: argparse.Namespace) -> Any:
    """Unsloth, in 4 bits if it takes that."""
    how = {"max_seq_length": SEQUENCE, "dtype": torch.bfloat16}
    model, _ = unsloth.FastModel.from_pretrained(checkpoint(args), load_in_4bit=True, **how)
    return unsloth.FastModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        target_modules=[*LORA["target_modules"], "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=True,
    )


CONTENDERS = {
    "fusion_moe": ours,
    "offloaded": offloaded,
    "lean": lean,
    "torch": grouped_mm,
    "bitsandbytes": bitsandbytes,
    "bitsandbytes-attention": bitsandbytes_attention,
    "experts4bit": experts4bit,
    "experts4bit-offloaded": experts4bit_offloaded,
    "unsloth": unsloth_,
    "offloaded-fp16": offloaded_fp16,
}
LIKE_ITS_OWN = {"experts4bit", "experts4bit-offloaded"}  # no autocast, not moved
ROW = "{:<24} {:>8} {:>12} {:>8}   {}"


# Measuring ----------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, name: str, turn: Callable[[], None] = lambda: None) -> None:
    """Prints a line for each number of tokens. turn: waits for it, when all is prepared."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    blocks = {n: blocks_of(tokenizer, DOCS, n) for n in {min(n, SEQUENCE) for n in args.tokens}}
    model = CONTENDERS[name](args)
    prepare(args, name, model, blocks)
    turn()
    for tokens in args.tokens:
        trainer = trainer_of(args, name, model, tokens, blocks)
        trainer.add_callback(clock := Clock())
        trainer.train()
        losses, rate = losses_of(trainer), tokens / clock.seconds()
        numbers = f"{tokens:,}", f"{rate:,.0f}", f"{peak_bytes() / 1e9:.2f}"
        print(ROW.format(name, *numbers, " ".join(f"{x:.5f}" for x in losses)), flush=True)
        found = {"tokens": tokens, "tokens/s": rate, "GB": peak_bytes() / 1e9, "losses": losses}
        (args.out / f"{name}-{tokens}.json").write_text(json.dumps(found))


def prepare(args: argparse.Namespace, name: str, model: Any, blocks: dict[int, Blocks]) -> None:
    """A step of each size, which compiles what there is to compile, and is undone."""
    trained = {p: p.detach().clone() for p in model.parameters() if p.requires_grad}
    for tokens in args.tokens:
        trainer_of(args, name, model, tokens, blocks, max_steps=1).train()
    with torch.no_grad():
        for p, before in trained.items():
            p.copy_(before)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def trainer_of(
    args: argparse.Namespace,
    name: str,
    model: Any,
    tokens: int,
    blocks: dict[int, Blocks],
    **more: Any,
) -> Trainer:
    """transformers', as it is, or TRL's."""
    length, fp16 = min(tokens, SEQUENCE), name.endswith("fp16")
    usual: dict[str, Any] = {
        "output_dir": str(args.out / name),
        "max_steps": WARM + STEPS,
        "per_device_train_batch_size": tokens // length,
        "learning_rate": 5e-4,
        "bf16": not fp16 and name not in LIKE_ITS_OWN,
        "fp16": fp16,
        "use_cpu": DEVICE == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | more
    if name == "lean":
        return _lean_trainer(model, usual, blocks[length])
    kind = InPlace if name in LIKE_ITS_OWN else TrainingArguments
    return Trainer(model, kind(label_names=["labels"], **usual), train_dataset=blocks[length])


def _lean_trainer(model: Any, usual: dict[str, Any], blocks: Blocks) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    how = SFTConfig(
        optim="adamw_bnb_8bit",
        activation_offloading=DEVICE == "cuda",  # TRL does it on accelerators alone
        gradient_checkpointing_kwargs=ON_DEVICE,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=SEQUENCE,
        **usual,
    )
    data = Dataset.from_list([{k: t.tolist() for k, t in block.items()} for block in blocks])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return SFTTrainer(model, how, train_dataset=data, processing_class=tokenizer)


def main() -> None:
    """Runs each contender in a process, or the one of --child in this one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--config", choices=SIZES, default="qwen3-30b", help="sizes (default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=[16384, 4096], help="of a step")
    add("--vocabulary", type=int, help="of the model (default: the small model's)")
    add("--resident", type=float, default=0.1, help="share of experts that stay on the device")
    add("--only", choices=CONTENDERS, nargs="+", default=[*CONTENDERS], help="(default: all)")
    add("--limit", type=float, default=300, help="seconds to get ready, and for rows of one")
    add("--out", type=Path, help="directory to write; a temporary one without it")
    add("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out or Path(tempfile.mkdtemp(prefix="finetune_peers_"))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        measure(args, args.child, ready)
        return
    print(ROW.format("", "tokens", "tokens/s", "GB", "losses"), flush=True)
    call = [sys.executable, "-u", __file__, *sys.argv[1:], "--out", str(args.out), "--child"]
    for name, problem in in_turns({n: [*call, n] for n in args.only}, args.out, args.limit):
        said = (args.out / f"{name}.log").read_text(errors="replace").splitlines()
        rows = [line for line in said if line.startswith(f"{name:<24} ")]
        rows += [f"{name:<24} {problem}"] if problem else []
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
