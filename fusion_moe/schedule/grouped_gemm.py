"""Grouped products with their surroundings: a prologue on the activations that they load, an
epilogue on the tiles that they make.

A kernel of fprop or dgrad makes tiles of [rows of one group, some columns], looping over the
contracted dimension. So the prologue may contain operations that are elementwise in (row, k) or
pick rows, once these are rows of groups. The epilogue may contain operations that are elementwise
in (row, n), slice or join columns, add a group's bias, sum a row's columns, or sum a token's rows
in order. Other operands of the epilogue are computed there too, even products, if the target has
kernels for that: tiles of the same rows and columns, with a float weight and few contracted
features. A kernel of wgrad makes tiles of a group's matrix, looping over the group's rows: both
operands have a prologue, and the epilogue is elementwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from itertools import combinations

from ..ir import Fusion, Op, Rows, Value, dependent, elements, exact_div, needed, plain
from ..target import Target
from .product import GroupedProduct, cat_before, main_and_added, products, quantized_result

NAME = "grouped_gemm"
CONTRACTS_ROUNDING = True
PROLOGUE = ("pointwise", "view", "routing", "gather")
EPILOGUE = ("pointwise", "view", "per_group", "combine")
PROLOGUE_SHAPES = ("reshape", "broadcast_in_dim")
EPILOGUE_SHAPES = ("reshape", "broadcast_in_dim", "slice", "cat")


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if there is one grouped product, possibly with others that the target's kernels compute
    beside it, everything else is prologue or epilogue, and the stored results have widths of its
    tiles.
    """
    result = products(fusion)
    if not result:
        return "no grouped product"
    if why := _chained(fusion, result):
        return why
    main, added = main_and_added(fusion)
    if why := next((why for other in added if (why := _of_two(fusion, main, other, target))), None):
        return why
    product = main.op
    after = dependent(fusion.ops, [p.result for p in result])
    before = needed(fusion.ops, [v for p in result for v in p.op.values])
    tokens = {
        v
        for op in fusion.ops
        if op.kind.role == "combine"
        for v in dependent(fusion.ops, op.outputs)
    }
    sums = {op for op in fusion.ops if _sums_rows(op, product) and _reads(op, after - tokens)}
    of_rows = {v for op in sums for v in dependent(fusion.ops, op.outputs)}
    for op in fusion.ops:
        if (
            op.kind.role != "grouped"
            and op not in sums
            and (why := _refusal(op, after, before, product, target))
        ):
            return why
        if why := _of_sums(op, of_rows):
            return why
    if main.kind == "wgrad":
        return _elementwise(fusion, after)
    return (
        _one_combine(fusion, after)
        or _quantized(fusion, after)
        or _widths(fusion, product, kept, after - tokens - of_rows)
    )


def describe(fusion: Fusion) -> str:
    """The product, and the operations while loading its rows and before storing its tiles."""
    product = main_and_added(fusion)[0].op
    after = dependent(fusion.ops, product.outputs)
    rest = [op for op in fusion.ops if op is not product and op.kind.role != "view"]
    late = {op for op in rest if op.kind.role == "grouped" or _reads(op, after)}
    prologue = ", ".join(op.kind.name for op in rest if op not in late)
    epilogue = ", ".join(op.kind.name for op in rest if op in late)
    return f"{product.kind.name}; prologue: {prologue or 'none'}; epilogue: {epilogue or 'none'}"


def _chained(fusion: Fusion, candidates: Sequence[GroupedProduct]) -> str | None:
    """Why products of which one contracts the other's result are not one kernel."""
    for first, second in combinations((p.op for p in candidates), 2):
        if _reads(second, dependent(fusion.ops, first.outputs)):
            return (
                f"{second.kind.name} contracts the result of {first.kind.name}: it reads whole "
                "rows, and a kernel holds tiles"
            )
    return None


def _of_two(
    fusion: Fusion, main: GroupedProduct, other: GroupedProduct, target: Target
) -> str | None:
    """Why a kernel cannot make the tiles of another product beside those of the main one."""
    alike = main.result.type == other.result.type and not other.b.type.quantized
    most = target.added_features.get(main.kind, 0)
    if not alike or not most:
        names = " and ".join(op.kind.name for op in fusion.ops if op in (main.op, other.op))
        return f"{names} are two products: a kernel has accumulators for one"
    features = other.size(other.contracted)
    if not isinstance(features, int) or features > most:
        of_few = f"beside another product a kernel contracts up to {most}"
        return f"{other.op.kind.name} contracts {features} features: {of_few}"
    return None


