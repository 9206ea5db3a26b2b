"""Steps with torch's own operations, in the forms that a decomposed graph has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .builder import Builder, Skip, aten
from .values import DTYPES, FLOATS

INF, NAN = float("inf"), float("nan")
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    2,
    -1,
    3,
    True,
    False,
    0.0,
    -0.0,
    1.0,
    0.5,
    2.0,
    -2.0,
    0.3,
    INF,
    -INF,
    NAN,
    127,
    256,
    300,
    -129,
    2**24 + 1,
    2**31,
    -(2**31),
    2**40,
    1e30,
    1e-30,
    65504.0,
    70000.0,
)
UNARY = (
    "neg",
    "abs",
    "relu",
    "neg",
    "abs",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "exp",
    "log",
    "expm1",
    "log1p",
    "tanh",
    "erf",
    "sigmoid",
    "silu",
    "floor",
    "sign",
    "isnan",
)
BINARY = (
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "minimum",
    "maximum",
    "add.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "pow.Tensor_Tensor",
)
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


def op(name: str) -> Any:
    """aten's operation of a name, with its overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def any_of(b: Builder) -> Node:
    """Any tensor but those of eight bits that are floats, with which torch computes little."""
    return b.pick(lambda n: b.dtype(n) != torch.float8_e4m3fn)


def unary(b: Builder) -> Any:
    return b.call(op(b.rng.choice(UNARY)), any_of(b))


def binary(b: Builder) -> Any:
    x = any_of(b)
    pair = [x, partner(b, x)]
    b.rng.shuffle(pair)
    return b.call(op(b.rng.choice(BINARY)), *pair)


def compare(b: Builder) -> Any:
    x, name = any_of(b), b.rng.choice(COMPARED)
    if b.rng.random() < 0.5:
        return b.call(op(f"{name}.Scalar"), x, b.rng.choice(NUMBERS))
    return b.call(op(f"{name}.Tensor"), x, partner(b, x))


def logical(b: Builder) -> Any:
    x = b.pick(lambda n: b.dtype(n) == torch.bool)
    if b.rng.random() < 0.3:
        return b.call(aten.logical_not.default, x)
    y = b.maybe(
        lambda n: b.dtype(n) == torch.bool and b.key(n) == b.key(x), lambda: compared_like(b, x)
    )
    return b.call(op(b.rng.choice(("logical_and", "logical_or"))), x, y)


def compared_like(b: Builder, x: Node) -> Node:
    """A mask of the shape of x."""
    return b.call(aten.ne.Scalar, x, 0)


def number(b: Builder) -> Any:
    """A tensor and a Python number."""
    x, v = any_of(b), b.rng.choice(NUMBERS)
    name = b.rng.choice(
        (
            "add.Tensor",
            "mul.Tensor",
            "sub.Tensor",
            "div.Tensor",
            "clamp_min",
            "clamp_max",
            "clamp",
            "pow.Tensor_Scalar",
        )
    )
    if name == "clamp":
        return b.call(
            op(name), x, *(b.rng.choice((v, None, b.rng.choice(NUMBERS))) for _ in range(2))
        )
    return b.call(op(name), x, 2 if name.startswith("pow") else v)


def where(b: Builder) -> Any:
    x = any_of(b)
    mask = b.maybe(
        lambda n: b.dtype(n) == torch.bool and fits(b, n, x), lambda: compared_like(b, x)
    )
    y = (
        b.call(aten.full.default, [], b.rng.choice(NUMBERS), dtype=b.dtype(x))
        if b.rng.random() < 0.4
        else partner(b, x)
    )
    pair = [x, y]
    b.rng.shuffle(pair)
    return b.call(aten.where.self, mask, *pair)


def cast(b: Builder) -> Any:
    x, dtype = any_of(b), b.rng.choice(DTYPES)
    if b.rng.random() < 0.3:
        return b.call(aten._to_copy.default, x, dtype=dtype)
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def silu(b: Builder) -> Any:
    """silu as it is decomposed."""
    x = b.pick(lambda n: b.dtype(n) in FLOATS)
    wide = b.call(torch.ops.prims.convert_element_type.default, x, torch.float32)
    below = b.call(aten.add.Tensor, b.call(aten.exp.default, b.call(aten.neg.default, wide)), 1)
    return b.call(
        torch.ops.prims.convert_element_type.default,
        b.call(aten.div.Tensor, wide, below),
        b.dtype(x),
    )


# Partners of a pointwise operation ----------------------------------------------------------------


def fits(b: Builder, n: Node, x: Node) -> bool:
    """Whether n can be broadcast to the shape of x, whatever the sizes are."""
    small, large = b.key(n), b.key(x)
    return len(small) <= len(large) and all(
        s in ("1", d) for s, d in zip(reversed(small), reversed(large), strict=False)
    )


