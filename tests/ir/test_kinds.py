"""What each kind of operation means, against torch or plain loops that share no code with it. A
kind without a case here fails.
"""

from __future__ import annotations

import loops
import ml_dtypes
import numpy as np
import pytest
import torch
from fusions import About, assert_same_bits, evaluate, in_groups, of_groups
from hypothesis import example, given, strategies as st
from pointwise import BINARY, COMPARISONS, LOGICAL, UNARY, sample
from routings import Partition, Routing, partitions, routings

from fusion_moe import FusionDefinition
from fusion_moe.encodings import ENCODINGS, NVFP4, Quantized, quantize
from fusion_moe.errors import FusionError, GroupsError, ShapeError
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.types import DTYPES
from fusion_moe.layouts import W16X64

NAN = float("nan")
about = About()


def test_every_kind_has_a_case():
    """Or is in test_collectives.py."""
    kinds = {name for name, kind in KINDS.items() if kind.role != "collective"}
    assert about.kinds == kinds


def run(build, *tensors, groups=None):
    """The outputs of one operation: build(fd, *values) on inputs like these tensors."""
    fd = FusionDefinition()
    values = [fd.from_pytorch(t) for t in tensors]
    made = build(fd, *values)
    for v in made if isinstance(made, tuple) else (made,):
        fd.add_output(v)
    return evaluate(fd.fusion(), *tensors)


def close(found, expected, dtype):
    """Within one rounding of `dtype` (and a few of float32, in which torch computes) of a float64
    result.
    """
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 4 * torch.finfo(dtype).eps
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(),
        expected.double(),
        rtol=eps,
        atol=torch.finfo(torch.float32).eps if dtype != torch.float64 else 1e-15,
    )


# Pointwise ----------------------------------------------------------------------------------------


@about(*UNARY)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype):
    x = sample(name).to(DTYPES[dtype])
    (found,) = run(lambda fd, v: getattr(fd.ops, name)(v), x)
    close(found, UNARY[name](x.double()), DTYPES[dtype])


@about(*BINARY)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", BINARY)
def test_binary(name, dtype):
    x, y = sample(name).to(DTYPES[dtype]), sample(name).flip(0).to(DTYPES[dtype])
    for a, b in ((x, y), (x, y[:, :1]), (x[:1], y)):  # sizes of 1 are repeated
        (found,) = run(lambda fd, u, v: getattr(fd.ops, name)(u, v), a, b)
        close(found, BINARY[name](a.double(), b.double()), DTYPES[dtype])
    (found,) = run(lambda fd, u: getattr(fd.ops, name)(u, 1.5), x)
    close(found, BINARY[name](x.double(), torch.tensor(1.5).double()), DTYPES[dtype])


@about(*COMPARISONS)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(name):
    x = torch.tensor([[-1.0, 0.0, -0.0, 2.0, NAN]])
    y = torch.tensor([[-1.0, -0.0, 1.0, 1.0, NAN]])
    (found,) = run(lambda fd, u, v: getattr(fd.ops, name)(u, v), x, y)
    assert found.tolist() == [
        [COMPARISONS[name](a, b) for a, b in zip(x[0].tolist(), y[0].tolist(), strict=True)]
    ]
    (found,) = run(lambda fd, u: getattr(fd.ops, name)(u, 2), torch.arange(5, dtype=torch.int32))
    assert found.tolist() == [COMPARISONS[name](i, 2) for i in range(5)]


FALSE_TRUE = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
CHOICE = torch.tensor([[True], [False]])


@about(*LOGICAL, "minimum", "maximum", "where", "index_select", "invert")
@pytest.mark.parametrize(
    ("build", "tensors", "expected"),
    [
        (lambda fd, a, b: fd.ops.logical_and(a, b), FALSE_TRUE, [False, False, False, True]),
        (lambda fd, a, b: fd.ops.logical_or(a, b), FALSE_TRUE, [False, True, True, True]),
        (lambda fd, a, b: fd.ops.logical_not(a), FALSE_TRUE, [True, True, False, False]),
        (lambda fd, x: fd.ops.minimum(x, 1.0), [torch.tensor([NAN, 2.0])], [NAN, 1.0]),
        (lambda fd, x: fd.ops.maximum(1.0, x), [torch.tensor([NAN, 2.0])], [NAN, 2.0]),
        (
            lambda fd, *v: fd.ops.where(*v),
            [CHOICE, torch.tensor([[1.0, 2.0], [3.0, NAN]]), torch.tensor([[NAN, 5.0]])],
            [[1.0, 2.0], [NAN, 5.0]],
        ),
        (
            lambda fd, c, a: fd.ops.where(c, 0.5, a),
            [CHOICE, torch.tensor([[1.0, 2.0], [3.0, NAN]]).bfloat16()],
            torch.tensor([[0.5, 0.5], [3.0, NAN]]).bfloat16(),
        ),
        (
            lambda fd, x, at: fd.ops.index_select(x, at, dim=0),
            [torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([2, 0, 0, 1])],
            [[5.0, 6.0], [1.0, 2.0], [1.0, 2.0], [3.0, 4.0]],
        ),
        (
            lambda fd, x, at: fd.ops.index_select(x, at, dim=1),
            [torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([2, 0, 0, 1])],
            [[3.0, 1.0, 1.0, 2.0], [6.0, 4.0, 4.0, 5.0]],
        ),
        (
            lambda fd, slots: fd.ops.invert(slots, rows=6),
            [torch.tensor([[4, 0], [1, 5], [3, 2]], dtype=torch.int32)],
            torch.tensor([1, 2, 5, 4, 0, 3], dtype=torch.int32),
        ),
    ],
)
def test_by_hand(build, tensors, expected):
    assert_same_bits(run(build, *tensors), [torch.as_tensor(expected)])


