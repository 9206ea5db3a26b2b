"""Train the tiny Qwen3-MoE language model of `examples/tiny_qwen3_moe` on the Python standard
library's sources.

The model is transformers' own `Qwen3MoeForCausalLM` (7.6 million parameters, 16 experts, top-4).
Without options it is trained on the standard library of the running interpreter; `--stdlib DIR DIR
...` uses the given folders, and the held-out text is then taken from the first one. A file's split
depends only on a hash of its name, so a file keeps its split when another version changes it or
moves it to another folder.

    python examples/train_tiny_qwen3_moe.py --out /tmp/tiny

The defaults are the settings of the committed model and take three minutes on an H200. A run is
limited by time, so a slower device takes fewer steps unless `--minutes` gives it more time; with
only `--steps` it is limited by steps.

Experts are computed as one wide layer, the fastest way for a model this small. `--experts` selects
one of transformers' implementations instead, to compare them: eager, grouped_mm, or fusion_moe,
which is this library.

The folder gets the checkpoint with the best validation loss, its tokenizer, `curve.csv` and
`heldout.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import sysconfig
import tempfile
import time
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from heldout import CONTEXT, bits_per_byte_and_perplexity, load_heldout
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
# A word keeps the blank before it, punctuation the newlines after it; an indentation and a digit
# are tokens of their own.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+\n*|\n+|[^\S\n]+"
# Installed packages are not the standard library, and the codec tables are near copies of each
# other.
SKIPPED_FOLDERS = {"site-packages", "encodings", "__pycache__"}
SMALLEST_FILE = 256  # bytes; most shorter files are empty, or the same few lines
# a training file with a larger share of its long lines in held-out text is left out
COPIED_SHARE = 0.3
LONG_LINE = 30
WIDE = "wide"


@dataclass
class Corpus:
    """Texts of the three splits, and the held-out files' paths."""

    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)
    heldout_paths: list[str] = field(default_factory=list)


def split_of(name: str) -> str:
    """Choose a file's split by a hash of its name."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50
    return {0: "heldout", 1: "validation"}.get(bucket, "train")


def read_sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path in `folder`, text) of the Python files that are valid UTF-8."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if SKIPPED_FOLDERS.intersection(inside.parts) or path.stat().st_size < SMALLEST_FILE:
            continue
        try:
            yield inside, path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # the tests hold files in other encodings on purpose


def long_lines(text: str) -> list[str]:
    """Return the lines long enough that an equal line elsewhere is probably a copy."""
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE]


def without_copies(texts: Iterable[str], kept_out: Iterable[str]) -> list[str]:
    """Drop the texts that share more than `COPIED_SHARE` of their long lines with the texts that
    are kept out.
    """
    secret = {line for text in kept_out for line in long_lines(text)}
    kept = []
    for text in texts:
        lines = long_lines(text)
        if sum(line in secret for line in lines) <= COPIED_SHARE * len(lines):
            kept.append(text)
    return kept


def load_corpus(folders: list[Path]) -> Corpus:
    """Read and split the sources; of equal texts one is kept, and held-out and validation texts are
    those of the first folder.
    """
    corpus = Corpus()
    seen: set[str] = set()
    for folder in folders:
        for path, text in read_sources(folder):
            split = split_of(path.name)
            if text in seen or (split != "train" and folder != folders[0]):
                continue
            seen.add(text)
            getattr(corpus, split).append(text)
            if split == "heldout":
                corpus.heldout_paths.append(path.as_posix())
    if not (corpus.train and corpus.validation and corpus.heldout):
        raise SystemExit(f"{folders[0]} holds too few Python files for the three splits")
    before = len(corpus.train)
    corpus.train = without_copies(corpus.train, corpus.heldout + corpus.validation)
    print(f"{before - len(corpus.train)} training files left out as near copies")
    for split in ("train", "validation", "heldout"):
        texts = getattr(corpus, split)
        print(f"{split}: {len(texts)} files, {sum(len(text.encode()) for text in texts)} bytes")
    return corpus


def write_heldout(corpus: Corpus, path: Path) -> None:
    """Write the held-out files, one JSON object a line."""
    with path.open("w", encoding="utf-8") as lines:
        for name, text in zip(corpus.heldout_paths, corpus.heldout, strict=True):
            lines.write(json.dumps({"path": name, "text": text}, ensure_ascii=False) + "\n")


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE vocabulary; every byte is a token, so any text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return all texts as one row of tokens, an end-of-text token before each."""
    rows = []
    # some at a time: the batch encoding holds much more than the tokens
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 512]):
            rows.append(torch.tensor([tokenizer.eos_token_id, *encoding.ids], dtype=torch.int16))
    return torch.cat(rows)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Return the model's shape; hidden and expert sizes are multiples of 128."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,  # for a dense layer; there is none
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.01,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def wide_experts(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute all experts as one wide layer, with weight 0 for those a token did not choose.

    The result is the same as the experts' own forward. It costs four times the arithmetic, but
    takes two large matrix products instead of sorting and gathering tokens, which for a model this
    small is much faster on a GPU.
    """
    experts, double, width = self.gate_up_proj.shape
    routing = hidden.new_zeros(hidden.shape[0], experts).scatter(
        1, chosen, weights.to(hidden.dtype)
    )
    gate, up = (
        F.linear(hidden, self.gate_up_proj.reshape(experts * double, width))
        .unflatten(-1, (experts, 2, -1))
        .unbind(2)
    )
    inner = (F.silu(gate) * up * routing[..., None]).flatten(1)
    return F.linear(inner, self.down_proj.transpose(1, 2).reshape(-1, width).t())


def use_experts(model: Qwen3MoeForCausalLM, experts: str) -> None:
    """Compute the experts as a wide layer, or by one of the implementations that transformers
    knows.
    """
    if experts == "fusion_moe":
        import fusion_moe.transformers  # noqa: F401  registers it
    if experts != WIDE:
        model.set_experts_implementation(experts)
        return
    for layer in model.model.layers:
        layer.mlp.experts.forward = types.MethodType(wide_experts, layer.mlp.experts)


def use_dropout(model: Qwen3MoeForCausalLM, dropout: float) -> None:
    """Apply dropout to what the embedding, attention and experts add to the residual."""

    def drop(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return F.dropout(output[0], dropout, module.training), *output[1:]
        return F.dropout(output, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def balance_loss(router_logits: Iterable[Tensor], top_k: int) -> Tensor:
    """Return the mean over layers of the load balancing loss of Switch Transformers; 1 means even
    load.

    transformers' own sums the load over the layers first, which lets one layer's imbalance hide
    another's.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        load = (
            torch.zeros_like(probabilities)
            .scatter(1, probabilities.topk(top_k, -1).indices, 1.0 / top_k)
            .mean(0)
        )
        losses.append(probabilities.shape[-1] * (load * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW that decays matrices, but not the norms' gains."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def rate_at(progress: float, peak: float) -> float:
    """Return the learning rate after the given share of the training: a short warm-up, then a
    cosine to zero.
    """
    warm_up = 0.03
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1.0 - warm_up))))


