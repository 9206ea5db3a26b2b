"""Derivatives of Fusions against torch's autograd of plain functions, in float64 where the IR has
it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bad_calls import messages
from cover import examples
from fusions import About, G, assert_same_bits, evaluate, in_groups, inputs_of, of_groups
from hypothesis import given, strategies as st
from pointwise import BINARY, UNARY, sample
from routings import Partition, Routing, partitions, routings

from fusion_moe import FusionDefinition
from fusion_moe.distributed.collectives import Together
from fusion_moe.distributed.exchange.kinds import PEERS, holders
from fusion_moe.encodings import MXFP8, NVFP4, dequantize, quantize
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.kinds.quantized import STRAIGHT_THROUGH

about = About()


def test_every_derivative_has_a_case():
    assert {name for name, kind in KINDS.items() if kind.grad} <= about.kinds


def gradients(build, tensors, wrt, seed=0):
    """The gradients of build(fd, *values) with respect to inputs `wrt`, and the gradient of the
    output that was sent in.
    """
    fd = FusionDefinition()
    fd.add_output(build(fd, *(fd.from_pytorch(t) for t in tensors)))
    fusion = fd.fusion()
    (out,) = evaluate(fusion, *tensors)
    dy = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(out.dtype)
    derivative = differentiate(fusion, wrt)
    made = evaluate(derivative.forward, *tensors)
    assert_same_bits(made[:1], [out])
    return evaluate(derivative.backward, *derivative.read(tensors, made), dy), dy


def check(build, plain, *tensors, wrt=None, rtol=1e-10):
    """build(fd, *values) is differentiated as plain(*tensors) is by autograd in float64."""
    wrt = tuple(i for i, t in enumerate(tensors) if t.is_floating_point()) if wrt is None else wrt
    found, dy = gradients(build, tensors, wrt)
    wide = [
        t.double().requires_grad_(i in wrt) if t.is_floating_point() else t
        for i, t in enumerate(tensors)
    ]
    want = torch.autograd.grad(plain(*wide), [wide[i] for i in wrt], dy.double())
    for i, a, b in zip(wrt, found, want, strict=True):
        assert a.dtype == tensors[i].dtype
        assert a.shape == tensors[i].shape
        torch.testing.assert_close(
            a.double(), b, rtol=rtol, atol=rtol * max(1, b.abs().max().item() if b.numel() else 0)
        )


@about("dispatch", "combine_from")
def test_between_ranks():
    """Each adds up what those that hold an expert of a token make of it."""
    ranks, tokens, slots, how = 3, 4, 2, {"experts": 5, "group": "g"}

    def build(fd, x, ids, w, peers):
        of_ranks = fd.define_groups("s", ranks, stride=tokens)
        rows, all_ids, all_w, ends = fd.ops.dispatch(x, ids, w, peers, groups=of_ranks, **how)
        y = rows * rows * fd.ops.sum(all_w, dims=(1,), keepdim=True)
        return fd.ops.combine_from(y, all_ids, ids, ends, peers, **how)

    def of_rank(rank):
        g = torch.Generator().manual_seed(rank)
        ids = torch.randint(-1, 5, (tokens, slots), generator=g)
        many = holders(ids, 5, ranks).sum(1, keepdim=True)
        x, w = (torch.randn(tokens, n, generator=g, dtype=torch.float64) for n in (3, slots))
        peers = torch.zeros(ranks + PEERS, dtype=torch.int64)
        check(build, lambda x, _, w, __: many * x * x * w.sum(1, keepdim=True), x, ids, w, peers)

    Together(ranks).run(of_rank)


DIFFERENTIABLE = [name for name in UNARY if KINDS[name].grad]


@about(*DIFFERENTIABLE)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_unary(name):
    x = sample(name)
    check(lambda fd, v: getattr(fd.ops, name)(v), getattr(torch, name, torch.nn.functional.silu), x)


@about("add", "sub", "mul", "div")
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_binary(name):
    x, y = sample("div"), sample("div").flip(0) + 0.3
    for a, b in ((x, y), (x, y[:, :1].contiguous()), (x[:1], y), (x[:1, :1], y)):
        check(lambda fd, u, v: getattr(fd.ops, name)(u, v), BINARY[name], a, b)
    check(
        lambda fd, u: getattr(fd.ops, name)(u, 1.5),
        lambda u: BINARY[name](u, torch.tensor(1.5).double()),
        x,
    )
    check(
        lambda fd, u: getattr(fd.ops, name)(1.5, u),
        lambda u: BINARY[name](torch.tensor(1.5).double(), u),
        x,
    )
    check(lambda fd, u: getattr(fd.ops, name)(u, u), lambda u: BINARY[name](u, u), x)


@about("pow")
@pytest.mark.parametrize("exponent", [3, 0.5, -1.0, 0])
def test_powers(exponent):
    check(lambda fd, v: fd.ops.pow(v, exponent), lambda v: v**exponent, sample("pow"))


@about("pow")
def test_powers_that_are_tensors():
    x = sample("pow")
    for base in 2.0, 0.5:
        check(lambda fd, v, base=base: fd.ops.pow(base, v), lambda v, base=base: base**v, x - 1)
    x[0, 0] = 0  # whose logarithm is infinite
    check(lambda fd, a, b: fd.ops.pow(a, b), lambda a, b: a**b, x, x.flip(0) - 0.1)


@about("minimum", "maximum")
def test_clamp_passes_the_gradient_at_the_bound_where_torchs_does():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    check(lambda fd, v: fd.ops.maximum(fd.ops.minimum(v, 1.0), -1.0), lambda v: v.clamp(-1, 1), x)
    check(lambda fd, v: fd.ops.maximum(fd.ops.minimum(1.0, v), -1.0), lambda v: v.clamp(-1, 1), x)


@about("minimum", "maximum")
@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_equal_tensors_share_the_gradient(name):
    x = torch.tensor([[-2.0, 0.0, 1.0], [1.0, 0.5, 2.0]], dtype=torch.float64)
    for y in (x.flip(0).contiguous(), x[:1] * 0, x.clone()):
        check(lambda fd, u, v: getattr(fd.ops, name)(u, v), getattr(torch, name), x, y)


@about("where")
def test_where():
    c = torch.tensor([[True], [False]])
    a, b = torch.randn(2, 3).double(), torch.randn(1, 3).double()
    check(lambda fd, *v: fd.ops.where(*v), torch.where, c, a, b)
    check(
        lambda fd, c, a: fd.ops.where(c, a, 2.0),
        lambda c, a: torch.where(c, a, torch.tensor(2.0).double()),
        c,
        a,
    )


@about("cast")
def test_cast():
    check(lambda fd, v: fd.ops.cast(v, dtype="f64"), lambda v: v, torch.randn(3).float(), rtol=1e-7)
    check(lambda fd, v: fd.ops.cast(v, dtype="bf16"), lambda v: v, torch.randn(3).double())
    (dx,), dy = gradients(
        lambda fd, v: fd.ops.cast(fd.ops.cast(v, dtype="bf16"), dtype="f64"),
        [torch.randn(3).double()],
        (0,),
    )
    assert dx.tolist() == dy.bfloat16().tolist()


@about("logsumexp")
def test_logsumexp():
    x = torch.randn(3, 5).double()
    check(lambda fd, v: fd.ops.logsumexp(v), lambda v: v.logsumexp(-1, keepdim=True), x)


@about("reshape", "permute", "broadcast_in_dim", "slice", "pad", "sum")
def test_shapes():
    x = torch.randn(2, 3, 4).double()
    check(lambda fd, v: fd.ops.reshape(v, new_shape=(6, 4)), lambda v: v.reshape(6, 4), x)
    check(lambda fd, v: fd.ops.permute(v, dims=(2, 0, 1)), lambda v: v.permute(2, 0, 1), x)
    spread = {"shape": (2, 5, 3, 7, 4), "broadcast_dims": (0, 2, 3, 4)}
    check(
        lambda fd, v: fd.ops.broadcast_in_dim(v, **spread),
        lambda v: v[:, None].expand(2, 5, 3, 7, 4),
        torch.randn(2, 3, 1, 4).double(),
    )
    check(
        lambda fd, v: fd.ops.slice(v, start_indices=(0, 1, 2), end_indices=(2, 3, 3)),
        lambda v: v[:, 1:, 2:3],
        x,
    )
    check(
        lambda fd, v: fd.ops.pad(v, before=(1, 0, 2), after=(0, 3, 0), shape=(3, 6, 6)),
        lambda v: torch.nn.functional.pad(v, (2, 0, 0, 3, 1, 0)),
        x,
    )
    for dims, keep in (((1,), False), ((0, 2), True), ((0, 1, 2), False)):
        check(
            lambda fd, v, d=dims, k=keep: fd.ops.sum(v, dims=d, keepdim=k),
            lambda v, d=dims, k=keep: v.sum(d, keepdim=k),
            x,
        )


@about("index_select")
def test_index_select():
    at = torch.tensor([2, 0, 0, 2, 2], dtype=torch.int32)
    check(
        lambda fd, x, at: fd.ops.index_select(x, at, dim=0),
        lambda x, at: x.index_select(0, at),
        torch.randn(4, 3).double(),
        at,
    )
    check(
        lambda fd, x, at: fd.ops.index_select(x, at, dim=0),
        lambda x, at: x.index_select(0, at),
        torch.randn(4, 3),
        at,
        rtol=1e-6,
    )


@about("index_select")
@examples(0.3)
@given(
    routings().filter(lambda routing: routing.groups < 10 and routing.ids.shape[0] < 20),
    st.integers(0, 2),
)
def test_index_select_by_a_routing(routing: Routing, spare: int):
    """Rows of tokens, and numbers of slots in the order of rows; some that nothing picks."""
    (t, k), flat = routing.ids.shape, routing.ids.flatten().argsort(stable=True)

    def build(fd, x, ids, w):
        _, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", routing.groups))
        picked = fd.ops.index_select(w, fd.ops.invert(slot_of, rows=t * k), dim=0)
        rows = fd.ops.index_select(x, row_of, dim=0)
        return fd.ops.mul(
            fd.ops.reshape(rows, new_shape=(t * k, 3)), fd.ops.reshape(picked, new_shape=(t * k, 1))
        )

    x, w = torch.randn(t + spare, 3).double(), torch.randn(t * k + spare).double()
    check(build, lambda x, ids, w: x[flat // k] * w[flat, None], x, routing.ids, w)


def test_a_value_with_several_readers():
    x = sample("neg")
    check(
        lambda fd, v: fd.ops.add(fd.ops.mul(v, fd.ops.exp(v)), fd.ops.mul(fd.ops.neg(v), v)),
        lambda v: v * v.exp() - v * v,
        x,
    )


@about("topk_weights")
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_weights(scoring, renormalize):
    """Of ids that are any experts, one of them twice."""
    logits, ids = torch.randn(5, 7).double(), torch.stack([torch.randperm(7)[:3] for _ in range(5)])
    ids[0] = torch.tensor([2, 4, 2])

    def plain(logits, ids):
        w = (logits.softmax(1) if scoring == "softmax" else logits.sigmoid()).gather(1, ids)
        return 2.5 * (w / w.sum(1, keepdim=True) if renormalize else w)

    how = {"scoring": scoring, "renormalize": renormalize, "routed_scaling_factor": 2.5}
    check(lambda fd, logits, ids: fd.ops.topk_weights(logits, ids, **how), plain, logits, ids)


@about("combine")
@examples(0.3)
@given(routings())
def test_combine_of_a_routing(routing: Routing):
    (tokens, slots), g = routing.ids.shape, torch.Generator().manual_seed(0)

    def build(fd, y, ids, w):
        _, _, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", routing.groups))
        return fd.ops.combine(y, slot_of, w)

    def plain(y, ids, w):
        order = ids.flatten().argsort(stable=True).argsort().view(ids.shape)
        return (y[order] * w[..., None]).sum(1)

    check(
        build,
        plain,
        torch.randn(tokens * slots, 3, generator=g),
        routing.ids,
        torch.randn(tokens, slots, generator=g),
        rtol=1e-6,
    )


@about("combine")
def test_combine_of_any_slots():
    """Rows that two slots read, rows that none reads, more rows than slots."""
    slot_of = torch.tensor([[1, 1], [4, 0], [1, 6]], dtype=torch.int32)
    check(
        lambda fd, y, slot_of, w: fd.ops.combine(y, slot_of, w),
        lambda y, slot_of, w: (y[slot_of.long()] * w[..., None]).sum(1),
        torch.randn(7, 3),
        slot_of,
        torch.randn(3, 2),
        rtol=1e-6,
    )


def _loop(partition, a, w):
    out = a.new_zeros(partition.rows, w.shape[1])
    for g, rows in partition.runs:
        out = torch.cat([out[: rows.start], a[rows] @ w[g].T, out[rows.stop :]])
    return out


# a loop of autograd's over more groups takes long
SMALL = partitions().filter(lambda partition: len(partition.sizes) < 10)
FEW = examples(0.3)


@about("zero_rest", "partition")
@FEW
@given(SMALL)
def test_zero_rest(partition: Partition):
    kept = torch.arange(partition.rows)[:, None] < sum(partition.sizes)
    a = torch.randn(partition.rows, 5)
    check(
        of_groups("zero_rest"),
        lambda a, offs: a * kept,
        a,
        partition.ends,
        wrt=(0,),
    )


@about("grouped_mm", "grouped_mm_t", "partition")
@pytest.mark.parametrize("name", ["grouped_mm", "grouped_mm_t"])
@FEW
@given(SMALL)
def test_grouped_mm_with_float_weights(name, partition: Partition):
    """Stored either way, in both floats that derivatives are compared in."""
    a, w = torch.randn(partition.rows, 5), torch.randn(len(partition.sizes), 4, 5)
    w = w if name == "grouped_mm" else w.mT.contiguous()

    def plain(a, w, offs):
        return _loop(partition, a, w if name == "grouped_mm" else w.mT)

    check(of_groups(name), plain, a, w, partition.ends, wrt=(0, 1), rtol=1e-5)
    check(of_groups(name), plain, a.double(), w.double(), partition.ends, wrt=(0, 1))


@about("grouped_mm")
@FEW
@given(SMALL)
def test_grouped_mm_with_frozen_weights(partition: Partition):
    q = quantize(torch.randn(len(partition.sizes), 4, 16), NVFP4)

    def build(fd, a, offs, *parts):
        rows, ends = in_groups(fd, a, offs)
        return fd.ops.grouped_mm(rows, fd.ops.pack(*parts, encoding="nvfp4", layout="linear"), ends)

    w = dequantize(q).double()
    (da,), dy = gradients(build, [torch.randn(partition.rows, 16), partition.ends, *q], (0,))
    want = torch.zeros(partition.rows, 16, dtype=torch.float64)
    for g, rows in partition.runs:
        want[rows] = dy.double()[rows] @ w[g]
    torch.testing.assert_close(da.double(), want, rtol=1e-5, atol=1e-4)


@about("straight_through")
@pytest.mark.parametrize("how", STRAIGHT_THROUGH)
@FEW
@given(SMALL)
def test_a_master_gets_the_gradient_of_a_weight(how, partition: Partition):
    """Unless products are saved the forward is the program itself."""
    master = torch.randn(len(partition.sizes), 4, 16)
    q = quantize(master + 1, NVFP4)

    def build(fd, a, master, offs, *parts):
        rows, ends = in_groups(fd, a, offs)
        w = fd.ops.pack(*parts, encoding="nvfp4", layout="linear")
        y = fd.ops.grouped_mm(rows, fd.ops.straight_through(w, master, how=how), ends)
        return fd.ops.mul(y, y)

    a = torch.randn(partition.rows, 16)
    tensors = [a, master, partition.ends, *q]
    (da, dw), dy = gradients(build, tensors, (0, 1))
    fd = FusionDefinition()
    fd.add_output(build(fd, *(fd.from_pytorch(t) for t in tensors)))
    saves = len(differentiate(fd.fusion(), (0, 1)).forward.outputs) - 1
    assert saves == (how == "saved")

    by = (master if how == "float" else dequantize(q)).double()
    want_a, want_w = torch.zeros_like(da).double(), torch.zeros_like(dw).double()
    for g, rows in partition.runs:
        d = 2 * dy.double()[rows] * (a.double()[rows] @ dequantize(q).double()[g].T)
        want_a[rows], want_w[g] = d @ by[g], d.T @ a.double()[rows]
    for found, want in ((da, want_a), (dw, want_w)):
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-2)


@about("quantize")
def test_quantize_is_straight_through():
    """What a product of MXFP8 operands gives its copies reaches the floats; test_eight_bits.py has
    the numbers.
    """
    x = torch.randn(4, 32)

    def build(fd, x, w, offs):
        ends = fd.ops.ends(offs, rows=4, groups=fd.define_groups("g", 1))
        rows = fd.ops.partition(fd.ops.mul(x, 2.0), ends)
        return fd.ops.grouped_mm(
            fd.ops.quantize(rows, encoding="mxfp8"),
            fd.ops.quantize(w, encoding="mxfp8"),
            ends,
            wgrad="bf16",
        )

    (dx,), dy = gradients(
        build, [x, torch.ones(1, 32, 32), torch.tensor([4], dtype=torch.int32)], (0,)
    )
    want = 2 * dequantize(quantize(dy, encoding=MXFP8)).sum(1, keepdim=True).expand(4, 32)
    torch.testing.assert_close(dx, want, rtol=1e-6, atol=1e-6)


@about("group_add", "group_mul", "partition")
@pytest.mark.parametrize(
    ("name", "function", "outside"), [("group_add", torch.add, 0), ("group_mul", torch.mul, 1)]
)
@FEW
@given(SMALL)
def test_group_add_and_mul(name, function, outside, partition: Partition):
    def plain(y, table, offs):
        groups = [g for g, rows in partition.runs for _ in range(rows.stop - rows.start)]
        group = torch.tensor(groups + [len(partition.sizes)] * partition.spare, dtype=torch.long)
        return function(y, torch.cat([table, table.new_full((1, 3), outside)])[group])

    check(
        of_groups(name),
        plain,
        torch.randn(partition.rows, 3),
        torch.randn(len(partition.sizes), 3),
        partition.ends,
        wrt=(0, 1),
        rtol=1e-5,
    )


def test_only_what_is_needed_is_computed():
    """The derivative of a product by its rows does not compute the product, and reads no rows."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    ends = fd.define_tensor(shape=[2], dtype="i32", ends=fd.define_groups("g", 2))
    w = fd.define_tensor(shape=[2, 8, 4], dtype="f32")
    fd.add_output(fd.ops.grouped_mm(fd.ops.partition(x, ends), w, ends))
    derivative = differentiate(fd.fusion(), (0,))
    products = [op.kind.name for op in derivative.backward.ops if op.kind.role == "grouped"]
    assert products == ["grouped_mm_t"]
    assert derivative.reads == (1, 2)
    assert derivative.forward == fd.fusion()


