"""Low-rank adapters: the term B (A x) times a scale that is added to a product; A [G, r, K] and B
[G, N, r] for a weight [G, N, K].

Source: LoRA (Hu et al., 2021), with separate factors for each expert as in PEFT.
"""

from __future__ import annotations

from typing import NamedTuple

from fusion_moe.errors import ShapeError
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Value
from fusion_moe.ir.types import INTS, TensorType, accumulated, plain

from . import arguments
from .arguments import shown


class Adapter(NamedTuple):
    """a float[G, r, K], b float[G, N, r], and the factor of their product.

    Of several adapters, the r features are one after another, and each row has those of at most
    one: features int[r], the adapter of each feature; rows int[M/g], that of each row.
    """

    a: Value
    b: Value
    scale: float
    features: Value | None = None
    rows: Value | None = None

    def of_several(self, name: str, features: Value | None, rows: Value) -> Adapter:
        """With the adapter of each feature and row. Raises ShapeError or DtypeError."""
        if features is None:
            raise ShapeError(
                f"lora_of without {name}_of", expected="the adapter of each feature too"
            )
        rank = plain(self.a.type.shape[1])
        arguments.need_dtype(f"{name}_of", features.type, INTS)
        arguments.need_shape(
            f"{name}_of", features.type, (rank,), f"the adapter of each feature of {name}_a"
        )
        return self._replace(features=features, rows=rows)


def adapter(
    name: str,
    a: Value | None,
    b: Value | None,
    scale: float,
    of: str,
    weight: TensorType,
    axis: int,
    rows: TensorType,
) -> Adapter | None:
    """The adapter of a weight whose `axis` is contracted with rows float[..., K]; None if it has
    none. Raises ShapeError or DtypeError.
    """
    if a is None and b is None:
        return None
    if a is None or b is None:
        argument, missing = ("a", "b") if b is None else ("b", "a")
        raise ShapeError(f"{name}_{argument} without {name}_{missing}", expected="both or neither")
    groups, n, k = (plain(weight.shape[i]) for i in (0, 3 - axis, axis))
    arguments.need_rank(f"{name}_a", a.type, "[G, r, K]")
    rank = plain(a.type.shape[1])
    arguments.need_shape(
        f"{name}_a",
        a.type,
        (groups, rank, k),
        f"r features of the {k} that {of} {shown(weight)} reads",
    )
    arguments.need_shape(
        f"{name}_b",
        b.type,
        (groups, n, rank),
        f"the {n} out-features of {of} {shown(weight)} from those of {name}_a",
    )
    for part, v in (("a", a), ("b", b)):
        arguments.need_dtype(f"{name}_{part}", v.type, arguments.FLOATS)
        arguments.need_one_width(f"{name}_{part}", v.type, "rows", rows)
    return Adapter(a, b, scale)


def own(fd: FusionDefinition, h: Value, lora: Adapter) -> Value:
    """h f32[M/g, r] with zeros for the features of adapters that a row does not have."""
    if lora.features is None or lora.rows is None:
        return h
    features, rows = lora.features, lora.rows
    if features.type.dtype != rows.type.dtype:
        features = fd.ops.cast(features, dtype=rows.type.dtype)
    of_row = fd.ops.reshape(rows, new_shape=(rows.type.shape[0], 1))
    of_feature = fd.ops.reshape(features, new_shape=(1, features.type.shape[0]))
    return fd.ops.where(fd.ops.eq(of_row, of_feature), h, 0.0)


def low_rank(fd: FusionDefinition, a: Value, lora: Adapter, ends: Value) -> Value:
    """a float[M/g, K] -> f32[M/g, N] (f64 in float64), to be added to the product of a weight.

    The scale multiplies the r features in between, which are the fewest numbers. They are rounded
    to the dtype of `a` before and after, so that the products of the backward read rows of that
    dtype too; a fused kernel rounds once.
    """
    dtype = a.type.dtype
    fd.mark_weight(lora.a, lora.b)
    factor_a, factor_b = (
        fd.ops.cast(v, dtype=dtype) if v.type.dtype != dtype else v for v in (lora.a, lora.b)
    )
    h = fd.ops.cast(own(fd, fd.ops.grouped_mm(a, factor_a, ends), lora), dtype=dtype)
    if lora.scale != 1.0:
        h = fd.ops.cast(fd.ops.cast(h, dtype=accumulated(dtype)) * float(lora.scale), dtype=dtype)
    return fd.ops.grouped_mm(h, factor_b, ends)
