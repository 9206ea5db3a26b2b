"""How callers say which rows belong to which group: by row counts, or by the ends of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DtypeError, GroupsError, ShapeError
from ..layouts import ends_from_sizes
from ..nn.checks import need_device

INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


SplitSizes = Tensor | Sequence[int]


def ends_of(
    split_sizes: SplitSizes | None, offs: Tensor | None, groups: int, rows: Tensor, where: str
) -> Tensor:
    """split_sizes int[G] or G ints, rows of each group, or offs i32[G], their ends -> ends i32[G].
    The host reads tensors only on the CPU.

    rows [..., K]: the rows that are divided. GroupsError if both are given or neither, and on the
    CPU for counts that are negative or exceed the rows (on CUDA such ends are clamped, and the
    error is raised later); ShapeError, DtypeError or DeviceError for a tensor that does not fit.
    """
    if (split_sizes is None) == (offs is None):
        raise GroupsError(
            "neither split_sizes nor offs" if offs is None else "split_sizes and offs",
            expected="one of them: split_sizes counts the rows of each "
            "group, offs says where they end",
            where=where,
        )
    if offs is not None:
        _check("offs", offs, groups, (torch.int32,), rows.device, where)
        return offs
    if isinstance(split_sizes, (list, tuple)) and all(isinstance(n, int) for n in split_sizes):
        _check_counts(split_sizes, rows, where)
        split_sizes = torch.tensor(split_sizes, dtype=torch.int64).to(rows.device)
    _check("split_sizes", split_sizes, groups, INTEGERS, rows.device, where)
    assert isinstance(split_sizes, Tensor)
    on_host = type(split_sizes) is Tensor and split_sizes.device.type == "cpu"
    if on_host and not torch.compiler.is_compiling():
        _check_counts(split_sizes.flatten().tolist(), rows, where)
    return ends_from_sizes(split_sizes.reshape(groups))


def _check(
    name: str,
    t: Any,
    groups: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    where: str,
) -> None:
    if not isinstance(t, Tensor):
        raise DtypeError(
            f"{name} is a {type(t).__name__}",
            expected="a tensor, on the device of the rows",
            todo=f"torch.tensor({name})",
            where=where,
        )
    if t.dtype not in dtypes:
        raise DtypeError(
            f"{name} is {t.dtype}",
            expected="an integer dtype" if len(dtypes) > 1 else str(dtypes[0]),
            where=where,
        )
    if _differ(t.numel(), groups) or (name == "offs" and t.dim() != 1):
        raise ShapeError(
            f"{name} {list(t.shape)}", expected=f"[{groups}], one for each group", where=where
        )
    need_device(name, t, device, where)


def _differ(count: int, groups: int) -> bool:
    """Whether two numbers differ. A tracer that does not know the first, such as the length of
    torch.bincount, checks it at run time.
    """
    if not torch.compiler.is_compiling():
        return count != groups
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports the tracer

    if guard_or_false(count != groups):
        return True
    torch._check(count == groups)
    return False


def _check_counts(counts: Sequence[int], rows: Tensor, where: str) -> None:
    for group, count in enumerate(counts):
        if count < 0:
            raise GroupsError(
                f"split_sizes[{group}] = {count}",
                expected="0 rows or more for each group",
                where=where,
            )
    total = rows.numel() // rows.shape[-1]
    if sum(counts) > total:
        raise GroupsError(
            f"split_sizes of {sum(counts)} rows in all",
            expected=f"at most the {total} rows there are",
            todo="pass ends of groups as offs",
            where=where,
        )
