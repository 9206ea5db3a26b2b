"""Bits per byte and perplexity of a causal language model on the held-out text of
`examples/tiny_qwen3_moe`.

Every file is tokenized by itself, starts with the tokenizer's end-of-text token, and is read in
windows that overlap by half, so that every token is scored once and (except in the first window)
with at least half a window of context. Other examples import this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HELDOUT_FILE = Path(__file__).parent / "tiny_qwen3_moe" / "heldout.jsonl"
CONTEXT = 1024


def load_heldout(path: Path = HELDOUT_FILE, max_bytes: int | None = None) -> list[str]:
    """Return the held-out files' texts; with `max_bytes`, only the first files that fit in that
    many UTF-8 bytes.

    Raises:
            ValueError: not even the first file fits.
    """
    with path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    if max_bytes is None:
        return texts
    kept: list[str] = []
    room = max_bytes
    for text in texts:
        room -= len(text.encode())
        if room < 0:
            break
        kept.append(text)
    if not kept:
        raise ValueError(
            f"{max_bytes:,} bytes hold no file of the held-out text; expected at "
            f"least {len(texts[0].encode()):,}"
        )
    return kept


def split_windows(tokens: list[int], context: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (inputs, targets) windows of at most `context` tokens; targets that an earlier window
    scored are -100.
    """
    scored = 0  # how many of the targets tokens[1:] are scored so far
    for begin in range(0, len(tokens) - 1, context // 2):
        end = min(begin + context, len(tokens) - 1)
        yield tokens[begin:end], [-100] * (scored - begin) + tokens[scored + 1 : end + 1]
        scored = end
        if end == len(tokens) - 1:
            return


def bits_per_byte_and_perplexity(
    model: Any, tokenizer: Any, texts: list[str], context: int = CONTEXT, batch_size: int = 8
) -> tuple[float, float]:
    """Return (bits per UTF-8 byte, perplexity per token) of `texts` under `model`."""
    losses = torch.cat(losses_of_windows(model, tokenizer, texts, context, batch_size)).double()
    size = sum(len(text.encode()) for text in texts)
    return float(losses.sum()) / math.log(2) / size, math.exp(float(losses.mean()))


@torch.inference_mode()
def losses_of_windows(
    model: Any, tokenizer: Any, texts: list[str], context: int = CONTEXT, batch_size: int = 8
) -> list[torch.Tensor]:
    """Return the loss of every token in nats, f32 [scored], for each window of `texts`."""
    windows = [
        window
        for text in texts
        for window in split_windows([tokenizer.eos_token_id, *tokenizer(text).input_ids], context)
    ]
    windows.sort(key=lambda window: len(window[0]))  # equal lengths share a batch: little padding
    found = []
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        width = len(batch[-1][0])
        # The padding follows the text, so a causal model needs no mask for it.
        inputs = torch.tensor(
            [ids + [tokenizer.eos_token_id] * (width - len(ids)) for ids, _ in batch]
        )
        targets = torch.tensor([ids + [-100] * (width - len(ids)) for _, ids in batch]).to(
            model.device
        )
        logits = model(input_ids=inputs.to(model.device), use_cache=False).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        found += [row[scored].cpu() for row, scored in zip(losses, targets != -100, strict=True)]
    return found
