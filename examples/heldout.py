"""Bits per byte and perplexity of a causal language model on the held-out text of
`examples/tiny_qwen3_moe`. Other examples import this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fusion_moe.integrations.transformers.evaluation import CONTEXT, evaluate

HELDOUT_FILE = Path(__file__).parent / "tiny_qwen3_moe" / "heldout.jsonl"


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


def bits_per_byte_and_perplexity(
    model: Any, tokenizer: Any, texts: list[str], context: int = CONTEXT
) -> tuple[float, float]:
    """Return (bits per UTF-8 byte, perplexity per token) of `texts` under `model`."""
    found = evaluate(model, tokenizer, texts, context=context)
    return found.bits_per_byte, found.perplexity