def _reads(op: Op, values: Set[Value]) -> bool:
    return any(v in values for v in op.values)


def _refusal(
    op: Op, after: Set[Value], before: Set[Value], product: Op, target: Target
) -> str | None:
    name, role = op.kind.name, op.kind.role
    if _reads(op, after):
        allowed = role in EPILOGUE or name in EPILOGUE_SHAPES
        allowed = allowed or (
            name == "quantize"
            and len(op.values) == 1
            and op.attrs["encoding"] in target.quantized_results
        )
        return None if allowed else f"{name} reads more of the product's result than one tile"
    beside = before.isdisjoint(op.outputs)
    as_large = op.outputs[0].type.shape == product.outputs[0].type.shape
    if beside and as_large and role == "pointwise":  # elementwise in those of the result
        return None
    if role == "pointwise" and not any(isinstance(d, Rows) for d in op.outputs[0].type.shape):
        return f"{name} on whole tokens would be recomputed for every slot and tile"
    allowed = role in PROLOGUE or name in PROLOGUE_SHAPES or name == "full"
    allowed = allowed or (beside and (name in EPILOGUE_SHAPES or role == "per_group"))
    return None if allowed else f"{name} cannot be part of a product's prologue"


def _one_combine(fusion: Fusion, after: Set[Value]) -> str | None:
    combines = [op for op in fusion.ops if op.kind.role == "combine"]
    if len(combines) > 1:
        return "a kernel has at most one combine"
    if combines and not any(v in after for v in combines[0].values[:1]):
        return "combine sums rows of something other than this product"
    return None


def _quantized(fusion: Fusion, after: Set[Value]) -> str | None:
    """Why a quantized result, if there is one, cannot be stored by the product's kernel."""
    if not any(op.kind.name == "quantize" and _reads(op, after) for op in fusion.ops):
        return None
    parts = quantized_result(fusion)
    stored = [v for v in fusion.outputs if v in after]
    alone = parts is not None and set(stored) <= set(parts.outputs)
    return None if alone else "a kernel that quantizes its result stores nothing else"


def _sums_rows(op: Op, product: Op) -> bool:
    """Whether an operation sums the columns of each row, for as many rows as a product has."""
    if op.kind.name != "sum" or tuple(op.attrs["dims"]) != (1,):
        return False
    shape = op.values[0].type.shape
    return len(shape) == 2 and plain(shape[0]) == plain(product.outputs[0].type.shape[0])


def _of_sums(op: Op, of_rows: Set[Value]) -> str | None:
    """A row's sum is complete only after all of its tiles: nothing may read it except views of
    it.
    """
    if not _reads(op, of_rows) or op.kind.role == "view" or op.kind.name == "reshape":
        return None
    return f"{op.kind.name} reads the sum of whole rows, and a kernel holds tiles"


def _elementwise(fusion: Fusion, after: Set[Value]) -> str | None:
    """After a wgrad, only elementwise operations are possible."""
    others = (
        op
        for op in fusion.ops
        if _reads(op, after)
        and op.kind.role not in ("pointwise", "view")
        and op.kind.name != "reshape"
    )
    return next((f"{op.kind.name} after a wgrad is not elementwise" for op in others), None)


def _widths(
    fusion: Fusion, product: Op, kept: Collection[Value], rows_of_product: Set[Value]
) -> str | None:
    """Results must have one width; the product itself may be stored beside them if some of them are
    kept: the others may still be read inside a larger piece. Operands of `cat` are stored as parts
    of its result.
    """
    rows = plain(product.outputs[0].type.shape[0])
    parts = quantized_result(fusion)
    stored = [v for v in fusion.outputs if v in rows_of_product]
    if parts is not None:  # whose rows are those that it quantizes
        stored = [v for v in stored if v not in parts.outputs]
        stored += fusion.producers[parts.values[0]].values
    stored += [op.values[0] for op in fusion.ops if op.kind.role == "combine"]
    whole = exact_div(elements(product.outputs[0].type.shape), rows)
    widths = {
        exact_div(elements(v.type.shape if op is None else op.values[0].type.shape), rows)
        for v in stored
        for op in [cat_before(fusion, v)]
    }
    if len(widths - {whole}) <= 1 or not any(v in kept for v in stored):
        return None
    return (
        f"results of {' and '.join(sorted(map(str, widths)))} columns are stored: a kernel's "
        "tiles have one width"
    )
