"""Rollouts of a small real model by itself, and everything in it that is not ours a row at a time:
then only experts see how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

import fusion_moe

TINY = Path(__file__).resolve().parents[3] / "examples/tiny_qwen3_moe"
_linear = nn.functional.linear


def _by_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, 1, x.shape[-1])
    return torch.cat([_linear(row, weight, bias) for row in rows]).view(*x.shape[:-1], -1)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Of each query, with the keys that it sees and no others."""
    groups = module.num_key_value_groups
    found = []
    for b in range(len(q)):
        for i in range(q.shape[2]):
            seen = mask[b, 0, i] == 0
            keys, values = (t[b, :, seen].repeat_interleave(groups, 0) for t in (k, v))
            found.append(((q[b, :, i, None] @ keys.mT) * scaling).softmax(-1) @ values)
    return torch.stack(found).view(len(q), q.shape[2], q.shape[1], -1), None


AttentionInterface.register("by_row", _attention)
AttentionMaskInterface.register("by_row", eager_mask)


@contextmanager
def others_by_row() -> Iterator[None]:
    """Linear layers and routers take one row after the other."""
    nn.functional.linear = _by_row
    try:
        yield
    finally:
        nn.functional.linear = _linear


def small_model() -> Any:
    """The small real Qwen3-MoE, in float32, with experts in NVFP4."""
    model = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="by_row"
    )
    fusion_moe.quantize_(model)
    return model


def padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """ids i64[B, P], padded on the left, and their mask."""
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(p)) + list(p) for p in prompts])
    return ids, torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts])


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def of_chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of ids, [..., V] and [...] -> [...]."""
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


@torch.no_grad()
def roll_out(model: Any, prompts: Sequence[Sequence[int]], count: int) -> tuple[Tensor, Tensor]:
    """`count` sampled tokens of each prompt, with a cache of keys and values: all prompts at once,
    then a token of each at a time -> ids i64[B, count], log-probabilities f32[B, count].
    """
    ids, mask = padded(prompts)
    cache, chosen, logps = None, [], []
    for _ in range(count):
        where = positions(mask)[:, -ids.shape[1] :]
        out = model(
            ids, attention_mask=mask, position_ids=where, past_key_values=cache, use_cache=True
        )
        logits, cache = out.logits[:, -1], out.past_key_values
        ids = torch.multinomial(logits.softmax(-1), 1)
        chosen.append(ids[:, 0]), logps.append(of_chosen(logits, ids[:, 0]))
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(chosen, 1), torch.stack(logps, 1)


def trained(model: Any, ids: Tensor, mask: Tensor, count: int) -> Tensor:
    """The log-probabilities of the last `count` tokens, in one forward of whole sequences."""
    out = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
    return of_chosen(out.logits[:, -count - 1 : -1], ids[:, -count:])