def partner(b: Builder, x: Node) -> Node:
    """A tensor that is pointwise beside x: of its shape, or broadcast to it."""
    same = b.rng.random() < 0.6

    def beside(n: Node) -> bool:
        return b.dtype(n) != torch.float8_e4m3fn and (
            b.key(n) == b.key(x) if same else fits(b, n, x)
        )

    return b.maybe(beside, lambda: new_partner(b, x))


def new_partner(b: Builder, x: Node) -> Node:
    shape, dtype = list(b.shape(x)), b.rng.choice((b.dtype(x), b.dtype(x), *DTYPES))
    how = b.rng.choice(("same", "column", "row", "vector", "number", "constant"))
    if not shape or how == "number":
        return b.new((), dtype)
    if how == "constant":
        shown = [1] * len(shape) if b.dynamic else shape
        return b.call(aten.full.default, shown, b.rng.choice(NUMBERS), dtype=dtype)
    if how == "vector":
        return b.new(shape[-1:], dtype, rows=len(shape) == 1)
    if how == "column":
        return b.new([*shape[:-1], 1], dtype, rows=len(shape) > 1)
    if how == "row":
        return b.new([1] * (len(shape) - 1) + shape[-1:], dtype)
    return b.new(shape, dtype, rows=True)


# Shapes -------------------------------------------------------------------------------------------


def shown(b: Builder, n: Node, dim: int) -> Any:
    """A size as the graph may name it: a number, or a node where it changes from call to call."""
    size = n.meta["val"].shape[dim]
    return size if isinstance(size, int) else b.call(aten.sym_size.int, n, dim)