@about("cast")
@pytest.mark.parametrize("to", ["f32", "bf16", "f16", "f8e4m3", "f64", "i32", "bool"])
def test_cast(to):
    # ties to even in bf16 among them
    x = torch.tensor([0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.3, 447.9, 1e-8, 2.0**-9])
    numpy = {
        "bf16": ml_dtypes.bfloat16,
        "f8e4m3": ml_dtypes.float8_e4m3fn,
        "f32": np.float32,
        "f16": np.float16,
        "f64": np.float64,
    }
    want = x.numpy().astype(numpy.get(to, {"i32": np.int32, "bool": np.bool_}.get(to)))
    (found,) = run(lambda fd, v: fd.ops.cast(v, dtype=to), x)
    assert found.dtype == DTYPES[to]
    assert found.double().tolist() == want.astype(np.float64).tolist()


# Shapes -------------------------------------------------------------------------------------------

X = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@about("reshape", "permute", "broadcast_in_dim", "slice", "pad", "cat", "full")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda fd, x: fd.ops.reshape(x, new_shape=(6, 4)), X.numpy().reshape(6, 4)),
        (lambda fd, x: fd.ops.permute(x, dims=(2, 0, 1)), X.numpy().transpose(2, 0, 1)),
        (
            lambda fd, x: fd.ops.broadcast_in_dim(x, shape=(2, 5, 3, 4), broadcast_dims=(0, 2, 3)),
            np.stack([X.numpy()] * 5, 1),
        ),
        (
            lambda fd, x: fd.ops.slice(x, start_indices=(0, 1, 1), end_indices=(2, 3, 2)),
            X.numpy()[0:2, 1:3, 1:2],
        ),
        (
            lambda fd, x: fd.ops.pad(x, before=(0, 1, 0), after=(2, 0, 1), shape=(4, 4, 5)),
            np.pad(X.numpy(), ((0, 2), (1, 0), (0, 1))),
        ),
        (lambda fd, x: fd.ops.cat(x, x, dim=1), np.concatenate([X.numpy()] * 2, 1)),
        (
            lambda fd, x: fd.ops.full(shape=(2, 3), fill_value=-0.0, dtype="f32"),
            np.full((2, 3), -0.0, np.float32),
        ),
        (lambda fd, x: fd.ops.full(shape=(), fill_value=7, dtype="i64"), np.full((), 7)),
    ],
)
def test_shapes(build, expected):
    (found,) = run(build, X)
    assert_same_bits(
        [found], [torch.from_numpy(np.ascontiguousarray(expected)).reshape(expected.shape)]
    )