def test_the_text_of_a_derivative(golden):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 32], dtype="bf16")
    ids = fd.define_tensor(shape=[x.type.shape[0], 2], dtype="i64")
    w = fd.define_tensor(shape=[x.type.shape[0], 2], dtype="f32")
    parts = [
        fd.define_tensor(shape=s, dtype=d, role="weight")
        for s, d in (([G, 16, 16], "u8"), ([G, 16, 2], "f8e4m3"), ([G], "f32"))
    ]
    ends, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", G))
    y = fd.ops.grouped_mm(
        fd.ops.index_select(x, row_of, dim=0),
        fd.ops.pack(*parts, encoding="nvfp4", layout="linear"),
        ends,
    )
    fd.add_output(fd.ops.combine(fd.ops.silu(y), slot_of, w))
    derivative = differentiate(fd.fusion(), (0, 2))
    golden(
        f"{derivative.forward}\n\n# reads {derivative.reads}, then the gradients of "
        f"{derivative.seeds}\n{derivative.backward}"
    )


def test_what_has_no_derivative(golden):
    x, _, ids, w, _, _, *q = inputs_of(4)[:9]

    def frozen(fd, x, ids, *parts):
        ends, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", G))
        return fd.ops.grouped_mm(
            fd.ops.index_select(x, row_of, dim=0),
            fd.ops.pack(*parts, encoding="nvfp4", layout="linear"),
            ends,
        )

    def block_scales(fd, x):
        quantized = fd.ops.quantize(x, fd.ops.decode_scale(x, encoding="nvfp4"), encoding="nvfp4")
        return fd.ops.cast(fd.ops.unpack(quantized)[1], dtype="f32")

    cases = {
        "the scale of a frozen weight": (frozen, [x, ids, *q], (4,)),
        "cat": (lambda fd, x: fd.ops.cat(x, x, dim=0), [x], (0,)),
        "a gather of columns": (
            lambda fd, x, at: fd.ops.index_select(x, at, dim=1),
            [x, torch.tensor([0])],
            (0,),
        ),
        "a cast through fp8": (
            lambda fd, x: fd.ops.cast(fd.ops.cast(x, dtype="f8e4m3"), dtype="f32"),
            [x],
            (0,),
        ),
        "quantize": (block_scales, [x], (0,)),
        "what the output does not depend on": (lambda fd, x, w: fd.ops.exp(w), [x, w], (0,)),
    }
    golden(messages({what: partial(gradients, *case) for what, case in cases.items()}))
