"""The factors of experts as PEFT stores them: two matrices for all E experts of rank r.

    lora_A [E * r, K]    the r rows of one expert after those of the other
    lora_B [N, r * E]    of one r the columns of all experts, then of the next

Of a weight that a module in floats has as [E, K, N], without the attribute `is_transposed` by which
PEFT would know, PEFT takes columns for rows. These are *turned*: lora_A has B's numbers, and lora_B
those of A.

Source: peft.tuners.lora.layer.ParamWrapper.get_delta_weight (0.21).

>>> import torch
>>> a = torch.arange(4.0).view(2, 2, 1)  # two experts of rank 2, K = N = 1
>>> b = torch.arange(4.0).view(2, 1, 2)
>>> [t.tolist() for t in to_peft(a, b)]
[[[0.0], [1.0], [2.0], [3.0]], [[0.0, 2.0, 1.0, 3.0]]]
>>> lora_a, lora_b = to_peft(a, b)
>>> of_peft = lora_a, lora_b, 2
>>> torch.equal(a_from_peft(*of_peft), a), torch.equal(b_from_peft(*of_peft), b)
(True, True)
>>> of_peft = *to_peft(a, b, turned=True), 2, True
>>> torch.equal(a_from_peft(*of_peft), a), torch.equal(b_from_peft(*of_peft), b)
(True, True)
"""

from __future__ import annotations

from torch import Tensor


def to_peft(a: Tensor, b: Tensor, turned: bool = False) -> tuple[Tensor, Tensor]:
    """A [E, r, K], B [E, N, r] -> lora_A [E * r, K], lora_B [N, r * E]; turned: lora_A [E * r, N],
    lora_B [K, r * E].
    """
    if turned:
        a, b = b.mT, a.mT
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def a_from_peft(lora_a: Tensor, lora_b: Tensor, experts: int, turned: bool = False) -> Tensor:
    """-> A [E, r, K]"""
    return _columns(lora_b, experts).mT.contiguous() if turned else _rows(lora_a, experts)


def b_from_peft(lora_a: Tensor, lora_b: Tensor, experts: int, turned: bool = False) -> Tensor:
    """-> B [E, N, r]"""
    return (_rows(lora_a, experts).mT if turned else _columns(lora_b, experts)).contiguous()


def _rows(lora_a: Tensor, experts: int) -> Tensor:
    return lora_a.unflatten(0, (experts, -1))


def _columns(lora_b: Tensor, experts: int) -> Tensor:
    return lora_b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def peft_shapes(
    experts: int, n: int, k: int, rank: int, turned: bool = False
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the results of `to_peft`."""
    n, k = (k, n) if turned else (n, k)
    return (experts * rank, k), (n, rank * experts)