def view(b: Builder) -> Any:
    x = any_tensor(b)
    shape = [shown(b, x, i) for i in range(len(b.shape(x)))]
    if not shape:
        return b.call(aten.view.default, x, [1] * b.rng.randint(1, 2))
    way = b.rng.choice(("merge", "split", "ones", "flat", "turned"))
    last = b.shape(x)[-1]
    if way == "merge" and len(shape) > 1:
        shape = [*shape[:-2], -1] if all(b.shape(x)) else shape
    elif way == "split" and last % 2 == 0 and last and isinstance(shape[-1], int):
        shape = [*shape[:-1], *b.rng.choice(((2, last // 2), (last // 2, 2)))]
    elif way == "ones":
        shape.insert(b.rng.randint(0, len(shape)), 1)
    elif way == "turned" and len(shape) == 2:
        shape = shape[::-1]
    elif all(b.shape(x)):
        shape = [-1]
    return b.call(aten.reshape.default if b.rng.random() < 0.3 else aten.view.default, x, shape)


def any_tensor(b: Builder) -> Node:
    """Any tensor."""
    return b.pick(lambda n: True)


def dims(b: Builder) -> Any:
    """unsqueeze, squeeze, permute, t, expand, clone."""
    x = any_tensor(b)
    rank = len(b.shape(x))
    way = b.rng.choice(("unsqueeze", "squeeze", "permute", "t", "expand", "expand", "clone"))
    if way == "unsqueeze":
        return b.call(aten.unsqueeze.default, x, b.rng.randint(-rank - 1, rank))
    if way == "clone":
        return b.call(aten.clone.default, x)
    if not rank:
        raise Skip
    if way == "squeeze":
        ones = [i for i, d in enumerate(b.key(x)) if d == "1"] or range(rank)
        return b.call(aten.squeeze.dim, x, b.rng.choice(list(ones)))
    if way == "expand":
        return expand(b, x)
    if way == "t" and rank == 2:
        return b.call(aten.t.default, x)
    return b.call(aten.permute.default, x, b.rng.sample(range(rank), rank))


def expand(b: Builder, x: Node) -> Any:
    like = b.pick(lambda n: fits(b, x, n))
    shape = [shown(b, like, i) for i in range(len(b.shape(like)))]
    kept = [
        -1
        if b.rng.random() < 0.3
        and i >= len(shape) - len(b.shape(x))
        and b.key(x)[i - len(shape)] == b.key(like)[i]
        else d
        for i, d in enumerate(shape)
    ]
    return b.call(aten.expand.default, x, kept)


def part(b: Builder) -> Any:
    """A slice, a selection, a split."""
    x = b.pick(lambda n: len(b.shape(n)) > 0)
    dim = b.rng.randrange(len(b.shape(x)))
    size, way = b.shape(x)[dim], b.rng.choice(("slice", "slice", "select", "split"))
    dim = b.rng.choice((dim, dim - len(b.shape(x))))
    if way == "select":
        return b.call(aten.select.int, x, dim, b.rng.choice((0, -1, size - 1, size // 2)))
    if way == "split":
        return b.call(aten.split.Tensor, x, max(1, size // 2), dim)
    if b.rng.random() < 0.1:
        return b.call(
            aten.slice.Tensor,
            x,
            dim,
            *b.rng.choice(((shown(b, x, dim), 2**63 - 1), (0, shown(b, x, dim)))),
        )
    ends = (0, 1, -1, size // 2, size, size + 3, 2**63 - 1, -size - 2, None)
    return b.call(
        aten.slice.Tensor,
        x,
        dim,
        b.rng.choice((0, 0, *ends)),
        b.rng.choice(ends),
        b.rng.choice((1, 1, 1, 2)),
    )


def cat(b: Builder) -> Any:
    x = b.pick(lambda n: len(b.shape(n)) > 0)
    rank = len(b.shape(x))
    dim = b.rng.randrange(rank)

    def beside(n: Node) -> bool:
        return b.dtype(n) == b.dtype(x) and len(b.shape(n)) == rank and others(n) == others(x)

    def others(n: Node) -> list[str]:
        return [d for i, d in enumerate(b.key(n)) if i != dim]

    return b.call(
        aten.cat.default,
        [x, *(b.pick(beside) for _ in range(b.rng.randint(1, 2)))],
        b.rng.choice((dim, dim - rank)),
    )


def constant(b: Builder) -> Any:
    if b.rng.random() < 0.3:
        return b.call(
            aten.arange.default,
            b.rng.choice((1, 2, 4, 16)),
            dtype=b.rng.choice((torch.int32, torch.int64)),
        )
    shape = b.rng.choice(([], [1], [16], [2, 16], [1, 16]))
    return b.call(aten.full.default, shape, b.rng.choice(NUMBERS), dtype=b.rng.choice(DTYPES))


# Rows, sums ---------------------------------------------------------------------------------------


def indices_into(b: Builder, size: int, negative: bool) -> Callable[[Node], bool]:
    """Whether a value is a vector of indices into so many elements."""

    def is_one(n: Node) -> bool:
        real = b.real[n]
        if real.dim() != 1 or real.dtype not in (torch.int32, torch.int64) or n.meta["rough"]:
            return False
        return bool((real < size).all() and (real >= (-size if negative else 0)).all())

    return is_one


def gather(b: Builder) -> Any:
    x = b.pick(lambda n: len(b.shape(n)) > 0 and 0 not in b.shape(n))
    dim = b.rng.choice((0, 0, 0, len(b.shape(x)) - 1))
    size, selects = b.shape(x)[dim], b.rng.random() < 0.4
    good = indices_into(b, size, not selects)
    least, count = 0 if selects else -size, b.rng.choice((1, 2, 5))
    at = b.maybe(
        good,
        lambda: b.input(torch.tensor([b.rng.randrange(least, size) for _ in range(count)])),
        0.8,
    )
    if selects:
        return b.call(aten.index_select.default, x, dim, at)
    return b.call(aten.index.Tensor, x, [None] * dim + [at])


def scatter(b: Builder) -> Any:
    x = b.pick(lambda n: len(b.shape(n)) == 2 and b.shape(n)[0] > 0)
    at = b.pick(indices_into(b, b.shape(x)[0], False))
    source = b.maybe(
        lambda n: b.dtype(n) == b.dtype(x) and b.key(n) == (*b.key(at), b.key(x)[1]),
        lambda: b.new((*b.shape(at), b.shape(x)[1]), b.dtype(x), rows=True),
    )
    if b.rng.random() < 0.5:
        return b.call(aten.index_add.default, x, 0, at, source)
    return b.call(aten.index_put.default, x, [at], source, True)


def reduce(b: Builder) -> Any:
    x = b.pick(lambda n: len(b.shape(n)) > 0 and b.dtype(n) != torch.float8_e4m3fn)
    rank = len(b.shape(x))
    over, keep = b.rng.sample(range(-rank, 0), b.rng.randint(1, min(2, rank))), b.rng.random() < 0.6
    way = b.rng.choice(("sum", "sum", "sum", "mean", "amax", "cumsum"))
    if way == "cumsum":
        return b.call(aten.cumsum.default, x, over[0])
    if way == "sum":
        dtype = {"dtype": b.rng.choice(FLOATS)} if b.rng.random() < 0.2 else {}
        return b.call(aten.sum.dim_IntList, x, over, keep, **dtype)
    return b.call(op(f"{way}.dim" if way == "mean" else way), x, over, keep)


STEPS = (
    unary,
    unary,
    binary,
    binary,
    binary,
    compare,
    logical,
    number,
    number,
    where,
    cast,
    cast,
    silu,
    view,
    view,
    dims,
    dims,
    part,
    part,
    cat,
    constant,
    gather,
    gather,
    scatter,
    reduce,
)
