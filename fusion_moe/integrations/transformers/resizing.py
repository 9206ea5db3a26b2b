"""`resize_token_embeddings` of a model whose head has encoded weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...encodings import Quantized, dequantize, quantize
from ...nn import QuantizedLinear


def resized(
    resize: Callable[..., Any],
    self: Any,
    old_lm_head: nn.Module,
    new_num_tokens: int | None = None,
    *args: Any,
    **kw: Any,
) -> Any:
    """Decodes an encoded head, resizes it as any other, and encodes it again."""
    if not isinstance(old_lm_head, QuantizedLinear) or new_num_tokens is None:
        return resize(self, old_lm_head, new_num_tokens, *args, **kw)
    weight, old = old_lm_head.weight_of("weight"), old_lm_head
    kept = weight.of(old.forms["weight"].unpack(weight))
    numbers = nn.Linear(old.in_features, old.out_features, old.bias is not None, device="meta")
    numbers.weight = nn.Parameter(dequantize(kept))
    if old.bias is not None:
        numbers.bias = nn.Parameter(old.bias.detach().float())
    head = resize(self, numbers, new_num_tokens, *args, **kw)
    bias = None if old.bias is None else head.bias.to(old.bias.dtype)
    return QuantizedLinear(_encoded(head.weight.detach(), kept), bias)


def _encoded(x: Tensor, kept: Quantized) -> Quantized:
    """x f32 [N, K] in the encoding of the first rows, which keep their bits and their scale of the
    matrix, unless rows share scales of blocks.
    """
    scale = next((t for part, t in kept.named() if part.of_matrix), None)
    resized = quantize(x, kept.encoding, scale)
    parts = [
        (old, new)
        for (part, old), new in zip(kept.named(), resized, strict=True)
        if not part.of_matrix
    ]
    if all(len(new) == len(x) for _, new in parts):
        for old, new in parts:
            n = min(len(old), len(new))
            new[:n] = old[:n]
    return resized
