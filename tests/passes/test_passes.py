"""Each pass: what it makes of a small Fusion, and that it keeps every bit of random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cover import examples
from fusions import G, N, assert_same_bits, evaluate, inputs_of, programs
from hypothesis import given, strategies as st

from fusion_moe import FusionDefinition
from fusion_moe.backends import TARGETS
from fusion_moe.ir.core import Fusion
from fusion_moe.passes import (
    PASSES,
    assign_layouts,
    canonicalize,
    contract_rounding,
    dropped_roundings,
    simplify,
)

CPU = TARGETS["cpu"]
ENDS = torch.tensor([2, 5], dtype=torch.int32)


@examples(2)
@given(programs(), st.sampled_from(("cpu", "sm_100")), st.sampled_from((0, 5)))
def test_passes_keep_every_bit(fusion, target, tokens):
    """One after the other; then nothing is left to do."""
    inputs = inputs_of(tokens)
    before = evaluate(fusion, *inputs)
    for run in PASSES:
        fusion = run(fusion, TARGETS[target]).verify()
        assert_same_bits(evaluate(fusion, *inputs), before)
    again = fusion
    for run in PASSES:
        again = run(again, TARGETS[target])
    assert str(again) == str(fusion)


# simplify -----------------------------------------------------------------------------------------


def _shuffled(fusion: Fusion, random) -> Fusion:
    """The same operations in another order that the values allow."""
    left, made, order = list(fusion.ops), set(fusion.inputs), []
    while left:
        op = random.choice([op for op in left if made.issuperset(op.values)])
        left.remove(op)
        order.append(op)
        made.update(op.outputs)
    return replace(fusion, ops=tuple(order)).verify()


@given(programs(), st.randoms(use_true_random=False))
def test_the_order_of_operations_does_not_show(fusion, random):
    assert str(simplify(_shuffled(fusion, random), CPU)) == str(simplify(fusion, CPU))


def test_simplify(golden):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    first = fd.ops.exp(x)
    fd.ops.neg(first)  # nobody reads it
    second = fd.ops.exp(x)  # the same again
    y = fd.ops.add(second, fd.ops.mul(first, 0.0))
    z = fd.ops.add(y, fd.ops.mul(first, -0.0))  # another number
    fd.add_output(z)
    fd.add_output(fd.ops.exp(x))
    fusion = fd.fusion()
    golden(f"{fusion}\n\n{simplify(fusion, CPU)}")
    inputs = [torch.randn(3, 4)]
    assert_same_bits(evaluate(simplify(fusion, CPU), *inputs), evaluate(fusion, *inputs))


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), (0.0, 0)])
def test_numbers_that_are_equal_in_python_are_not_one(a, b):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[3], dtype="f32")
    for number in (a, b):
        fd.add_output(fd.ops.add(x, number))
        fd.add_output(fd.ops.full(shape=(2,), fill_value=number, dtype="f32"))
    fusion = simplify(fd.fusion(), CPU)
    assert len(fusion.ops) == 4
    inputs = [torch.tensor([-0.0, 1.0, 2.0])]
    assert_same_bits(evaluate(fusion, *inputs), evaluate(fd.fusion(), *inputs))


# canonicalize -------------------------------------------------------------------------------------


def test_canonicalize(golden):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="bf16")
    ends = fd.define_tensor(shape=[2], dtype="i32", ends=fd.define_groups("g", 2))
    w = fd.define_tensor(shape=[2, 8, 4], dtype="bf16")
    rows = fd.ops.partition(x, ends)
    wide = fd.ops.cast(rows, dtype="f32")  # read exactly by the product
    y = fd.ops.grouped_mm(wide, w, ends)
    y = fd.ops.div(y, fd.ops.add(fd.ops.exp(fd.ops.neg(y)), 1.0))  # silu
    y = fd.ops.div(y, fd.ops.add(1.0, fd.ops.exp(fd.ops.neg(y))))  # silu, the other way round
    y = fd.ops.div(y, fd.ops.add(fd.ops.exp(fd.ops.neg(y)), 2.0))  # not silu
    y = fd.ops.cast(y, dtype="f32")  # nothing
    # rounded once
    back = fd.ops.cast(fd.ops.cast(fd.ops.cast(y, dtype="bf16"), dtype="f32"), dtype="bf16")
    flat = fd.ops.reshape(
        fd.ops.reshape(back, new_shape=(2, x.type.shape[0], 4)), new_shape=(x.type.shape[0] * 8,)
    )
    fd.add_output(flat)
    fd.add_output(fd.ops.partition(fd.ops.partition(rows, ends), ends))
    fusion = fd.fusion()
    after = simplify(canonicalize(fusion, CPU), CPU)
    golden(f"{fusion}\n\n{after}")
    inputs = [
        torch.randn(5, 4).bfloat16(),
        ENDS,
        torch.randn(2, 8, 4).bfloat16(),
    ]
    assert_same_bits(evaluate(after, *inputs), evaluate(fusion, *inputs))


def test_masks_stay_what_is_gathered_and_multiplied():
    """A mask has no truth value; as numbers it is no exact widening either."""
    fd = FusionDefinition()
    inputs = [torch.randn(5, 4), torch.tensor([3, 1]), ENDS, torch.randn(2, 8, 4)]
    x, index, offs, w = map(fd.from_pytorch, inputs)
    mask = fd.ops.lt(x, 0.0)
    numbers, ends = fd.ops.cast(mask, dtype="f32"), fd.groups_of(offs, 5)
    for v in (fd.ops.reshape(mask, new_shape=(5, 4)), numbers):
        fd.add_output(fd.ops.index_select(v, index, dim=0))
    fd.add_output(fd.ops.grouped_mm(fd.ops.partition(numbers, ends), w, ends))
    fusion = fd.fusion()
    after = canonicalize(fusion, CPU)
    assert_same_bits(evaluate(after, *inputs), evaluate(fusion, *inputs))


@pytest.mark.parametrize(
    ("dtype", "through"),
    [
        ("f32", "bf16"),
        ("bf16", "f16"),
        ("f16", "bf16"),
        ("f32", "f16"),
        ("f64", "f32"),
        ("f32", "i32"),
        ("i64", "f32"),
        ("f32", "f8e4m3"),
    ],
)
def test_a_cast_that_loses_something_stays(dtype, through):
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[4], dtype=dtype)
    fd.add_output(fd.ops.cast(fd.ops.cast(x, dtype=through), dtype=dtype))
    assert len(canonicalize(fd.fusion(), CPU).ops) == 2


@pytest.mark.parametrize("dtype", ["f8e4m3", "f64", "i32"])
def test_a_product_does_not_take_every_dtype(dtype):
    """A cast before a product is dropped only where the product takes what it was before."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype=dtype)
    ends = fd.define_tensor(shape=[2], dtype="i32", ends=fd.define_groups("g", 2))
    rows = fd.ops.cast(fd.ops.partition(x, ends), dtype="f32")
    fd.add_output(fd.ops.grouped_mm(rows, fd.define_tensor(shape=[2, 8, 4], dtype="bf16"), ends))
    assert [op.kind.name for op in canonicalize(fd.fusion(), CPU).ops] == [
        "partition",
        "cast",
        "grouped_mm",
    ]


