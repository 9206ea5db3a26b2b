"""The factors of experts as PEFT stores them: two matrices for all E experts of rank r.

    lora_A [E * r, K]    the r rows of one expert after those of the other
    lora_B [N, r * E]    of one r the columns of all experts, then of the next

Source: peft.tuners.lora.layer.ParamWrapper.get_delta_weight (0.21).

>>> import torch
>>> a = torch.arange(4.0).view(2, 2, 1)  # two experts of rank 2, K = N = 1
>>> b = torch.arange(4.0).view(2, 1, 2)
>>> [t.tolist() for t in to_peft(a, b)]
[[[0.0], [1.0], [2.0], [3.0]], [[0.0, 2.0, 1.0, 3.0]]]
>>> lora_a, lora_b = to_peft(a, b)
>>> torch.equal(a_from_peft(lora_a, 2), a), torch.equal(b_from_peft(lora_b, 2), b)
(True, True)
"""

from __future__ import annotations

from torch import Tensor


def to_peft(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A [E, r, K], B [E, N, r] -> lora_A [E * r, K], lora_B [N, r * E]"""
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def a_from_peft(a: Tensor, experts: int) -> Tensor:
    """lora_A [E * r, K] -> A [E, r, K]"""
    return a.unflatten(0, (experts, -1))


def b_from_peft(b: Tensor, experts: int) -> Tensor:
    """lora_B [N, r * E] -> B [E, N, r]"""
    return b.unflatten(1, (-1, experts)).permute(2, 0, 1).contiguous()


def peft_shapes(experts: int, n: int, k: int, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the results of `to_peft`."""
    return (experts * rank, k), (n, rank * experts)
