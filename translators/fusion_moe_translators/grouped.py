"""The translator of torch's grouped product, which torch.nn.functional.grouped_mm calls."""

from __future__ import annotations

from fusion_moe.definitions.translate import translator
from fusion_moe.errors import Untranslatable
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value


@translator("aten::_grouped_mm", as_stored=True)
def grouped_mm(
    fd: FusionDefinition,
    a: Value,
    b: Value,
    offs: Value | None = None,
    bias: Value | None = None,
    out_dtype: str | None = None,
) -> Value:
    """a [M, K], b [G, K, N], offs i32[G] -> [M, N], for each run of rows; or a [N, M], b [M, K] ->
    [G, N, K], for each run of columns
    """
    ranks = len(a.type.shape), len(b.type.shape)
    if offs is None or bias is not None or ranks not in ((2, 3), (2, 2)):
        raise Untranslatable(
            f"a {a.type}, b "
            f"{b.type}{'' if offs else ' without offs'}{' and a bias' if bias else ''}",
            expected="[M, K] and [G, K, N], or [N, M] and [M, K], with offs and no bias",
        )
    y = _of_rows(fd, a, b, offs) if ranks == (2, 3) else _of_columns(fd, a, b, offs)
    return fd.ops.cast(y, dtype=out_dtype or a.type.dtype)


def _of_rows(fd: FusionDefinition, a: Value, b: Value, offs: Value) -> Value:
    """A weight [G, N, K] that is passed as its transposed view is read as it is stored."""
    ends = fd.groups_of(offs, a.type.shape[0])
    stored = _transposed(fd, b, (0, 2, 1))
    rows = fd.partition_by(a, ends)
    if stored is None:
        fd.mark_weight(b)
        return fd.ops.grouped_mm_t(rows, b, ends)
    fd.mark_weight(stored)
    return fd.ops.grouped_mm(rows, stored, ends)


def _of_columns(fd: FusionDefinition, a: Value, b: Value, offs: Value) -> Value:
    ends = fd.groups_of(offs, b.type.shape[0])
    rows = _transposed(fd, a, (1, 0)) or fd.ops.permute(a, dims=(1, 0))
    return fd.ops.grouped_outer(fd.partition_by(rows, ends), fd.partition_by(b, ends), ends)


def _transposed(fd: FusionDefinition, v: Value, dims: tuple[int, ...]) -> Value | None:
    """The value of which v is a permutation."""
    op = fd.producer(v, "permute")
    return op.values[0] if op is not None and op.attrs["dims"] == dims else None
