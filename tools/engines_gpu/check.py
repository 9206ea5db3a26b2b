"""A call of each of vLLM's libraries and of its attention on a GPU, beside torch's answer:
seconds, where an engine takes a minute to die of a library that was left out or cut short.

    python tools/engines_gpu/check.py

A line for each; exits with 1 if one failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.vllm_flash_attn import flash_attn_varlen_func

Pair = tuple[Tensor, Tensor]  # what vLLM says, and torch


def norm(device: str) -> Pair:
    """Of `_C`."""
    x = torch.randn(5, 256, device=device, dtype=torch.bfloat16)
    y, weight = torch.empty_like(x), torch.ones(256, device=device, dtype=torch.bfloat16)
    ops.rms_norm(y, x, weight, 1e-6)
    return y, F.rms_norm(x, (256,), weight, 1e-6)


def topk(device: str) -> Pair:
    """Of `_moe_C`."""
    logits = torch.randn(5, 128, device=device)
    weights = torch.empty(5, 8, device=device)
    ids, rows = (torch.empty(5, 8, device=device, dtype=torch.int32) for _ in range(2))
    ops.topk_softmax(weights, ids, rows, logits)
    return weights, logits.softmax(-1).topk(8).values


def _prompt(device: str) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Of one prompt: q, and keys and values in a cache that `_C` has written; what both kinds of
    attention take of it, by the same names; what torch says.
    """
    tokens, heads, few, wide, block = 40, 8, 2, 128, 16
    q, k, v = (
        torch.randn(tokens, n, wide, device=device, dtype=torch.bfloat16) for n in (heads, few, few)
    )
    blocks = -(-tokens // block)
    keys, values = (
        torch.zeros(blocks, block, few, wide, device=device).bfloat16() for _ in range(2)
    )
    one = torch.ones((), device=device)
    slots = torch.arange(tokens, device=device)
    ops.reshape_and_cache_flash(k, v, keys, values, slots, "auto", one, one)
    given = {
        "cu_seqlens_q": torch.tensor([0, tokens], device=device, dtype=torch.int32),
        "max_seqlen_q": tokens,
        "seqused_k": torch.tensor([tokens], device=device, dtype=torch.int32),
        "max_seqlen_k": tokens,
        "softmax_scale": wide**-0.5,
        "causal": True,
        "block_table": torch.arange(blocks, device=device, dtype=torch.int32)[None],
    }
    want = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return [q, keys, values], given, want[0].transpose(0, 1)


def triton(device: str) -> Pair:
    """vLLM's attention in Triton."""
    (q, keys, values), given, want = _prompt(device)
    y = torch.empty_like(q)
    unified_attention(
        q=q,
        k=keys,
        v=values,
        out=y,
        window_size=(-1, -1),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        **given,
    )
    return y, want


def flash(device: str) -> Pair:
    """FlashAttention 3, of `_vllm_fa3_C`; a prompt, and the last token of it."""
    (q, keys, values), given, want = _prompt(device)
    y = flash_attn_varlen_func(q=q, k=keys, v=values, fa_version=3, **given)
    last = {"cu_seqlens_q": torch.tensor([0, 1], device=device, dtype=torch.int32)}
    given |= last | {"max_seqlen_q": 1}
    token = flash_attn_varlen_func(q=q[-1:], k=keys, v=values, fa_version=3, **given)
    return torch.cat([y, token]), torch.cat([want, want[-1:]])


CALLS: tuple[Callable[[str], Pair], ...] = norm, topk, triton, flash


def main() -> int:
    """0 if all are close to torch's."""
    failed = 0
    for call in CALLS:
        begun = time.perf_counter()
        try:
            y, want = call("cuda")
            apart = (y.float() - want.float()).abs().max().item()
            result = f"{apart:.1e} apart"
            failed += not apart < 0.05
        except Exception as error:  # the others are to be seen, too
            result, failed = f"{type(error).__name__}: {error}", failed + 1
        print(f"{call.__name__:10} {time.perf_counter() - begun:5.1f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
