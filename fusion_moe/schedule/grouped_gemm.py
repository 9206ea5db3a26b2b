"""Grouped products with what they can take in: a prologue on the activations they load, an epilogue on the tiles they make.

A kernel makes tiles of [rows of one group, some of N], looping over K. So the prologue may do what is elementwise in (row, k) or
picks rows, once they are rows of groups; the epilogue what is elementwise in (row, n), slices N, adds a group's bias,
or sums a token's rows in order.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass

from ..ir.core import Fusion, Op, Value
from ..ir.kinds.shape import elements
from ..ir.sizes import exact_div
from ..ir.types import Rows, plain
from ..target import Target
from .product import products

NAME = "grouped_gemm"
CONTRACTS_ROUNDING = True
PROLOGUE = ("pointwise", "view", "routing", "gather")
EPILOGUE = ("pointwise", "view", "grouped_add", "combine")
PROLOGUE_SHAPES = ("reshape", "broadcast_in_dim")
EPILOGUE_SHAPES = ("reshape", "broadcast_in_dim", "slice")


@dataclass(frozen=True)
class GroupedGemm:
    """Which operation is the product, and what is done while loading its rows and before storing its tiles."""

    product: str
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if there is one grouped product, all else is its prologue or its epilogue, and what is stored has one width."""
    found = products(fusion)
    if not found:
        return "no grouped product"
    if len(found) > 1:
        first, second = (p.op.kind.name for p in found[:2])
        return f"{second} contracts the result of {first}: it reads whole rows, and a kernel holds tiles"
    product = found[0].op
    after = _after(fusion, product)
    for op in fusion.ops:
        if op is not product and (why := _refusal(op, after)):
            return why
    return _one_combine(fusion, after) or _one_width(fusion, product, kept)


def describe(fusion: Fusion) -> GroupedGemm:
    """The product, its prologue and its epilogue, in order."""
    product = products(fusion)[0].op
    after = _after(fusion, product)
    rest = [op for op in fusion.ops if op is not product and op.kind.role != "view"]
    return GroupedGemm(
        product.kind.name,
        tuple(op.kind.name for op in rest if not _reads(op, after)),
        tuple(op.kind.name for op in rest if _reads(op, after)),
    )


def _after(fusion: Fusion, product: Op) -> Set[Value]:
    """The values that depend on the product."""
    after = set(product.outputs)
    for op in fusion.ops:
        if _reads(op, after):
            after |= set(op.outputs)
    return after


def _reads(op: Op, values: Set[Value]) -> bool:
    return any(v in values for v in op.values)


def _refusal(op: Op, after: Set[Value]) -> str | None:
    name, role = op.kind.name, op.kind.role
    if _reads(op, after):
        allowed = role in EPILOGUE or name in EPILOGUE_SHAPES
        return None if allowed else f"{name} reads more of the product's result than one tile"
    if role == "pointwise" and not any(isinstance(d, Rows) for d in op.outputs[0].type.shape):
        return f"{name} on whole tokens would be recomputed for every slot and tile"
    allowed = role in PROLOGUE or name in PROLOGUE_SHAPES or name == "full"
    return None if allowed else f"{name} cannot be part of a product's prologue"


def _one_combine(fusion: Fusion, after: Set[Value]) -> str | None:
    combines = [op for op in fusion.ops if op.kind.role == "combine"]
    if len(combines) > 1:
        return "a kernel has at most one combine"
    if combines and not any(v in after for v in combines[0].values[:1]):
        return "combine sums rows of something other than this product"
    return None


def _one_width(fusion: Fusion, product: Op, kept: Collection[Value]) -> str | None:
    """Results of one width, where some of them are kept: others may yet be read inside of a larger piece."""
    rows = plain(product.outputs[0].type.shape[0])
    combines = [op for op in fusion.ops if op.kind.role == "combine"]
    tokens = {v for op in combines for v in _after(fusion, op)}
    stored = [v for v in fusion.outputs if v in _after(fusion, product) - tokens] + [op.values[0] for op in combines]
    widths = {str(exact_div(elements(v.type.shape), rows)) for v in stored}
    if len(widths) == 1 or not any(v in kept for v in stored):
        return None
    return f"results of {' and '.join(sorted(widths))} columns are stored: a kernel's tiles have one width"
