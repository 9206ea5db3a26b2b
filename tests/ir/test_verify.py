"""What does not verify, and what the messages say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from bad_calls import messages
from fusions import evaluate, programs
from hypothesis import given

from fusion_moe import FusionDefinition
from fusion_moe.errors import DtypeError, Error, GroupsError, ShapeError
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.sizes import symbol
from fusion_moe.ir.types import TensorType


def small():
    """Rows by two routings, and what is done with them."""
    fd = FusionDefinition()
    t = fd.define_size("t")
    x = fd.define_tensor(shape=[t, 32], dtype="f32")
    ids = fd.define_tensor(shape=[t, 2], dtype="i64")
    w = fd.define_tensor(shape=[4, 8, 32], dtype="f32", role="weight")
    with fd.at("", "translator.py:7"):
        ends, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", 4))
        y = fd.ops.grouped_mm(fd.ops.index_select(x, row_of, dim=0), w, ends)
        fd.add_output(fd.ops.neg(y))
    return fd.fusion()


def at(fusion, i, **changes):
    """The fusion with operation i changed."""
    ops = list(fusion.ops)
    ops[i] = replace(ops[i], **changes)
    return replace(fusion, ops=tuple(ops))


def broken(fusion):
    """Broken copies of `small`, by what is wrong."""
    neg, mm = fusion.ops[-1], fusion.ops[-2]
    other = Value("v", TensorType((4, 8), "f32"))
    as_bf16 = Value(neg.outputs[0].name, neg.outputs[0].type.with_(dtype="bf16"))
    return {
        "wrong type": replace(at(fusion, -1, outputs=(as_bf16,)), outputs=(as_bf16,)),
        "read before made": replace(fusion, ops=(fusion.ops[0], *fusion.ops[2:])),
        "operations in another order": replace(fusion, ops=(*fusion.ops[:2], neg, mm)),
        "made twice": replace(fusion, ops=(*fusion.ops, neg)),
        "partition made twice": replace(
            fusion,
            ops=(
                *fusion.ops,
                replace(fusion.ops[0], outputs=tuple(replace(v) for v in fusion.ops[0].outputs)),
            ),
        ),
        "output never made": replace(fusion, outputs=(other,)),
        "an input twice": replace(fusion, inputs=(*fusion.inputs, fusion.inputs[0])),
        "a wrong attribute": at(fusion, 1, attrs={"axis": 0}),
        "a wrong operand": at(fusion, -2, inputs=(mm.inputs[0], fusion.inputs[0], mm.inputs[2])),
    }


def test_broken_fusions(golden):
    assert small().verify()
    golden(messages({what: fusion.verify for what, fusion in broken(small()).items()}))


def test_the_ends_of_another_partition(golden):
    """Wrong offsets do not type-check, whichever grouped operation reads them."""
    fd = FusionDefinition()
    m = fd.define_size("m")
    x = fd.define_tensor(shape=[m, 32], dtype="f32")
    y = fd.define_tensor(shape=[m, 8], dtype="f32")
    w = fd.define_tensor(shape=[4, 8, 32], dtype="f32")
    bias = fd.define_tensor(shape=[4, 32], dtype="f32")
    scale = fd.define_tensor(shape=[m, 2], dtype="f8e4m3")
    right, wrong = (
        fd.define_tensor(shape=[4], dtype="i32", ends=fd.define_groups(name, 4))
        for name in ("g", "h")
    )
    rows, other = fd.ops.partition(x, right), fd.ops.partition(y, right)
    plain = fd.define_tensor(shape=[4], dtype="i32")
    calls = {
        "grouped_mm": lambda ends: fd.ops.grouped_mm(rows, w, ends),
        "grouped_mm_t": lambda ends: fd.ops.grouped_mm_t(other, w, ends),
        "grouped_outer": lambda ends: fd.ops.grouped_outer(other, rows, ends),
        "group_add": lambda ends: fd.ops.group_add(rows, bias, ends),
        "group_mul": lambda ends: fd.ops.group_mul(rows, bias, ends),
        "group_sum": lambda ends: fd.ops.group_sum(rows, ends),
        "grouped_swizzle": lambda ends: fd.ops.grouped_swizzle(
            fd.ops.partition(scale, right), ends, layout="sf128x4"
        ),
        "plain rows": lambda ends: fd.ops.grouped_mm(x if ends is wrong else rows, w, right),
        "two partitions in one sum": lambda ends: fd.ops.add(rows, fd.ops.partition(x, ends)),
    }
    for call in calls.values():
        call(right)
    bad = {what: partial(call, wrong) for what, call in calls.items()}
    golden(messages(bad | {"plain ends": lambda: fd.ops.grouped_mm(rows, w, plain)}))


def test_groups_and_sizes_must_agree(golden):
    fd = FusionDefinition()
    m = fd.define_size("m")
    x = fd.define_tensor(shape=[m, 32], dtype="f32")
    g = fd.define_groups("g", 4)
    ends = fd.define_tensor(shape=[4], dtype="i32", ends=g)
    rows = fd.ops.partition(x, ends)

    def tensor(*shape, dtype="f32"):
        return fd.define_tensor(shape=shape, dtype=dtype)

    codes, scale = tensor(4, 8, 16, dtype="u8"), tensor(4, 8, 2, dtype="f8e4m3")
    counts = fd.ops.partition(tensor(m, 2, dtype="i32"), ends)
    packed = fd.ops.pack(codes, scale, tensor(4), encoding="nvfp4", layout="linear")
    calls = [
        lambda: fd.ops.grouped_mm(rows, tensor(5, 8, 32), ends),
        lambda: fd.ops.grouped_mm(rows, tensor(4, 8, 31), ends),
        lambda: fd.ops.grouped_mm_t(rows, tensor(4, 8, 32), ends),
        lambda: fd.ops.grouped_mm(rows, tensor(4, 8, 32, dtype="f64"), ends),
        lambda: fd.ops.grouped_mm(rows, packed, ends, a_layout="sf128x4"),
        lambda: fd.ops.group_add(rows, tensor(4, 32, dtype="bf16"), ends),
        lambda: fd.ops.group_add(rows, tensor(3, 32), ends),
        lambda: fd.ops.group_mul(rows, tensor(4, 31), ends),
        lambda: fd.ops.group_sum(tensor(4, 8), ends),
        lambda: fd.ops.group_sum(counts, ends),
        lambda: fd.ops.ends(tensor(4, dtype="i64"), rows=m, groups=g),
        lambda: fd.ops.ends(tensor(5, dtype="i32"), rows=m, groups=g),
        lambda: fd.ops.partition(x, tensor(4, dtype="i32")),
        lambda: fd.ops.route(x, groups=g),
        lambda: fd.ops.pack(
            codes, tensor(4, 8, 3, dtype="f8e4m3"), tensor(4), encoding="nvfp4", layout="linear"
        ),
        lambda: fd.ops.pack(codes, scale, tensor(4, 3), encoding="nvfp4", layout="linear"),
        lambda: fd.ops.pack(codes, scale, tensor(8), encoding="nvfp4", layout="linear"),
        lambda: fd.ops.pack(codes, scale, tensor(4), encoding="nvfp5", layout="linear"),
        lambda: fd.ops.quantize(tensor(4, 24), tensor(), encoding="nvfp4"),
        lambda: fd.ops.quantize(tensor(16), tensor(), encoding="nvfp4"),
        lambda: fd.ops.decode_scale(tensor(4, 32, dtype="i32"), encoding="nvfp4"),
        lambda: fd.ops.unpack(x),
        lambda: fd.ops.grouped_swizzle(rows, ends, layout="linear"),
        lambda: fd.ops.add(x, tensor(m, 31)),
        lambda: fd.ops.add(x, tensor(m, 32, dtype="bf16")),
        lambda: fd.ops.add(x, tensor(32)),
        lambda: fd.ops.add(1.0, 2.0),
        lambda: fd.ops.where(tensor(m, 32, dtype="bool"), 1.0, 2.0),
        lambda: fd.ops.add(tensor(3, dtype="i32"), 0.5),
        lambda: fd.ops.exp(tensor(3, dtype="i32")),
        lambda: fd.ops.logical_not(x),
        lambda: fd.ops.cast(x, dtype="nvfp4"),
        lambda: fd.ops.cast(1.0, dtype="f32"),
        lambda: fd.ops.reshape(x, new_shape=(m, 31)),
        lambda: fd.ops.reshape(packed, new_shape=(32, 32)),
        lambda: fd.ops.permute(x, dims=(0, 0)),
        lambda: fd.ops.broadcast_in_dim(x, shape=(m, 32), broadcast_dims=(1, 0)),
        lambda: fd.ops.broadcast_in_dim(x, shape=(m, 31), broadcast_dims=(0, 1)),
        lambda: fd.ops.broadcast_in_dim(x, shape=(m, 32), broadcast_dims=(0, 2)),
        lambda: fd.ops.slice(x, start_indices=(0, 4), end_indices=(m, 33)),
        lambda: fd.ops.slice(x, start_indices=(0,), end_indices=(m,)),
        lambda: fd.ops.pad(x, before=(0, 1), after=(0, 1), shape=(m, 33)),
        lambda: fd.ops.cat(x, tensor(m, 3), dim=0),
        lambda: fd.ops.cat(x, tensor(3), dim=0),
        lambda: fd.ops.full(shape=(3,), fill_value=0.5, dtype="i32"),
        lambda: fd.ops.sum(x, dims=(2,), keepdim=False),
        lambda: fd.ops.sum(x, dims=(), keepdim=False),
        lambda: fd.ops.index_select(x, tensor(3), dim=0),
        lambda: fd.ops.index_select(x, tensor(3, dtype="i32"), dim=2),
        lambda: fd.ops.index_put_accumulate(x, tensor(3, dtype="i32"), tensor(4, 32)),
        lambda: fd.ops.index_put_accumulate(x, tensor(3, dtype="i32"), tensor(3, 31)),
        lambda: fd.ops.invert(tensor(m, 2, dtype="i32"), rows=m),
        lambda: fd.ops.topk_ids(tensor(m, 8, dtype="i32"), 0, k=2),
        lambda: fd.ops.topk_ids(tensor(8, m), 0, k=2),
        lambda: fd.ops.topk_ids(x, 0, k=33),
        lambda: fd.ops.topk_ids(x, 1.0, k=2),
        lambda: fd.ops.topk_ids(x, tensor(31), k=2),
        lambda: fd.ops.topk_ids(x, tensor(32, dtype="bf16"), k=2),
        lambda: fd.ops.topk_ids(x, 0, k=2, scoring="tanh"),
        lambda: fd.ops.topk_ids(x, 0, k=2, n_group=5),
        lambda: fd.ops.topk_ids(x, 0, k=2, n_group=4, topk_group=5),
        lambda: fd.ops.topk_ids(x, 0, k=2, n_group=32, topk_group=2, best_of_group=2),
        lambda: fd.ops.topk_ids(x, 0, k=17, n_group=4, topk_group=2),
        lambda: fd.ops.topk_weights(x, tensor(m, 2)),
        lambda: fd.ops.topk_weights(x, tensor(3, 2, dtype="i32")),
        lambda: fd.ops.topk_weights(
            x, tensor(m, 2, dtype="i32"), routed_scaling_factor=float("nan")
        ),
        lambda: fd.ops.topk_weights_backward(x, tensor(m, 2, dtype="i32"), tensor(m, 3)),
        lambda: fd.ops.combine(x, tensor(3, 2, dtype="i32"), tensor(3, 3)),
        lambda: fd.ops.exp(x, x),
        lambda: fd.ops.explode(x),
    ]
    said = []
    for call in calls:
        count = fd.count
        with pytest.raises(Error) as caught:
            call()
        assert fd.count == count  # nothing wrong was appended
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    golden("\n".join(said))


def test_inputs_are_checked_before_anything_runs():
    fusion = small()
    x, ids, w = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.randn(4, 8, 32)
    evaluate(fusion, x, ids, w)
    for bad, error, what in [
        ((x, ids), ShapeError, "2 inputs"),
        ((x, ids[:4], w), ShapeError, r"i1 has shape \[4, 2\]"),
        ((x[0], ids, w), ShapeError, r"i0 has shape \[32\]"),
        ((x[:, :31], ids, w), ShapeError, "i0 has shape"),
        ((x.bfloat16(), ids, w), DtypeError, r"i0 is torch\.bfloat16"),
        ((x, ids, w[:3]), ShapeError, "i2 has shape"),
        ((x, ids + 3, w), GroupsError, "ids"),
    ]:
        with pytest.raises(error, match=what):
            fusion.evaluate(*bad)


def test_sizes_that_no_input_shows():
    fd = FusionDefinition()
    m = fd.define_size("m")
    x = fd.define_tensor(shape=[2 * m + 1], dtype="f32")
    fd.add_output(fd.ops.neg(x))
    with pytest.raises(ShapeError, match="no input has the size m"):
        fd.fusion().evaluate(torch.zeros(7))
    assert fd.fusion().evaluate(torch.zeros(7), sizes={"m": 3})[0].shape == (7,)
    with pytest.raises(ShapeError, match="i0 has shape"):
        fd.fusion().evaluate(torch.zeros(7), sizes={"m": 4})


def test_ends_as_inputs_are_checked():
    fd = FusionDefinition()
    ends = fd.define_tensor(shape=[2], dtype="i32", ends=fd.define_groups("g", 2))
    x = fd.define_tensor(shape=[-1, 3], dtype="f32")
    fd.add_output(
        fd.ops.group_add(
            fd.ops.partition(x, ends), fd.define_tensor(shape=[2, 3], dtype="f32"), ends
        )
    )
    rest = torch.zeros(4, 3), torch.zeros(2, 3)
    evaluate(fd.fusion(), torch.tensor([1, 4], dtype=torch.int32), *rest)
    with pytest.raises(GroupsError, match=r"i0\[1\] = 5 is past the 4 rows"):
        fd.fusion().evaluate(torch.tensor([1, 5], dtype=torch.int32), *rest)


@given(programs())
def test_random_programs_verify_and_know_their_edges(fusion: Fusion):
    assert fusion.verify() is fusion
    for op in fusion.ops:
        for v in op.values:
            assert op in fusion.readers[v]
        for v in op.outputs:
            assert fusion.producers[v] is op
    assert set(fusion.symbols) == {"t"}
    assert symbol("t") == fusion.inputs[0].type.shape[0]
