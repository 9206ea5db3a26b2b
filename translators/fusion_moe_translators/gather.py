"""Translators of aten's gathers and scatters of rows."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_moe.definitions.translate import translator
from fusion_moe.errors import Untranslatable
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import INTS, plain

from .shapes import from_start


@translator("aten::index_select")
def index_select(fd: FusionDefinition, x: Value, dim: int, at: Value) -> Value:
    """x[..., at, ...]: `at` must not be negative"""
    return fd.ops.index_select(x, at, dim=from_start(dim, len(x.type.shape)))


@translator("aten::index.Tensor")
def index(fd: FusionDefinition, x: Value, indices: Sequence[Value | None]) -> Value:
    """x[at], x[:, at], ...: one index, for one dimension; a negative index counts from the end"""
    dim, at = _one_index(indices)
    return fd.ops.index_select(x, _from_start(fd, at, plain(x.type.shape[dim])), dim=dim)


@translator("aten::index_add")
def index_add(
    fd: FusionDefinition, x: Value, dim: int, at: Value, source: Value, *, alpha: float = 1
) -> Value:
    """x with the rows of source added at `at`"""
    if from_start(dim, len(x.type.shape)) != 0 or alpha != 1:
        raise Untranslatable(
            f"index_add along dimension {dim} with alpha = {alpha}",
            expected="dimension 0 and alpha 1",
        )
    return fd.ops.index_put_accumulate(x, at, source)


@translator("aten::index_put")
def index_put(
    fd: FusionDefinition,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """x with the rows of values added at one index of dimension 0"""
    dim, at = _one_index(indices)
    if not accumulate:
        raise Untranslatable(
            "index_put without accumulate",
            expected="accumulate=True: else the order of writes decides",
        )
    if dim != 0 or len(values.type.shape) != len(x.type.shape):
        raise Untranslatable(
            f"index_put of {values.type} along dimension {dim}",
            expected="whole rows along dimension 0",
        )
    if x.type.dtype in ("bf16", "f16"):
        raise Untranslatable(
            f"index_put of {x.type}, which rounds after each row",
            expected="f32, or index_add, which rounds once",
        )
    return fd.ops.index_put_accumulate(x, _from_start(fd, at, plain(x.type.shape[0])), values)


def _one_index(indices: Sequence[Value | None]) -> tuple[int, Value]:
    inputs = [(dim, at) for dim, at in enumerate(indices) if at is not None]
    if len(inputs) != 1 or len(inputs[0][1].type.shape) != 1 or inputs[0][1].type.dtype not in INTS:
        raise Untranslatable(
            f"{len(inputs)} indices of types {', '.join(str(at.type) for _, at in inputs)}",
            expected="one integer vector",
        )
    return inputs[0]


def _from_start(fd: FusionDefinition, at: Value, size: object) -> Value:
    """at with negative indices replaced by positive ones; indices made by routing are never
    negative.
    """
    if fd.made_by(at) in ("route", "invert"):
        return at
    if not isinstance(size, int):
        raise Untranslatable(
            f"an index of unknown sign into a size {size}",
            expected="a size known when compiling, or torch.index_select",
        )
    return fd.ops.where(at < 0, at + size, at)
