"""Steps with our operations. Whatever fits where an input may stand is taken there: a new input, an
old one, a value just computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fusion_moe.layouts import SF128X4
from fusion_moe.nn import swiglu as swiglu_text

from . import values
from .builder import Builder, Skip, aten
from .values import FLOATS

O = torch.ops.fusion_moe
WIDTHS = (16, 16, 32, 48)
FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
MOST_GROUPS = 16


def disguised(b: Builder, n: Node) -> Node:
    """The same content, often computed on the way."""
    if b.rng.random() < 0.6:
        return n
    ways: list[Callable[[], Any]] = [
        lambda: b.call(aten.clone.default, n),
        lambda: b.call(aten.squeeze.dim, b.call(aten.unsqueeze.default, n, 0), 0),
        lambda: b.call(aten.select.int, b.call(aten.unsqueeze.default, n, 1), 1, 0),
        lambda: b.call(aten.slice.Tensor, n, 0, 0, 2**63 - 1),
        lambda: b.call(
            aten.reshape.default, n, [-1 if b.dynamic else b.shape(n)[0], *b.shape(n)[1:]]
        ),
    ]
    if b.dtype(n) != torch.float8_e4m3fn:
        wider = {
            torch.int32: torch.int64,
            torch.bfloat16: torch.float32,
            torch.float16: torch.float32,
        }.get(b.dtype(n), torch.float64)
        ways += [
            lambda: b.call(aten.add.Tensor, n, 0),
            lambda: b.call(aten.mul.Tensor, n, 1),
            lambda: b.call(aten.maximum.default, n, n),
            lambda: b.call(aten.neg.default, b.call(aten.neg.default, n)),
            lambda: b.call(aten.where.self, b.call(aten.eq.Tensor, n, n), n, n),
            lambda: b.call(
                aten._to_copy.default,
                b.call(aten._to_copy.default, n, dtype=wider),
                dtype=b.dtype(n),
            ),
            lambda: b.call(
                aten.cat.default,
                [
                    b.call(aten.slice.Tensor, n, 0, 0, 1),
                    b.call(aten.slice.Tensor, n, 0, 1, 2**63 - 1),
                ],
                0,
            ),
        ]
    try:
        return b.rng.choice(ways)()
    except Skip:
        return n


# What our operations take -------------------------------------------------------------------------


def ends_of(b: Builder, rows: int, groups: int | None = None) -> Node:
    """Ends among so many rows; now and then ends of other rows, which may reach past them."""
    wrong = b.rng.random() < 0.04

    def good(n: Node) -> bool:
        real = b.real[n]
        if (
            real.dim() != 1
            or real.dtype != torch.int32
            or not 0 < len(real) <= MOST_GROUPS
            or (groups is not None and len(real) != groups)
        ):
            return False
        return wrong or bool((real >= 0).all() and (real.diff() >= 0).all() and real[-1] <= rows)

    count = groups or b.rng.choice((1, 1, 2, 3, 4, MOST_GROUPS))
    n = b.maybe(
        good,
        lambda: b.input(values.group_ends(b.rng, count, rows + 9 * (b.rng.random() < 0.03))),
        0.75,
    )
    return disguised(b, n)


def some_rows(b: Builder, rank: int = 2) -> int:
    """A number of rows that occurs already, or a new one."""
    there = [b.shape(n)[0] for n in b.tensors if len(b.shape(n)) == rank]
    return b.rng.choice((*there, *there, 0, 1, 1, 2, 5, 16))


def activations(b: Builder, width: Callable[[int], bool]) -> Node:
    """Rows of a width that is wanted."""

    def good(n: Node) -> bool:
        shape = b.shape(n)
        return (
            b.dtype(n) in FLOATS
            and len(shape) in (2, 2, 3)
            and width(shape[-1])
            and b.real[n].numel() <= 4096
        )

    fitting = [w for w in WIDTHS if width(w)]
    return b.maybe(
        good,
        lambda: b.new((some_rows(b), b.rng.choice(fitting)), b.rng.choice(FLOATS), rows=True),
        0.85,
    )


def whole_blocks(k: int) -> bool:
    """Whether a width is one of quantized blocks."""
    return k % 16 == 0 and 0 < k <= 64


def weight_of(b: Builder, groups: int, n: int, k: int) -> list[Node]:
    """The three tensors of a weight: one that is there already, or a new one."""
    there = [
        c
        for c in b.tensors
        if b.shape(c) == (groups, n, k // 2) and b.dtype(c) == torch.uint8 and c in b.weights
    ]
    if there and b.rng.random() < 0.7:
        return b.weights[b.rng.choice(there)]
    parts = [b.input(t) for t in values.weight(b.rng, groups, n, k)]
    if b.rng.random() < 0.2:
        i = b.rng.randrange(3)
        parts[i] = disguised(b, parts[i])
    b.weights[parts[0]] = parts
    return parts


def rows_in(b: Builder, x: Node) -> int:
    """How many rows a tensor [..., K] has."""
    return b.real[x].numel() // max(1, b.shape(x)[-1]) if b.shape(x)[-1] else 0


def like(b: Builder, shape: tuple[int, ...], dtype: torch.dtype, rows: bool = False) -> Node:
    """Any value of a shape and dtype, or a new input."""
    n = b.maybe(
        lambda n: b.shape(n) == shape and b.dtype(n) == dtype,
        lambda: b.new(shape, dtype, rows),
        0.6,
    )
    return disguised(b, n)


# Calls --------------------------------------------------------------------------------------------


def product(b: Builder) -> Any:
    a = disguised(b, activations(b, whole_blocks))
    ends = ends_of(b, rows_in(b, a))
    w = weight_of(b, b.shape(ends)[0], b.rng.choice((*WIDTHS, 1, 24)), b.shape(a)[-1])
    more: dict[str, Any] = {}
    if b.rng.random() < 0.2:
        more["out_dtype"] = b.rng.choice(FLOATS)
    if b.rng.random() < 0.05:
        more["activation_format"] = "nvfp4"
    return b.call(O.nvfp4_grouped_mm.default, a, *w, ends, **more)


def float_product(b: Builder) -> Any:
    """With a float weight, stored either way, that may have been computed."""
    a = disguised(b, activations(b, lambda k: 0 < k <= 64))
    ends = ends_of(b, rows_in(b, a))
    groups, n, k, transposed = (
        b.shape(ends)[0],
        b.rng.choice((*WIDTHS, 1, 24)),
        b.shape(a)[-1],
        b.rng.random() < 0.5,
    )
    w = like(
        b, (groups, k, n) if transposed else (groups, n, k), b.rng.choice((b.dtype(a), *FLOATS))
    )
    return b.call(
        O.grouped_mm.default, a, [w], ends, weight_format=FORMATS[b.dtype(w)], transposed=transposed
    )


def two_products(b: Builder) -> Any:
    """Two products with a step or two between them, on the same ends or others."""
    y = product(b)
    if b.raised or not whole_blocks(b.shape(y)[-1]) or len(b.shape(y)) != 2:
        return y
    y = b.call(aten.relu.default, y) if b.rng.random() < 0.5 else y
    ends = ends_of(b, rows_in(b, y))
    return b.call(
        O.nvfp4_grouped_mm.default,
        y,
        *weight_of(b, b.shape(ends)[0], b.rng.choice(WIDTHS), b.shape(y)[-1]),
        ends,
    )


def group_add(b: Builder) -> Any:
    y = b.pick(lambda n: len(b.shape(n)) == 2 and b.dtype(n) in FLOATS)
    ends = ends_of(b, b.shape(y)[0])
    return b.call(
        O.group_add.default, y, like(b, (b.shape(ends)[0], b.shape(y)[1]), b.dtype(y)), ends
    )


def route(b: Builder) -> Any:
    groups = b.rng.choice((1, 2, 3, 4, MOST_GROUPS))

    def good(n: Node) -> bool:
        real = b.real[n]
        return (
            real.dim() == 2
            and real.dtype in (torch.int32, torch.int64)
            and bool(((real >= -1) & (real < groups)).all())
        )

    wrong = b.rng.random() < 0.03
    ids = b.maybe(
        lambda n: good(n) or (wrong and b.dtype(n) == torch.int64 and len(b.shape(n)) == 2),
        lambda: new_ids(b, groups),
        0.5,
    )
    local = {"first_expert": b.rng.choice((0, 1, groups))} if b.rng.random() < 0.2 else {}
    return b.call(O.route.default, disguised(b, ids), groups, **local)


def new_ids(b: Builder, groups: int) -> Node:
    """ids of the experts of some tokens."""
    shape = (some_rows(b), b.rng.choice((1, 2, 2, 3)))
    return b.input(
        torch.randint(b.rng.choice((0, 0, -1)), groups, shape, generator=values.generator(b.rng)),
        rows=True,
    )


def routed_rows(b: Builder) -> Any:
    """Tokens picked by a routing."""
    _, row_of, _ = route(b)
    if b.raised:
        return row_of
    tokens = 1 + int(b.real[row_of].max()) if b.real[row_of].numel() else 1
    x = b.maybe(
        lambda n: len(b.shape(n)) == 2 and b.shape(n)[0] >= tokens and b.dtype(n) in FLOATS,
        lambda: b.new((tokens, b.rng.choice(WIDTHS)), b.rng.choice(FLOATS), rows=True),
    )
    return (
        b.call(aten.index.Tensor, x, [row_of])
        if b.rng.random() < 0.5
        else b.call(aten.index_select.default, x, 0, row_of)
    )


def combine(b: Builder) -> Any:
    y = b.pick(lambda n: len(b.shape(n)) == 2 and b.dtype(n) in FLOATS)
    rows = b.shape(y)[0]

    def good(n: Node) -> bool:
        real = b.real[n]
        return (
            real.dim() == 2
            and real.dtype in (torch.int32, torch.int64)
            and bool(((real >= 0) & (real < rows)).all())
        )

    if not rows:
        raise Skip
    shape = (b.rng.choice((1, 3, rows)), b.rng.choice((1, 2)))
    slots = b.maybe(
        good,
        lambda: b.input(
            torch.randint(0, rows, shape, generator=values.generator(b.rng)).int(), rows=True
        ),
    )
    return b.call(
        O.combine.default,
        y,
        disguised(b, slots),
        like(b, b.shape(slots), b.rng.choice(FLOATS), rows=True),
    )


def swiglu(b: Builder) -> Any:
    x = b.pick(lambda n: b.dtype(n) in FLOATS and len(b.shape(n)) >= 1 and b.shape(n)[-1] % 2 == 0)
    scale = (
        like(b, b.shape(x)[:-1], b.rng.choice(FLOATS), rows=True)
        if b.rng.random() < 0.3 and len(b.shape(x)) > 1
        else None
    )
    more = b.rng.choice(({}, {}, {"limit": 2.0}, {"alpha": 2.0, "up_offset": 1.0}))
    return b.call(O.scaled_swiglu.default, x, scale, b.rng.choice((0, 0, 1, 8)), **more)


def expert_mlp(b: Builder) -> Any:
    x = activations(b, whole_blocks)
    lead, h = b.shape(x)[:-1], b.shape(x)[-1]
    groups, k, i = b.rng.choice((1, 2, 4)), b.rng.choice((1, 2)), b.rng.choice((16, 32))
    ids = b.input(
        torch.randint(
            b.rng.choice((0, 0, -1)), groups, (*lead, k), generator=values.generator(b.rng)
        ),
        rows=True,
    )
    w = like(b, (*lead, k), b.rng.choice(FLOATS), rows=True)
    up, down = weight_of(b, groups, 2 * i, h), weight_of(b, groups, h, i)
    bias = (
        [like(b, (groups, 2 * i), b.dtype(x)), like(b, (groups, h), b.dtype(x))]
        if b.rng.random() < 0.4
        else [None, None]
    )
    forms = (
        {"activation": swiglu_text(interleave=8)},
        {"activation": swiglu_text(limit=2.0, alpha=2.0, up_offset=1.0)},
        {"scale_on": "input"},
        {"first_expert": 1},
    )
    more = b.rng.choice(({}, {}, *forms))
    return b.call(O.expert_mlp.default, x, disguised(b, ids), w, *up, *down, *bias, **more)


def f16a(b: Builder) -> Any:
    a = activations(b, whole_blocks)
    groups, n, k = b.rng.choice((1, 2, 4)), b.rng.choice(WIDTHS), b.shape(a)[-1]
    codes, scales, decode = values.weight(b.rng, groups, n, k)
    sizes = values.group_ends(b.rng, groups, rows_in(b, a)).diff(
        prepend=torch.zeros(1, dtype=torch.int32)
    )
    starts, padded = sizes.cumsum(0) - sizes, (sizes + 127) // 128 * 128
    problem = torch.stack([sizes, torch.full_like(sizes, n), torch.full_like(sizes, k)], 1)
    offsets = [b.input(t.int()) for t in (starts, padded.cumsum(0) - padded, problem)]
    fp4 = b.call(aten.permute.default, b.input(codes), [0, 2, 1])
    stored = b.input(SF128X4.forward(scales))
    parts = [fp4, stored, b.input(decode.reshape(groups, -1)[:, 0].contiguous()), *offsets]
    return b.call(O.f16a_nvfp4weight_scaled_grouped_mm.default, a, *parts)


def quantize(b: Builder) -> Any:
    """A weight made in the graph, and a product with it."""
    x = b.pick(
        lambda n: (
            b.dtype(n) in FLOATS
            and len(b.shape(n)) == 3
            and whole_blocks(b.shape(n)[-1])
            and b.real[n].numel() <= 4096
        )
    )
    parts = b.call(O.nvfp4_quantize.default, x)
    if not b.raised:
        b.weights[parts[0]] = parts
    return parts[0]


def swizzle(b: Builder) -> Any:
    rows, cols = some_rows(b), b.rng.choice((1, 2, 4))
    scale = torch.randint(
        0, 120, (rows, cols), dtype=torch.uint8, generator=values.generator(b.rng)
    ).view(torch.float8_e4m3fn)
    return b.call(
        O.grouped_swizzle_block_scale.default,
        disguised(b, b.input(scale, rows=True)),
        ends_of(b, rows),
    )


STEPS = (
    product,
    product,
    product,
    float_product,
    two_products,
    group_add,
    group_add,
    route,
    routed_rows,
    combine,
    swiglu,
    expert_mlp,
    f16a,
    quantize,
    swizzle,
)
