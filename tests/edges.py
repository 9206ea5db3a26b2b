"""Small functions around our operations at the edges of what fusions hold: one row, ends that two
tensors share, biases made on the way, masks, numbers that a dtype rounds. Each is run in eager and
compiled, on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

O = torch.ops.fusion_moe
N = 16  # features, in and out


@dataclass(frozen=True)
class Edge:
    """f(*inputs); `wrong` where eager raises GroupsError, which compiled must too."""

    f: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]
    wrong: bool = False


def weight(seed: int, n: int = N) -> list[Tensor]:
    """An NVFP4 weight of two groups, [n, N] each."""
    return list(
        O.nvfp4_quantize(torch.randn(2, n, N, generator=torch.Generator().manual_seed(seed)))
    )


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(m: int, seed: int = 7) -> Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(seed))


def in_bf16(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same with activations and biases of bf16, for which GPUs have kernels."""
    return [t.bfloat16() if t.dtype == torch.float32 and t.shape[-1] == N else t for t in inputs]


def product(x: Tensor, offs: Tensor, *w: Tensor) -> Tensor:
    return O.nvfp4_grouped_mm(x, *w, offs)


def _shared_ends(x: Tensor, y: Tensor, offs: Tensor, *w: Tensor) -> Tensor:
    return product(product(x, offs, *w[:3])[: len(y)] + y, offs, *w[3:])


def _other_ends(x: Tensor, bias: Tensor, offs: Tensor, others: Tensor, *w: Tensor) -> Tensor:
    return O.group_add(product(x, offs, *w), bias, others)


def _masks(x: Tensor, offs: Tensor, *w: Tensor) -> Tensor:
    mask = product(x, offs, *w) > 0
    found = [mask < 2, mask == 2, mask > -1, torch.minimum(mask, x > 0), torch.maximum(mask, x > 0)]
    return torch.stack([m.float() for m in found])


def _integers(x: Tensor, offs: Tensor, codes: Tensor, *w: Tensor) -> Tensor:
    y = product(x, offs, *w)
    found = [
        codes > -1,
        codes != -3,
        codes.long() - 300 < -(2**40),
        torch.where(y > 0, codes.int(), -2) * -3 > 4,
        codes * True == 3,
    ]
    return torch.stack([m.float() for m in found])


def _rounded_numbers(x: Tensor, offs: Tensor, *w: Tensor) -> Tensor:
    y = product(x, offs, *w) + x  # the weights are zero
    return torch.stack([y > 0.1, y >= 0.1, y == 0.1, y != 0.3, y < 0.3, y <= 0.3]).float()


def _near_a_tenth(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.1, 0.3, -0.1, 0.2] * 2 * N, dtype=dtype).reshape(8, N)


def _two() -> list[Tensor]:
    return [*weight(0), *weight(1)]


def _zero() -> list[Tensor]:
    return list(O.nvfp4_quantize(torch.zeros(2, N, N)))


def _experts() -> list[Tensor]:
    return [
        torch.tensor([[1, 0]]),
        torch.tensor([[0.75, 0.25]]),
        *weight(0),
        *weight(1, 2 * N),
        *weight(2),
    ]


EDGES = {
    "one row": Edge(
        lambda x, offs, *w: product(product(x, offs, *w[:3])[None] + 1, offs, *w[3:]),
        lambda: [rows(1), ends(0, 1), *_two()],
    ),
    "one row, expanded": Edge(
        lambda x, offs, *w: product(x, offs, *w)[None, None].expand(2, -1, -1, -1).sum(0) + 1,
        lambda: [rows(1), ends(0, 1), *weight(0)],
    ),
    "one row of experts": Edge(
        lambda x, offs, ids, scores, *w: O.expert_mlp(
            product(x, offs, *w[:3])[None].reshape(1, N), ids, scores, *w[3:]
        ),
        lambda: [rows(1), ends(0, 1), *_experts()],
    ),
    "ends of another tensor's rows": Edge(
        _shared_ends, lambda: [rows(8), rows(5), ends(4, 8), *_two()], wrong=True
    ),
    "ends of fewer rows": Edge(_shared_ends, lambda: [rows(8), rows(5), ends(2, 4), *_two()]),
    "a bias by other ends": Edge(
        _other_ends, lambda: [rows(6), rows(2, 1), ends(3, 6), ends(1, 6), *weight(0)]
    ),
    "a bias that ends early": Edge(
        _other_ends, lambda: [rows(6), rows(2, 1), ends(3, 6), ends(1, 4), *weight(0)]
    ),
    "a bias of more groups": Edge(
        _other_ends, lambda: [rows(6), rows(3, 1), ends(3, 6), ends(1, 4, 5), *weight(0)]
    ),
    "a bias made on the way": Edge(
        lambda x, bias, offs, *w: O.group_add(product(x, offs, *w), (bias * 2).to(x.dtype), offs),
        lambda: [rows(6), rows(2, 1).bfloat16(), ends(3, 6), *weight(0)],
    ),
    "a constant bias": Edge(
        lambda x, offs, *w: O.group_add(
            product(x, offs, *w), torch.ones(2, N, dtype=x.dtype, device=x.device), offs
        ),
        lambda: [rows(6), ends(3, 5), *weight(0)],
    ),
    "a bias before the product": Edge(
        lambda x, bias, offs, *w: product(
            O.group_add(x.float(), bias.float(), offs).to(x.dtype), offs, *w
        ),
        lambda: [rows(6).bfloat16(), rows(2, 1).bfloat16(), ends(3, 5), *weight(0)],
    ),
    "constant rows": Edge(
        lambda offs, *w: product(torch.full((6, N), 2.0, device=offs.device), offs, *w) + 1,
        lambda: [ends(3, 5), *weight(0)],
    ),
    "one token of a sum": Edge(
        lambda x, offs, slots, scores, *w: O.combine(product(x, offs, *w), slots, scores)[
            1:2
        ].relu(),
        lambda: [
            rows(4),
            ends(1, 4),
            torch.tensor([[3, 0], [1, 2]]).int(),
            torch.rand(2, 2),
            *weight(0),
        ],
    ),
    "masks": Edge(_masks, lambda: [rows(6), ends(3, 6), *weight(0)]),
    "integers": Edge(
        _integers,
        lambda: [rows(6), ends(3, 6), torch.arange(6 * N).reshape(6, N).byte(), *weight(0)],
    ),
    "numbers rounded to bf16": Edge(
        _rounded_numbers, lambda: [_near_a_tenth(torch.bfloat16), ends(3, 8), *_zero()]
    ),
    "numbers rounded to f16": Edge(
        _rounded_numbers, lambda: [_near_a_tenth(torch.float16), ends(3, 8), *_zero()]
    ),
}
