"""`router_gradient`: the same gradients as without it and as float64's; what it saves; where it
does not apply.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from fusions import evaluate
from hypothesis import given, strategies as st
from routings import Routing, routings

from fusion_moe import FusionDefinition
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.ir.derivative import differentiate

H, N = 16, 6  # features of the rows, and of the result


RANK, SCALE = 2, 0.5  # of adapters


def build(
    stored: str = "float",
    biases: int = 1,
    dtype: str = "f64",
    groups: int = 3,
    slots: int = 2,
    adapted: bool = False,
):
    """out = combine(silu(x) W^T + biases): inputs x [T, H], w, ids, W, biases. stored: "float",
    "transposed" or "packed".

    adapted: with an adapter beside W, inputs A and B.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    x, w = (
        fd.define_tensor(shape=[t, H], dtype=dtype),
        fd.define_tensor(shape=[t, slots], dtype=dtype),
    )
    ids = fd.define_tensor(shape=[t, slots], dtype="i64")
    ends, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", groups))
    h = fd.ops.silu(fd.ops.index_select(x, row_of, dim=0))
    if stored == "packed":
        shapes = ([groups, N, H // 2], "u8"), ([groups, N, 1], "f8e4m3"), ([groups], "f32")
        parts = [fd.define_tensor(shape=s, dtype=d) for s, d in shapes]
        y = fd.ops.grouped_mm(h, fd.ops.pack(*parts, encoding="nvfp4", layout="linear"), ends)
    elif stored == "transposed":
        y = fd.ops.grouped_mm_t(h, fd.define_tensor(shape=[groups, H, N], dtype=dtype), ends)
    else:
        y = fd.ops.grouped_mm(h, fd.define_tensor(shape=[groups, N, H], dtype=dtype), ends)
    y = fd.ops.cast(y, dtype=dtype)
    if adapted:
        a, b = (
            fd.define_tensor(shape=[groups, *shape], dtype=dtype)
            for shape in ((RANK, H), (N, RANK))
        )
        y = fd.ops.add(
            fd.ops.grouped_mm(fd.ops.mul(fd.ops.grouped_mm(h, a, ends), SCALE), b, ends), y
        )
    for _ in range(biases):
        y = fd.ops.group_add(y, fd.define_tensor(shape=[groups, N], dtype=dtype), ends)
    fd.add_output(fd.ops.combine(y, slot_of, w))
    return fd.fusion()


def inputs(
    routing: Routing, stored: str = "float", biases: int = 1, dtype: torch.dtype = torch.float64
):
    g = torch.Generator().manual_seed(0)
    (t, k), e = routing.ids.shape, routing.groups
    shape = (e, H, N) if stored == "transposed" else (e, N, H)
    made = [
        torch.randn(s, generator=g, dtype=dtype)
        for s in ((t, H), (t, k), shape, *[(e, N)] * biases)
    ]
    return [*made[:2], routing.ids, *made[2:]]


def plain(x, w, ids, weight, *biases):
    """A loop over the slots."""
    matrices = weight if weight.shape[1] == N else weight.mT
    out = []
    for t in range(len(ids)):
        rows = [
            w[t, s] * (matrices[e] @ torch.nn.functional.silu(x[t]) + sum(b[e] for b in biases))
            for s, e in enumerate(ids[t].tolist())
        ]
        out.append(sum(rows))
    return (
        torch.stack(out)
        if out
        else x.new_zeros(0, N)
        + 0 * (x.sum() + w.sum() + weight.sum() + sum(b.sum() for b in biases))
    )


def gradients(derivative, tensors, dy):
    return evaluate(
        derivative.backward, *derivative.read(tensors, evaluate(derivative.forward, *tensors)), dy
    )


SMALL = routings().filter(lambda routing: routing.groups < 10 and routing.ids.shape[0] < 20)


@given(SMALL, st.sampled_from(("float", "transposed")), st.integers(0, 2))
def test_against_a_loop(routing: Routing, stored: str, biases: int):
    fusion = build(stored, biases, groups=routing.groups, slots=routing.ids.shape[1])
    tensors = inputs(routing, stored, biases)
    floats = [i for i, t in enumerate(tensors) if t.is_floating_point()]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    dy = torch.randn(
        len(routing.ids), N, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    want = torch.autograd.grad(plain(*leaves), [leaves[i] for i in floats], dy)
    for on in (True, False):
        derivative = differentiate(fusion, floats, router_gradient=on)
        assert [op.kind.name for op in derivative.rewritten] == ["combine"] * on
        for a, b in zip(gradients(derivative, tensors, dy), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def products(fusion):
    return [op.kind.name for op in fusion.ops if op.kind.role == "grouped"]


def saved(derivative):
    return [str(v.type.with_(ends=None)) for v in derivative.forward.outputs[1:]]


def test_every_set_of_wanted_gradients_costs_what_it_needs():
    """x: its product. The weight: its product, no result of the product saved. w: nothing more if x
    is wanted, else the result.
    """
    fusion = build(biases=1, dtype="bf16")
    x, w, weight, bias = (i for i, v in enumerate(fusion.inputs) if v.type.dtype == "bf16")
    for count in range(1, 5):
        for wrt in combinations((x, w, weight, bias), count):
            derivative = differentiate(fusion, wrt)
            assert sorted(products(derivative.backward)) == ["grouped_mm_t"] * (x in wrt) + [
                "grouped_outer"
            ] * (weight in wrt)
            assert (f"bf16[2*t/g, {N}]" in saved(derivative)) == (w in wrt and x not in wrt)
            assert (bias in derivative.reads) == (w in wrt and x in wrt)


def test_the_products_read_rows_of_the_gradient_as_they_are():
    derivative = differentiate(build(dtype="bf16"), (0, 1, 3))
    backward = derivative.backward
    dgrad, wgrad = (op for op in backward.ops if op.kind.role == "grouped")
    assert dgrad.values[0] is wgrad.values[0]
    assert backward.producers[dgrad.values[0]].kind.name == "index_select"


def test_packed_weights():
    routing = Routing(torch.tensor([[0, 2], [1, 1], [2, 0]]), 3)
    x, w, ids, weight, bias = inputs(routing, dtype=torch.float32)
    fusion, tensors = build("packed", dtype="f32"), [x, w, ids, *quantize(weight, NVFP4), bias]
    on, off = (differentiate(fusion, (0, 1, 6), router_gradient=on) for on in (True, False))
    assert products(on.backward) == products(off.backward) == ["grouped_mm_t"]
    assert saved(off) == [*saved(on), f"f32[2*t/g, {N}]"]
    dy = torch.randn(3, N, generator=torch.Generator().manual_seed(1))
    for a, b in zip(gradients(on, tensors, dy), gradients(off, tensors, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@given(SMALL)
def test_an_adapter_is_a_part_of_the_gradient_of_its_rows(routing: Routing):
    """One gradient of the rows, the sum of two products, and one sum over its columns for w."""
    g, fusion = (
        torch.Generator().manual_seed(2),
        build(biases=0, groups=routing.groups, slots=routing.ids.shape[1], adapted=True),
    )
    factors = [
        torch.randn(routing.groups, *s, generator=g, dtype=torch.float64)
        for s in ((RANK, H), (N, RANK))
    ]
    tensors = [*inputs(routing, biases=0), *factors]
    x, w, ids, weight, a, b = (
        t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors
    )
    dy = torch.randn(len(routing.ids), N, generator=g, dtype=torch.float64)
    want = torch.autograd.grad(
        plain(x, w, ids, weight + SCALE * b @ a), (x, w, weight, a, b), dy, materialize_grads=True
    )
    for wrt in ((0, 1, 3, 4, 5), (1, 4, 5)):
        derivative = differentiate(fusion, wrt)
        for found, t in zip(
            gradients(derivative, tensors, dy), (want[i - (i > 2)] for i in wrt), strict=True
        ):
            torch.testing.assert_close(found, t, rtol=1e-11, atol=1e-11)
    rows = differentiate(fusion, (0, 1, 4, 5)).backward
    assert [op.kind.name for op in rows.ops].count("sum") == 1
    (both,) = (op.values for op in rows.ops if op.kind.name == "add" and len(op.values) == 2)
    assert [rows.producers[v].kind.name for v in both] == ["grouped_mm_t"] * 2


@pytest.mark.parametrize(
    "between", ["silu", "another partition", "other slots", "no weights", "nothing"]
)
def test_where_it_does_not_apply(between):
    """What is not linear in the product's rows; rows of other groups; slots that no routing made;
    weights of 1, which do nothing.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    x, ids, w = (
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([t, H], "f32"), ([t, 1], "i64"), ([t, 1], "f32"))
    )
    weight, offs = (
        fd.define_tensor(shape=[3, N, H], dtype="f32"),
        fd.define_tensor(shape=[3], dtype="i32"),
    )
    slots = fd.define_tensor(shape=[t, 1], dtype="i32")
    ends, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", 3))
    if between == "another partition":
        ends = fd.groups_of(offs, t)
        rows = fd.ops.partition(
            fd.ops.reshape(fd.ops.index_select(x, row_of, dim=0), new_shape=(t, H)), ends
        )
        y = fd.ops.reshape(fd.ops.grouped_mm(rows, weight, ends), new_shape=(t, N))
    else:
        y = fd.ops.grouped_mm(fd.ops.index_select(x, row_of, dim=0), weight, ends)
    y = fd.ops.silu(y) if between == "silu" else y
    w = fd.ops.full(shape=(t, 1), fill_value=1.0, dtype="f32") if between == "no weights" else w
    fd.add_output(fd.ops.combine(y, slots if between == "other slots" else slot_of, w))
    assert len(differentiate(fd.fusion(), (0, 3)).rewritten) == (between == "nothing")