def test_silu_of_bf16_pieces_is_left():
    """Each piece rounds; silu rounds once."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[64], dtype="bf16")
    fd.add_output(fd.ops.div(x, fd.ops.add(fd.ops.exp(fd.ops.neg(x)), 1.0)))
    assert "silu" not in str(canonicalize(fd.fusion(), CPU))


# assign_layouts -----------------------------------------------------------------------------------


def quantized_product(rows: int | None = None):
    fd = FusionDefinition()
    m = rows or fd.define_size("m")
    x = fd.define_tensor(shape=[m, 64], dtype="bf16")
    offs = fd.define_tensor(shape=[G], dtype="i32")
    parts = [
        fd.define_tensor(shape=s, dtype=d, role="weight")
        for s, d in (([G, N, 32], "u8"), ([G, N, 4], "f8e4m3"), ([G], "f32"))
    ]
    ends = fd.ops.ends(offs, rows=m, groups=fd.define_groups("g", G))
    a = fd.ops.quantize(
        fd.ops.partition(x, ends), fd.ops.decode_scale(x, encoding="nvfp4"), encoding="nvfp4"
    )
    fd.add_output(
        fd.ops.grouped_mm(a, fd.ops.pack(*parts, encoding="nvfp4", layout="linear"), ends)
    )
    return fd.fusion()


def test_assign_layouts(golden):
    fusion = quantized_product()
    assert str(assign_layouts(fusion, CPU)) == str(fusion)
    golden(f"{fusion}\n\n{assign_layouts(fusion, TARGETS['sm_100'])}")


@pytest.mark.parametrize(
    "ends", [[0, 128, 128], [40, 128, 130], [128, 128, 128], [0, 0, 0], [1, 2, 3]]
)
@pytest.mark.parametrize("rows", [128, 130, 256])
def test_assign_layouts_keeps_every_bit(ends, rows):
    fusion = quantized_product()
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (G, N, 32), dtype=torch.uint8, generator=g)
    scale = torch.randint(0, 127, (G, N, 4), dtype=torch.uint8, generator=g).view(
        torch.float8_e4m3fn
    )
    if ends[-1] > rows:
        ends = [min(e, rows) for e in ends]
    x = torch.randn(rows, 64, generator=g).bfloat16()
    inputs = [x, torch.tensor(ends, dtype=torch.int32), codes, scale, torch.rand(G, generator=g)]
    moved = assign_layouts(fusion, TARGETS["sm_100"]).verify()
    assert [op.kind.name for op in moved.ops].count("relayout") == 1
    assert_same_bits(evaluate(moved, *inputs), evaluate(fusion, *inputs))


# contract_rounding --------------------------------------------------------------------------------


def rounded():
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 64], dtype="f32")
    narrow = fd.ops.cast(x, dtype="bf16")
    y = fd.ops.cast(fd.ops.silu(fd.ops.cast(narrow, dtype="f32")), dtype="f16")
    # moved on the way, and back
    turned = fd.ops.reshape(fd.ops.permute(y, dims=(1, 0)), new_shape=(8, 8, x.type.shape[0]))
    wide = fd.ops.reshape(fd.ops.cast(turned, dtype="f32"), new_shape=(64, x.type.shape[0]))
    z = fd.ops.mul(fd.ops.permute(wide, dims=(1, 0)), 3.0)
    stored = fd.ops.cast(z, dtype="bf16")
    fd.add_output(stored)
    fd.add_output(fd.ops.neg(fd.ops.cast(stored, dtype="f32")))
    return fd.fusion()


def test_contract_rounding(golden):
    fusion = rounded()
    dropped = dropped_roundings(fusion)
    assert [(op.kind.name, op.attrs["dtype"]) for op in dropped] == [
        ("cast", "bf16"),
        ("cast", "f16"),
    ]
    golden(f"{fusion}\n\n{contract_rounding(fusion)}")


def test_contract_rounding_is_nearer_to_the_truth():
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    truth = 3 * torch.nn.functional.silu(x.double())
    before, after = evaluate(rounded(), x), evaluate(contract_rounding(rounded()), x)
    assert not before[0].equal(after[0])
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype
    errors = [(v[1].double().neg() - truth).square().mean() for v in (before, after)]
    assert errors[1] < 0.9 * errors[0]
    once = truth.bfloat16()
    assert (after[0] == once).float().mean() > 0.999  # what is stored is rounded once


def test_what_is_stored_or_narrow_is_not_contracted():
    fd = FusionDefinition()
    x, h = fd.define_tensor(shape=[4], dtype="f32"), fd.define_tensor(shape=[4], dtype="bf16")
    narrow = fd.ops.cast(x, dtype="bf16")
    fd.add_output(narrow)  # stored
    fd.add_output(fd.ops.exp(fd.ops.cast(narrow, dtype="f32")))
    # back to what is narrower still
    fd.add_output(fd.ops.exp(fd.ops.cast(fd.ops.cast(h, dtype="f16"), dtype="bf16")))
    # truncation is no rounding
    fd.add_output(fd.ops.exp(fd.ops.cast(fd.ops.cast(x, dtype="i32"), dtype="f32")))
    fd.add_output(fd.ops.exp(fd.ops.cast(fd.ops.cast(x, dtype="f8e4m3"), dtype="f32")))
    moved = fd.ops.reshape(fd.ops.cast(fd.ops.neg(x), dtype="bf16"), new_shape=(2, 2))
    fd.add_output(moved)  # stored, once it was moved
    fd.add_output(fd.ops.exp(fd.ops.cast(moved, dtype="f32")))
    fusion = fd.fusion()
    assert dropped_roundings(fusion) == ()
    assert str(contract_rounding(fusion)) == str(fusion)
    assert str(simplify(contract_rounding(rounded()), CPU)).count("cast") == 2


@given(programs())
def test_contract_rounding_verifies_and_lists_what_it_drops(fusion):
    after = contract_rounding(fusion).verify()
    casts = sum(op.kind.name == "cast" for op in fusion.ops) - sum(
        op.kind.name == "cast" for op in after.ops
    )
    assert (casts > 0) == bool(dropped_roundings(fusion))
    if not dropped_roundings(fusion):
        assert after is fusion
    for v, w in zip(fusion.outputs, after.outputs, strict=True):
        assert v.type == w.type