def sample_batch(tokens: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Return random windows of `tokens` as inputs and targets."""
    starts = torch.randint(len(tokens) - context, (batch, 1), device=tokens.device)
    windows = tokens[starts + torch.arange(context + 1, device=tokens.device)].long()
    return windows[:, :-1], windows[:, 1:]


def save_checkpoint(model: Qwen3MoeForCausalLM, out: Path) -> None:
    """Save the weights in bfloat16, replacing each file atomically, so a stop in between never
    leaves half a file.
    """
    copy = Qwen3MoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=out) as folder:
        copy.to(torch.bfloat16).save_pretrained(folder)
        for path in Path(folder).iterdir():
            path.replace(out / path.name)


def precision(device: str) -> AbstractContextManager[Any]:
    """Return the context for training: bfloat16 matrix products, float32 weights."""
    return torch.autocast(device, dtype=torch.bfloat16)


def train_step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Take one optimizer step and return the language modelling loss."""
    with precision(inputs.device.type):
        output = model(input_ids=inputs, use_cache=False, output_router_logits=True)
        balance = balance_loss(output.router_logits, model.config.num_experts_per_tok)
    loss = F.cross_entropy(output.logits.float().flatten(0, 1), targets.flatten())
    (loss + model.config.router_aux_loss_coef * balance).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@dataclass
class Curve:
    """Writes the training curve to a file and the terminal."""

    path: Path
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Start the file."""
        self.path.write_text("step,tokens,train_loss,val_bits_per_byte,learning_rate,seconds\n")

    def seconds(self) -> float:
        """Return how long the training has run."""
        return time.monotonic() - self.start

    def add(
        self, step: int, tokens: int, loss: float, bits: float, rate: float, progress: float
    ) -> None:
        """Add one line."""
        seconds = self.seconds()
        with self.path.open("a") as file:
            file.write(f"{step},{tokens},{loss:.4f},{bits:.4f},{rate:.2e},{seconds:.1f}\n")
        print(
            f"step {step}  loss {loss:.4f}  validation {bits:.4f} bits/byte  "
            f"{tokens / seconds:.0f} tokens/s"
            f"  {seconds:.0f} s done, {max(0.0, seconds / progress - seconds):.0f} s left",
            flush=True,
        )


def validate(model: Qwen3MoeForCausalLM, tokenizer: Any, texts: list[str], context: int) -> float:
    """Return the bits per byte of the validation texts."""
    model.eval()
    with precision(model.device.type):
        bits, _ = bits_per_byte_and_perplexity(model, tokenizer, texts, context)
    model.train()
    return bits


def train(
    model: Qwen3MoeForCausalLM,
    tokenizer: Any,
    tokens: Tensor,
    validation: list[str],
    args: argparse.Namespace,
) -> None:
    """Train until the time or the steps run out; save whenever the validation loss is the best so
    far.
    """
    use_experts(model, args.experts)
    use_dropout(model, args.dropout)
    optimizer = make_optimizer(model, args.weight_decay)
    curve = Curve(args.out / "curve.csv")
    losses: list[Tensor] = []
    best, step, progress, evaluations = math.inf, 0, 0.0, 0
    model.train()
    while progress < 1.0:
        rate = rate_at(progress, args.learning_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(train_step(model, optimizer, *sample_batch(tokens, args.batch, args.context)))
        step += 1
        if step % 10 == 0:
            # wait for the device: steps that are only queued have taken no time yet
            losses[-1].item()
        progress = max(curve.seconds() / (60 * args.minutes), step / args.steps)
        if progress < min(1.0, (evaluations + 1) / args.evaluations):
            continue
        evaluations = int(progress * args.evaluations)
        bits = validate(model, tokenizer, validation, args.context)
        curve.add(
            step,
            step * args.batch * args.context,
            torch.stack(losses).mean().item(),
            bits,
            rate,
            progress,
        )
        losses.clear()
        if bits < best:
            best = bits
            save_checkpoint(model, args.out)
    print(
        f"{step} steps, {step * args.batch * args.context / len(tokens):.1f} passes over the "
        "training text"
    )


def report(out: Path, device: str) -> None:
    """Print the saved checkpoint's results on the held-out text next to xz's."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = load_heldout(out / "heldout.jsonl")
    data = "".join(texts).encode()
    packed = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    bits, perplexity = bits_per_byte_and_perplexity(model, tokenizer, texts)
    print(f"held-out: {len(texts)} files, {len(data)} bytes")
    print(
        f"model: {bits:.4f} bits/byte, perplexity {perplexity:.3f} per token; xz -9e: "
        f"{8 * packed / len(data):.4f} bits/byte"
    )
    prompt = tokenizer(END_OF_TEXT + "def fibonacci(n):\n", return_tensors="pt").input_ids.to(
        device
    )
    print(tokenizer.decode(model.generate(prompt, max_new_tokens=64, do_sample=False)[0]))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the checkpoint; a new one in the temporary folder without it",
    )
    parser.add_argument(
        "--stdlib",
        type=Path,
        nargs="+",
        default=[Path(sysconfig.get_path("stdlib"))],
        help="folders of sources",
    )
    parser.add_argument(
        "--experts",
        choices=[WIDE, "eager", "grouped_mm", "fusion_moe"],
        default=WIDE,
        help="how experts are computed",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="time to train; the learning rate's schedule spans it; 2.7 without --steps",
    )
    parser.add_argument("--steps", type=int, help="stop after so many steps if that comes first")
    parser.add_argument("--batch", type=int, default=32, help="windows a step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens a window")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=2e-3,
        help="the largest of the schedule (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-decay", type=float, default=0.5, help="of AdamW (default: %(default)s)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="while it trains (default: %(default)s)"
    )
    parser.add_argument("--evaluations", type=int, default=20, help="validations in the whole run")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, batches and dropout (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="a GPU where there is one",
    )
    args = parser.parse_args()
    args.out = args.out or Path(tempfile.mkdtemp(prefix="tiny_qwen3_moe_"))
    if args.minutes is None:
        args.minutes = math.inf if args.steps else 2.7
    args.steps = args.steps or math.inf
    return args


def main() -> None:
    """Prepare the text, train, and report."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"writing to {args.out}")
    corpus = load_corpus(args.stdlib)
    write_heldout(corpus, args.out / "heldout.jsonl")
    tokenizer = train_tokenizer(corpus.train)
    tokenizer.save_pretrained(args.out)
    tokens = encode(tokenizer, corpus.train).to(args.device)
    print(f"{len(tokens)} training tokens", flush=True)
    model = Qwen3MoeForCausalLM(model_config(tokenizer)).to(args.device)
    train(model, tokenizer, tokens, corpus.validation, args)
    report(args.out, args.device)


if __name__ == "__main__":
    main()
