"""Sums of very many numbers of one sign, in which one float32 accumulator loses digits, and in the
end stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion

KINDS = ("rows of a group", "rows", "columns", "columns, some of them")


def sum_of(kind: str, n: int) -> tuple[Fusion, tuple[int, ...], int]:
    """A sum of n numbers in each element of its result; the shape of its operand, and along which
    axis it sums.
    """
    fd = FusionDefinition()
    of_rows = "rows" in kind
    x = fd.define_tensor(
        shape=[-1, 4] if of_rows else [2, -1] if "some" in kind else [2, n], dtype="f32"
    )
    if "group" in kind:
        rows = x.type.shape[0]
        ends = fd.groups_of(fd.define_tensor(shape=[1], dtype="i32"), rows)
        fd.add_output(fd.ops.group_sum(fd.ops.partition(x, ends), ends))
    elif "some" in kind:  # read with a branch, which is no vector code
        y = fd.ops.cat(x, fd.define_tensor(shape=[2, 1], dtype="f32"), dim=1)
        fd.add_output(fd.ops.sum(y, dims=[1], keepdim=False))
    else:
        fd.add_output(fd.ops.sum(x, dims=[0 if of_rows else 1], keepdim=False))
    return fd.fusion(), (n, 4) if of_rows else (2, n), 0 if of_rows else 1


def inputs_of(kind: str, x: Tensor) -> list[Tensor]:
    """The inputs of `sum_of` for the operand x."""
    more = {
        "rows of a group": torch.tensor([len(x)]).int(),
        "columns, some of them": x.new_zeros(2, 1),
    }
    return [x, *(t.to(x.device) for k, t in more.items() if k == kind)]


def error(found: Tensor, x: Tensor, axis: int) -> float:
    """The largest relative error."""
    want = x.double().sum(axis)
    return float(((found.double().flatten() - want) / want).abs().max())