@about("sum")
@pytest.mark.parametrize(("dims", "keepdim"), [((1,), False), ((0, 2), True), ((0, 1, 2), False)])
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_sum(dims, keepdim, dtype):
    x = torch.randn(5, 6, 700, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    (found,) = run(lambda fd, v: fd.ops.sum(v, dims=dims, keepdim=keepdim), x)
    want = x.double().numpy().sum(dims, keepdims=keepdim)
    # rounded once: adding up in bf16 would be off by far more
    eps = {"f64": 1e-14, "f32": 1e-6, "bf16": 2.0**-8}[dtype]
    np.testing.assert_allclose(
        found.double().numpy(), want, rtol=eps, atol=100 * eps if dtype != "bf16" else 1e-3
    )


@about("logsumexp")
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_logsumexp(dtype):
    """Far from 0, of masked elements, and of none that is finite."""
    inf = float("inf")
    x = torch.randn(4, 6, 700, generator=torch.Generator().manual_seed(0)) + 200
    x[0, 0, 1:], x[0, 1], x[0, 2, 3], x[0, 3, 3] = -inf, -inf, inf, NAN
    x = x.to(DTYPES[dtype])
    (found,) = run(lambda fd, v: fd.ops.logsumexp(v), x)
    assert found[0, 3].isnan()
    close(
        found.nan_to_num(7, inf, -inf),
        x.double().logsumexp(-1, True).nan_to_num(7, inf, -inf),
        DTYPES[dtype],
    )


# Rows ---------------------------------------------------------------------------------------------


@about("ends", "partition")
def test_ends_are_seen_to_be_ends():
    x = torch.randn(5, 2)
    for good in ([0, 3, 5], [0, 0, 0], [5, 5, 5], [1, 2, 4]):
        rows, ends = run(in_groups, x, torch.tensor(good, dtype=torch.int32))
        assert rows.equal(x)
        assert ends.tolist() == good
    for bad in ([0, 3, 6], [-1, 0, 5], [3, 2, 5]):
        with pytest.raises(GroupsError):
            run(in_groups, x, torch.tensor(bad, dtype=torch.int32))


@about("ends", "route")
def test_ends_may_be_of_rows_that_were_partitioned():
    """as many of them as there are groups: they are a vector again"""

    def build(fd, x, ids):
        _, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", 3))
        return fd.ops.partition(
            x, fd.ops.ends(row_of, rows=x.type.shape[0], groups=fd.define_groups("h", 4))
        )

    x = torch.randn(5, 2)
    (rows,) = run(build, x, torch.zeros(4, 1, dtype=torch.int64))
    assert rows.equal(x)


@about("problem_ends")
@given(partitions(), st.data())
def test_problem_ends(partition: Partition, data):
    """Ends from starts and sizes; one wrong number anywhere is found."""
    count, (n, k) = len(partition.sizes), (24, 32)
    starts = [sum(partition.sizes[:g]) for g in range(count)]
    padded = [sum(-(-m // 128) * 128 for m in partition.sizes[:g]) for g in range(count)]
    parts = [
        torch.tensor(t, dtype=torch.int32)
        for t in (starts, [[m, n, k] for m in partition.sizes], padded)
    ]

    def build(fd, x, *of):
        ends = fd.ops.problem_ends(
            *of, rows=partition.rows, groups=fd.define_groups("g", count), n=n, k=k
        )
        return fd.ops.partition(x, ends), ends

    x = torch.zeros(partition.rows, 1)
    assert run(build, x, *parts)[1].equal(partition.ends)
    wrong, group = data.draw(st.integers(0, 2)), data.draw(st.integers(0, count - 1))
    parts[wrong][group] += data.draw(st.sampled_from((-1, partition.spare + 1)))
    with pytest.raises(GroupsError, match=rf"for group \d+ of {count}"):
        run(build, x, *parts)


@about("partition")
def test_rows_are_partitioned_once():
    def build(fd, x, offs):
        first, second = (
            fd.ops.ends(offs, rows=5, groups=fd.define_groups(name, 2)) for name in "gh"
        )
        return fd.ops.partition(fd.ops.partition(x, first), second)

    with pytest.raises(
        FusionError,
        match=r"rows of f32\[5/g, 2\] are already partitioned; "
        r"expected plain rows, or rows partitioned by h",
    ):
        run(build, torch.randn(5, 2), torch.tensor([1, 5], dtype=torch.int32))


@about("zero_rest")
@given(partitions())
def test_zero_rest(partition: Partition):
    x = torch.randn(partition.rows, 3)
    x[sum(partition.sizes) :] = NAN
    (found,) = run(of_groups("zero_rest"), x, partition.ends)
    assert found[: sum(partition.sizes)].equal(x[: sum(partition.sizes)])
    assert not found[sum(partition.sizes) :].any()


@about("route")
@given(routings(), st.sampled_from((torch.int32, torch.int64)))
def test_route(routing: Routing, dtype):
    ends, row_of, slot_of = run(
        lambda fd, ids: fd.ops.route(ids, groups=fd.define_groups("g", routing.groups)),
        routing.ids.to(dtype),
    )
    slots = [(g, t, s) for t, ids in enumerate(routing.ids.tolist()) for s, g in enumerate(ids)]
    want = sorted(slots)  # by group, then token, then slot
    assert ends.tolist() == [sum(x <= g for x, *_ in slots) for g in range(routing.groups)]
    assert row_of.tolist() == [t for _, t, _ in want]
    assert slot_of.tolist() == [
        [want.index((g, t, s)) for s, g in enumerate(ids)]
        for t, ids in enumerate(routing.ids.tolist())
    ]
    assert {ends.dtype, row_of.dtype, slot_of.dtype} == {torch.int32}


@about("route")
@given(
    routings(), st.integers(0, 9), st.integers(0, 9), st.sampled_from((torch.int32, torch.int64))
)
def test_route_to_local_experts(routing: Routing, first, count, dtype):
    """As if all other ids were those of one more group, which has no end."""
    ids = (routing.ids - 1).to(dtype)
    found = run(
        lambda fd, ids: fd.ops.route(ids, groups=fd.define_groups("g", count), first_expert=first),
        ids,
    )
    local = torch.where((ids >= first) & (ids < first + count), ids - first, count)
    ends, *sorted_slots = run(
        lambda fd, ids: fd.ops.route(ids, groups=fd.define_groups("g", count + 1)), local
    )
    assert all(a.equal(b) for a, b in zip(found, (ends[:-1], *sorted_slots), strict=True))
    if first == 0 and (local == ids).logical_or(ids == -1).all():  # all are here
        everyone = run(lambda fd, ids: fd.ops.route(ids, groups=fd.define_groups("g", count)), ids)
        assert all(a.equal(b) for a, b in zip(everyone, found, strict=True))


@about("place")
@given(routings(), st.sampled_from((torch.int32, torch.int64)), st.data())
def test_place(routing: Routing, dtype, data):
    """Each id's entry of the table; -1 for -1. Other ids, and places elsewhere, are errors."""
    table = data.draw(
        st.lists(st.integers(-1, 9), min_size=routing.groups, max_size=routing.groups)
    )

    def placed(ids, table):
        return run(lambda fd, *v: fd.ops.place(*v, here=10), ids, torch.tensor(table).int())

    ids = torch.cat([routing.ids, torch.full_like(routing.ids[:1], -1)]).to(dtype)
    (found,) = placed(ids, table)
    want = [[-1 if i < 0 else table[i] for i in token] for token in ids.tolist()]
    assert (found.tolist(), found.dtype) == (want, torch.int32)
    for bad in (-2, routing.groups) if ids.numel() else ():
        ids[-1, 0] = bad
        with pytest.raises(GroupsError, match="out of range"):
            placed(ids, table)
    for bad in (-2, 10, 2**31 - 1):
        with pytest.raises(GroupsError, match=rf"expert_map\[0\] = {bad}; expected 0 to 9"):
            placed(ids[:0], [bad, *table])


@about("route")
def test_local_experts_of_ids_far_off():
    """Nothing overflows."""
    for dtype in torch.int32, torch.int64:
        limits = torch.iinfo(dtype)
        ids = torch.tensor([[limits.min, 2**31 - 2], [limits.max, 0]], dtype=dtype)
        ends, _, slot_of = run(
            lambda fd, ids: fd.ops.route(
                ids, groups=fd.define_groups("g", 1), first_expert=2**31 - 2
            ),
            ids,
        )
        assert (ends.tolist(), slot_of.tolist()) == ([1], [[1, 0], [2, 3]])
    for bad in (-1, 2**31 - 1):
        with pytest.raises(ShapeError, match="first_expert"):
            run(
                lambda fd, ids, bad=bad: fd.ops.route(
                    ids, groups=fd.define_groups("g", 1), first_expert=bad
                ),
                ids,
            )


@about("index_put_accumulate")
def test_index_put_accumulate():
    acc, at, rows = (
        torch.randn(4, 2),
        torch.tensor([3, 0, 3, 3], dtype=torch.int32),
        torch.randn(4, 2),
    )
    want = acc.numpy().copy()
    np.add.at(want, at.numpy(), rows.numpy())  # in order
    (found,) = run(lambda fd, *v: fd.ops.index_put_accumulate(*v), acc, at, rows)
    assert found.tolist() == want.tolist()
    (empty,) = run(lambda fd, *v: fd.ops.index_put_accumulate(*v), acc, at[:0], rows[:0])
    assert empty.equal(acc)


def best_first(numbers):
    """Places of numbers in a list, the largest first, NaN before all, of equal ones the first."""
    return sorted(
        range(len(numbers)),
        key=lambda e: (not np.isnan(numbers[e]), -numbers[e] if not np.isnan(numbers[e]) else 0, e),
    )


MASKED = st.sampled_from((0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), NAN))


@about("topk_ids")
@given(st.data())
def test_topk_ids(data):
    """Any numbers, many of them equal; groups of experts; a bias on them."""
    n_group, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    topk_group, best = data.draw(st.integers(1, n_group)), data.draw(st.integers(1, min(2, size)))
    k, with_bias = data.draw(st.integers(1, topk_group * size)), data.draw(st.booleans())
    numbers = st.one_of(MASKED, st.floats(-8, 8, width=16))
    rows = data.draw(
        st.lists(st.lists(numbers, min_size=n_group * size, max_size=n_group * size), max_size=3)
    )
    bias = data.draw(
        st.lists(st.floats(-1, 1, width=16), min_size=n_group * size, max_size=n_group * size)
    )
    logits, given_bias = torch.tensor(rows).view(-1, n_group * size), torch.tensor(bias)
    how = {
        "k": k,
        "scoring": "sigmoid",
        "n_group": n_group,
        "topk_group": topk_group,
        "best_of_group": best,
    }
    (found,) = run(
        lambda fd, x, *b: fd.ops.topk_ids(x, *(b or [0]), **how),
        *([logits, given_bias] if with_bias else [logits]),
    )
    scores = (
        logits.sigmoid() + given_bias
        if with_bias
        else logits.sigmoid()
        if n_group > 1 and best > 1
        else logits
    )
    assert found.dtype == torch.int64
    for row, ids in zip(scores.tolist(), found.tolist(), strict=True):
        groups = [row[g * size : (g + 1) * size] for g in range(n_group)]
        sums = [
            float(torch.tensor([group[e] for e in best_first(group)[:best]]).sum())
            for group in groups
        ]
        kept = best_first(sums)[:topk_group]
        assert ids == [e for e in best_first(row) if e // size in kept][:k]


@about("topk_ids", "topk_weights")
@pytest.mark.parametrize("k", [1, 3, 40])
def test_routers_as_torch(k):
    """With different scores, what torch.topk chooses; Mixtral's weights and gpt-oss', which are the
    softmax of chosen logits.
    """
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    (ids,) = run(lambda fd, x: fd.ops.topk_ids(x, 0, k=k), logits)
    values, want = logits.softmax(1).topk(k)
    assert ids.equal(want)
    (plain,) = run(lambda fd, x, ids: fd.ops.topk_weights(x, ids), logits, ids)
    assert plain.equal(values)
    (renormalized,) = run(
        lambda fd, x, ids: fd.ops.topk_weights(x, ids, renormalize=True), logits, ids
    )
    torch.testing.assert_close(
        renormalized, values / values.sum(1, keepdim=True), rtol=1e-6, atol=0
    )
    assert renormalized.equal(logits.topk(k).values.softmax(1))
    (sigmoids,) = run(
        lambda fd, x, ids: fd.ops.topk_weights(x, ids, scoring="sigmoid", renormalize=True),
        logits,
        ids,
    )
    chosen = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(sigmoids, chosen / chosen.sum(1, keepdim=True), rtol=1e-6, atol=0)


@about("topk_weights")
def test_weights_of_masked_and_nan():
    """-inf masks an expert, even with nothing else to choose; a row of NaN, or of -inf alone, has
    weights that are NaN.
    """
    logits = torch.tensor(
        [[-float("inf"), 0.0, -float("inf")], [0.0, NAN, 1.0], [-float("inf")] * 3]
    )
    (ids,) = run(lambda fd, x: fd.ops.topk_ids(x, 0, k=2), logits)
    assert ids.tolist() == [[1, 0], [1, 2], [0, 1]]
    for renormalize in False, True:
        (w,) = run(
            lambda fd, x, ids, r=renormalize: fd.ops.topk_weights(x, ids, renormalize=r),
            logits,
            ids,
        )
        assert w[0].tolist() == [1, 0]
        assert w[1:].isnan().all()


@about("routing_map")
def test_routing_map():
    """Ids that are no experts, and one that is there twice."""
    ids = torch.tensor([[0, 2], [-1, 1], [3, 3], [4, 9]])
    (found,) = run(lambda fd, v: fd.ops.routing_map(v, experts=4), ids)
    assert found.tolist() == [[e in row for e in range(4)] for row in ids.tolist()]


@about("topk_weights_backward")
def test_topk_weights_backward():
    """Of softmax over two experts: p (1 - p) dw, in both directions."""
    logits, ids, dw = torch.tensor([[0.5, -1.0]]), torch.tensor([[0]]), torch.tensor([[3.0]])
    (found,) = run(lambda fd, *v: fd.ops.topk_weights_backward(*v), logits, ids, dw)
    p = 1 / (1 + np.exp(-1.5))
    torch.testing.assert_close(found, torch.tensor([[3 * p * (1 - p), -3 * p * (1 - p)]]).float())
    (alone,) = run(
        lambda fd, *v: fd.ops.topk_weights_backward(*v, renormalize=True), logits, ids, dw
    )
    assert alone.tolist() == [[0, 0]]


@about("combine")
@given(routings(), st.sampled_from(("f32", "bf16")))
def test_combine_adds_slots_in_order(routing: Routing, dtype):
    """As a loop in float32 does: exactly."""
    (tokens, slots), generator = routing.ids.shape, torch.Generator().manual_seed(1)
    slot_of = torch.randperm(tokens * slots, generator=generator).view(tokens, slots).int()
    y, w = (
        torch.randn(tokens * slots, 3, generator=generator).to(DTYPES[dtype]),
        torch.randn(tokens, slots, generator=generator),
    )
    (found,) = run(lambda fd, *v: fd.ops.combine(*v), y, slot_of, w)
    wide, want = y.float().numpy(), np.zeros((tokens, 3), np.float32)
    for t in range(tokens):
        for s in range(slots):
            want[t] += wide[slot_of[t, s]] * w.numpy()[t, s]
    assert found.tolist() == want.tolist()


# Products -----------------------------------------------------------------------------------------


def weight(groups: int, n: int, k: int, runs: int = 0, seed: int = 0) -> Quantized:
    """Random bytes: every code and every positive scale occurs."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x70, (groups, n, k // 16), generator=g, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return Quantized(
        codes,
        scale,
        torch.rand(groups, *([runs] if runs else []), generator=g) + 0.5,
        encoding=NVFP4,
    )


def packed(fd, *parts):
    return fd.ops.pack(*parts, encoding="nvfp4", layout="linear")


@about("grouped_mm", "grouped_mm_t", "pack")
@given(partitions(), st.sampled_from(("f32", "bf16")), st.sampled_from((0, 1, 2)), st.booleans())
def test_products_with_nvfp4_weights(partition: Partition, dtype, runs, transposed):
    n, k = 4, 32
    q = weight(len(partition.sizes), n, k, runs)
    a = torch.randn(
        partition.rows, n if transposed else k, generator=torch.Generator().manual_seed(3)
    ).to(DTYPES[dtype])
    a[sum(partition.sizes) :] = NAN  # rows of no group are not read

    def build(fd, a, offs, *parts):
        rows, ends = in_groups(fd, a, offs)
        return (fd.ops.grouped_mm_t if transposed else fd.ops.grouped_mm)(
            rows, packed(fd, *parts), ends
        )

    (found,) = run(build, a, partition.ends, *q)
    w = loops.decoded(*q).numpy()
    want = np.zeros((partition.rows, k if transposed else n))
    scale = np.zeros_like(want)
    for g, rows in partition.runs:
        matrix = w[g] if transposed else w[g].T
        want[rows] = a.double().numpy()[rows] @ matrix
        scale[rows] = np.abs(a.double().numpy()[rows]) @ np.abs(matrix)
    assert found.dtype == torch.float32
    assert (np.abs(found.double().numpy() - want) <= 2.0**-20 * scale).all()


@about("grouped_mm", "grouped_mm_t", "pack")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [6, 128, 130])
def test_how_a_weight_is_stored_changes_no_product(n, transposed):
    """Swizzled block scales, whatever their padding holds, and codes seen transposed."""
    partition, k = Partition((3, 0, 4), 1), 48
    q = weight(3, n, k, 2)
    stored = loops.swizzled(q.block_scale, padding=0x7F)  # NaN
    a = torch.randn(
        partition.rows, n if transposed else k, generator=torch.Generator().manual_seed(3)
    )

    def build(fd, a, offs, codes, linear, swizzled, decode, turned):
        rows, ends = in_groups(fd, a, offs)
        kind = fd.ops.grouped_mm_t if transposed else fd.ops.grouped_mm
        other = fd.ops.pack(
            turned, swizzled, decode, encoding="nvfp4", layout="sf128x4", transposed=True
        )
        return kind(rows, packed(fd, codes, linear, decode), ends), kind(
            rows, other, ends, w_layout="sf128x4"
        )

    want, found = run(
        build, a, partition.ends, q.codes, q.block_scale, stored, q.decode_scale, q.codes.mT
    )
    assert want.any()
    assert_same_bits([found], [want])


def test_a_product_says_how_its_weight_is_stored():
    def build(fd, a, offs, codes, scale, decode):
        rows, ends = in_groups(fd, a, offs)
        return fd.ops.grouped_mm(
            rows, fd.ops.pack(codes, scale, decode, encoding="nvfp4", layout="sf128x4"), ends
        )

    q = weight(2, 6, 32)
    with pytest.raises(
        ShapeError,
        match=r"w is nvfp4\[2, 6, 32\]@sf128x4; expected the layout "
        r"linear; w_layout states it",
    ):
        run(
            build,
            torch.randn(5, 32),
            Partition((2, 3), 0).ends,
            q.codes,
            loops.swizzled(q.block_scale),
            q.decode_scale,
        )
    with pytest.raises(
        ShapeError,
        match=r"block_scale \[2, 6, 2\]; expected \[2, 128, 4\].* in "
        r"the layout sf128x4",
    ):
        run(build, torch.randn(5, 32), Partition((2, 3), 0).ends, *q)


@about("grouped_mm", "grouped_mm_t", "grouped_outer")
@given(partitions())
def test_products_of_small_integers_are_exact(partition: Partition):
    g = torch.Generator().manual_seed(5)
    a, b = (torch.randint(-4, 5, (partition.rows, k), generator=g).float() for k in (5, 3))
    w = torch.randint(-4, 5, (len(partition.sizes), 3, 5), generator=g).bfloat16()
    a[sum(partition.sizes) :] = b[sum(partition.sizes) :] = NAN

    def build(fd, a, b, w, offs):
        a, ends = in_groups(fd, a, offs)
        b = fd.ops.partition(b, ends)
        return (
            fd.ops.grouped_mm(a, w, ends),
            fd.ops.grouped_mm_t(b, w, ends),
            fd.ops.grouped_outer(b, a, ends),
        )

    y, da, dw = run(build, a, b, w, partition.ends)
    want = (
        np.zeros((partition.rows, 3)),
        np.zeros((partition.rows, 5)),
        np.zeros((len(partition.sizes), 3, 5)),
    )
    a64, b64, w64 = a.double().numpy(), b.double().numpy(), w.double().numpy()
    for group, rows in partition.runs:
        want[0][rows], want[1][rows], want[2][group] = (
            a64[rows] @ w64[group].T,
            b64[rows] @ w64[group],
            b64[rows].T @ a64[rows],
        )
    for found, expected in zip((y, da, dw), want, strict=True):
        np.testing.assert_array_equal(found.double().numpy(), expected)


@about("grouped_mm", "grouped_mm_t", "grouped_outer", "group_sum", "combine")
def test_sums_of_float64_are_float64():
    """Of numbers that float32 does not hold."""
    x, w, offs = (
        1 + torch.rand(3, 4).double() * 1e-12,
        1 + torch.rand(2, 5, 4).double() * 1e-12,
        torch.tensor([1, 3], dtype=torch.int32),
    )
    slots, ones = torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2)

    def build(fd, x, w, offs, slots, ones):
        ends = fd.groups_of(offs, 3)
        rows = fd.ops.partition(x, ends)
        y = fd.ops.grouped_mm(rows, w, ends)
        made = (
            y,
            fd.ops.grouped_mm_t(y, w, ends),
            fd.ops.grouped_outer(rows, y, ends),
            fd.ops.group_sum(y, ends),
        )
        return *made, fd.ops.combine(y, slots, ones)

    found = run(build, x, w, offs, slots, ones)
    y = torch.cat([x[:1] @ w[0].T, x[1:] @ w[1].T])
    want = (
        y,
        torch.cat([y[:1] @ w[0], y[1:] @ w[1]]),
        torch.stack([x[:1].T @ y[:1], x[1:].T @ y[1:]]),
        torch.stack([y[0], y[1:].sum(0)]),
    )
    for a, b in zip(found, (*want, y[:1] + y[2:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=0)


@about("group_sum")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(partitions())
def test_group_sum(dtype, partition: Partition):
    """Whatever is past the last end is not read."""
    y = torch.randint(-4, 5, (partition.rows, 3), generator=torch.Generator().manual_seed(5)).to(
        dtype
    )
    y[sum(partition.sizes) :] = NAN
    (found,) = run(of_groups("group_sum"), y, partition.ends)
    assert found.dtype == torch.float32
    assert found.tolist() == [y[rows].double().sum(0).tolist() for _, rows in partition.runs]


@about("group_add", "group_mul")
@pytest.mark.parametrize(("name", "ufunc"), [("group_add", np.add), ("group_mul", np.multiply)])
@given(partitions())
def test_group_add_and_mul(name, ufunc, partition: Partition):
    y, table = torch.randn(partition.rows, 3), torch.randn(len(partition.sizes), 3)
    (found,) = run(of_groups(name), y, table, partition.ends)
    want = y.numpy().copy()
    for g, rows in partition.runs:
        want[rows] = ufunc(want[rows], table.numpy()[g])
    assert found.tolist() == want.tolist()


# Formats ------------------------------------------------------------------------------------------


@about("decode_scale", "quantize", "unpack", "pack")
@pytest.mark.parametrize("lead", [(), (3,)])
def test_quantize(lead):
    x = torch.randn(*lead, 4, 48, generator=torch.Generator().manual_seed(0))
    x[..., 0, :16] = 0.0

    def build(fd, x):
        scale = fd.ops.decode_scale(x, encoding="nvfp4")
        return *fd.ops.unpack(fd.ops.quantize(x, scale, encoding="nvfp4")), scale

    codes, block_scale, decode_scale = run(build, x)
    np.testing.assert_array_equal(
        decode_scale.numpy(), np.abs(x.numpy()).max((-2, -1)) / np.float32(2688)
    )
    parts = (t if lead else t[None] for t in (codes, block_scale, decode_scale))
    near = loops.decoded(*parts).view_as(x).numpy()
    step = np.repeat(np.abs(x.numpy()).reshape(*lead, 4, 3, 16).max(-1), 16, -1) / 6
    # half of the widest gap of codes, 2, and the rounding of the scale
    assert (np.abs(near - x.numpy()) <= 1.2 * step).all()
    assert (near[..., 0, :16] == 0).all()


@about("straight_through")
def test_straight_through_is_the_weight():
    x = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0))

    def build(fd, master, *parts):
        w = fd.ops.pack(*parts, encoding="nvfp4", layout="linear")
        return fd.ops.dequantize(fd.ops.straight_through(w, master, how="exact"), dtype="f32")

    (found,) = run(build, x, *quantize(x + 1, NVFP4))
    assert torch.equal(found, loops.decoded(*quantize(x + 1, NVFP4)))


@about("transpose_blocks")
@pytest.mark.parametrize("encoding", ["fp8_e8m0", "fp8_blocks_f32"])
def test_turned_blocks_are_those_of_the_transpose(encoding):
    w = 3 * torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(0))
    found = run(
        lambda fd, *parts: fd.ops.transpose_blocks(*parts)[0], *quantize(w, ENCODINGS[encoding])
    )
    scales = run(
        lambda fd, *parts: fd.ops.transpose_blocks(*parts)[1], *quantize(w, ENCODINGS[encoding])
    )
    assert_same_bits([*found, *scales], list(quantize(w.mT.contiguous(), ENCODINGS[encoding])))


@about("transpose_row_blocks", "untranspose_row_blocks")
@given(partitions())
def test_codes_by_columns(partition):
    """Those of each group by itself, padded with zero rows. Column 8 q + 2 b + e of each 32 is at
    place 8 b + 2 q + e.
    """
    codes = torch.arange(partition.rows * 64).remainder(251).view(-1, 64).byte()
    places = [
        c + 8 * b + 2 * q + e for c in (0, 32) for q in range(4) for b in range(4) for e in (0, 1)
    ]
    codes = codes.view(torch.float8_e4m3fn)

    def build(fd, codes, offs):
        rows, ends = in_groups(fd, codes, offs)
        turned = fd.ops.transpose_row_blocks(rows, ends)
        return turned, fd.ops.untranspose_row_blocks(turned, ends, rows=rows.type.shape[0])

    turned, back = run(build, codes, partition.ends)
    first = 0
    for g, end in enumerate(partition.ends.tolist()):
        count, at = -(-(end - first) // 128), first // 128 + g
        whole = turned[at : at + count].view(torch.uint8)[:, places].mT.flatten(0, 1)
        own = codes.view(torch.uint8)[first:end]
        assert torch.equal(whole[: end - first], own)
        assert not whole[end - first :].any()
        assert torch.equal(back.view(torch.uint8)[first:end], own)
        first = end


@about("dequantize")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_dequantize(dtype):
    """Codes times block scales times the decode scale, rounded once; along rows of groups:
    test_eight_bits.py.
    """
    q = quantize(torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0)), NVFP4)
    found = run(
        lambda fd, *q: fd.ops.dequantize(
            fd.ops.pack(*q, encoding="nvfp4", layout="linear"), dtype=dtype
        ),
        *q,
    )[0]
    assert torch.equal(found, loops.decoded(*q).to(DTYPES[dtype]))


@about("grouped_swizzle")
@given(partitions())
def test_grouped_swizzle(partition: Partition):
    scale = torch.randint(
        0, 127, (partition.rows, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    build = of_groups("grouped_swizzle", layout="sf128x4")
    (found,) = run(build, scale.view(torch.float8_e4m3fn), partition.ends)
    want = torch.cat([loops.swizzled(scale[rows][None])[0] for _, rows in partition.runs])
    stored = found.view(torch.uint8)
    assert stored[: len(want)].equal(want)
    assert not stored[len(want) :].any()


@about("relayout", "unpack")
def test_a_weight_is_stored_in_tiles():
    q = weight(2, 32, 128)

    def build(fd, *parts):
        return fd.ops.unpack(fd.ops.relayout(packed(fd, *parts), layout="w16x64"))

    assert_same_bits(run(build, *q), W16X64.pack(*q, encoding=NVFP4)[:2])
    for n, layout in ((24, "w16x64"), (32, "sf128x4"), (32, "other")):
        fd = FusionDefinition()
        values = [fd.from_pytorch(t) for t in weight(2, n, 128)]
        with pytest.raises(ShapeError):
            fd.ops.relayout(packed(fd, *values), layout=layout)


@about("relayout", "grouped_mm")
@given(partitions())
@example(Partition((128,), 0))
def test_relayout_changes_no_product(partition: Partition):
    """Also where the swizzled scales have as many rows as there are: one group of a multiple of
    128.
    """
    a, q = weight(1, partition.rows, 64, seed=7), weight(len(partition.sizes), 4, 64)

    def build(fd, codes, scale, decode, offs, *parts):
        groups = fd.define_groups("g", len(partition.sizes))
        ends = fd.ops.ends(offs, rows=partition.rows, groups=groups)
        a = fd.ops.pack(
            fd.ops.partition(codes, ends),
            fd.ops.partition(scale, ends),
            decode,
            encoding="nvfp4",
            layout="linear",
        )
        moved = fd.ops.relayout(a, ends, layout="sf128x4")
        w = packed(fd, *parts)
        return fd.ops.grouped_mm(a, w, ends), fd.ops.grouped_mm(moved, w, ends, a_layout="sf128x4")

    plain, moved = run(build, a.codes[0], a.block_scale[0], a.decode_scale[0], partition.ends, *q)
    assert_same_bits([moved], [plain])
    rows_of_a, w = (loops.decoded(*v).numpy() for v in (a, q))
    want = np.zeros((partition.rows, 4))
    for g, rows in partition.runs:
        want[rows] = rows_of_a[0, rows] @ w[g].T
    np.testing.assert_allclose(
        plain.double().numpy(), want, rtol=1e-4, atol=1e-3 * max(1, np.abs(want).max(initial=0))
    )
