"""Products of operands in 8 bits: types, meaning and derivative, by loops in float64 that share no
code with them.
"""

from __future__ import annotations

from functools import partial

import fp8_block
import mxfp8
import pytest
import torch
from bad_calls import messages
from cover import examples
from fusions import assert_same_bits, evaluate, in_groups
from hypothesis import given, strategies as st
from routings import Partition, partitions

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import (
    FP8_COLUMNS,
    FP8_COLUMNS_F32,
    MXFP8,
    MXFP8_COLUMNS,
    dequantize,
    quantize,
)
from fusion_moe.ir.core import Fusion, Value
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.kinds import eight_bits
from fusion_moe.ir.types import DTYPES
from fusion_moe.passes import PASSES, lower_operands

K, N = 64, 96
WIDE = 200, 144  # in FP8, with last blocks that are short
TURNED = 320, 192  # the same, of weights whose copy is transposed
# activation_format -> y, dx, dW of x, weight, dy, sizes
PRODUCTS = {
    "mxfp8": mxfp8.products,
    "mxfp8_wgrad_bf16": partial(mxfp8.products, wgrad="bf16"),
    "fp8_block": fp8_block.products,
    "fp8_block_wgrad_bf16": partial(fp8_block.products, wgrad="bf16"),
    "fp8_block_f32": partial(fp8_block.products, power_of_two=False),
}
FEW = partitions().filter(lambda partition: len(partition.sizes) < 10)
LAYER = Partition((5, 0, 33, 64, 1), 3)


def sizes_of(form: str) -> tuple[int, int]:
    """K and N"""
    if form == "fp8_block_f32":
        return TURNED
    return WIDE if form.startswith("fp8") else (K, N)


def layer(
    groups: int, form: str = "mxfp8", transposed: bool = False, dtype: str = "bf16"
) -> Fusion:
    """x [M, K], offs i32[G], weight [G, N, K] or [G, K, N] -> [M, N]"""
    fd, (k, n) = FusionDefinition(), sizes_of(form)
    rows = fd.define_size("s0")
    x, offs = (
        fd.define_tensor(shape=[rows, k], dtype=dtype),
        fd.define_tensor(shape=[groups], dtype="i32"),
    )
    weight = fd.define_tensor(
        shape=[groups, *((k, n) if transposed else (n, k))], dtype=dtype, role="weight"
    )
    ends = fd.groups_of(offs, rows)
    fd.add_output(
        fd.ops.cast(
            eight_bits.product(fd, fd.partition_by(x, ends), weight, ends, form, transposed),
            dtype=dtype,
        )
    )
    return fd.fusion()


def operands(
    partition: Partition, dtype: torch.dtype = torch.bfloat16, form: str = "mxfp8"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K], weight [G, N, K], dy [M, N]: rows of many magnitudes, NaN past the last end"""
    g, rows, groups = torch.Generator().manual_seed(0), partition.rows, len(partition.sizes)
    k, n = sizes_of(form)
    x, dy = (
        torch.randn(rows, m, generator=g) * 2.0 ** torch.randint(-5, 5, (rows, m), generator=g)
        for m in (k, n)
    )
    for t in (x, dy):
        t[rows - partition.spare :] = float("nan")
    return x.to(dtype), (torch.randn(groups, n, k, generator=g) / 8).to(dtype), dy.to(dtype)


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    """Within a rounding to bf16 (of each of the two), and what sums of float32 are off."""
    roundings = 1 + (want.dtype == torch.bfloat16)
    torch.testing.assert_close(
        found.double(),
        want.double(),
        rtol=roundings * 2**-8,
        atol=float(want.abs().max()) * 1e-5 if want.numel() else 0,
    )


@examples(0.7)
@given(FEW, st.sampled_from(tuple(PRODUCTS)), st.booleans())
def test_products_and_gradients(partition, form, transposed):
    x, weight, dy = operands(partition, form=form)
    fusion = layer(len(partition.sizes), form, transposed)
    given_ = (x, partition.ends, weight.mT.contiguous() if transposed else weight)
    derivative = differentiate(fusion, (0, 2))
    made = evaluate(derivative.forward, *given_)
    dx, dw = evaluate(derivative.backward, *derivative.read(given_, made), dy)
    for found, want in zip(
        (made[0], dx, dw.mT if transposed else dw),
        PRODUCTS[form](x, weight, dy, partition.sizes),
        strict=True,
    ):
        near(found, want)


@pytest.mark.parametrize(
    ("form", "transposed", "dtype"),
    [
        ("mxfp8", False, "bf16"),
        ("mxfp8_wgrad_bf16", True, "bf16"),
        ("mxfp8", True, "f16"),
        ("mxfp8_wgrad_bf16", False, "f32"),
        ("fp8_block", False, "bf16"),
        ("fp8_block_wgrad_bf16", True, "f16"),
        ("fp8_block", True, "f32"),
        ("fp8_block_f32", False, "bf16"),
    ],
)
def test_compiled_programs_give_the_same(form, transposed, dtype):
    """Copies bit for bit, products as near as kernels are to their meaning."""
    x, weight, dy = operands(LAYER, DTYPES[dtype], form)
    given_ = (x, LAYER.ends, weight.mT.contiguous() if transposed else weight)
    derivative = differentiate(layer(5, form, transposed, dtype), (0, 2))
    want = derivative.forward.evaluate(*given_)
    made = fusion_moe.run(derivative.forward, given_)
    assert_same_bits(made[1:], want[1:])
    read = derivative.read(given_, made)
    found = (made[0], *fusion_moe.run(derivative.backward, [*read, dy]))
    for a, b in zip(found, (want[0], *derivative.backward.evaluate(*read, dy)), strict=True):
        near(a, b)
    y, dx, dw = PRODUCTS[form](x, weight, dy, LAYER.sizes)
    for a, b in zip(found, (y, dx, dw.mT if transposed else dw), strict=True):
        near(a, b)


COPIES = ["f8e4m3[s0/g0, 64]", "f8e8m0[ceildiv(s0, 32) + 5, 64]"]
COLUMNS = ["f8e4m3[s0/g0, 200]", "f32[ceildiv(s0, 128) + 5, 200]"]
BLOCKS = ["f8e4m3[5, 144, 200]", "f8e8m0[5, 144, 2]"]
# the inputs whose gradients are wanted, the format: what the forward saves, the inputs that the
# backward reads, what it quantizes
SAVED = {
    ((0,), "mxfp8"): ([], [1, 2], ["mxfp8", "mxfp8_columns"]),
    ((0,), "mxfp8_wgrad_bf16"): ([], [1, 2], ["mxfp8", "mxfp8_columns"]),
    ((2,), "mxfp8"): (COPIES, [1], ["mxfp8_columns"]),
    ((2,), "mxfp8_wgrad_bf16"): ([], [0, 1], []),
    ((0, 2), "mxfp8"): (COPIES, [1, 2], ["mxfp8", "mxfp8_columns", "mxfp8_columns"]),
    ((0, 2), "mxfp8_wgrad_bf16"): ([], [0, 1, 2], ["mxfp8", "mxfp8_columns"]),
    ((0,), "fp8_block"): (BLOCKS, [1], ["fp8_rows"]),
    ((2,), "fp8_block"): (COLUMNS, [1], ["fp8_columns"]),
    ((0, 2), "fp8_block"): ([*BLOCKS, *COLUMNS], [1], ["fp8_columns", "fp8_rows"]),
    ((0, 2), "fp8_block_wgrad_bf16"): (BLOCKS, [0, 1], ["fp8_rows"]),
}


@pytest.mark.parametrize("wanted", SAVED)
def test_what_is_saved_and_quantized(wanted):
    """Which copies there are follows from who wants a gradient. The copy of x is made in the
    forward and saved; x itself is not. Weights in FP8 are quantized once.
    """
    fusion, (saved, reads, quantized) = layer(5, wanted[1]), SAVED[wanted]
    derivative = differentiate(fusion, wanted[0])
    assert [str(v.type) for v in derivative.forward.outputs[1:]] == saved
    assert [i for i in derivative.reads if i < 3] == reads
    kinds = [
        [op.attrs["encoding"] for op in f.ops if op.kind.name == "quantize"]
        for f in (derivative.forward, derivative.backward)
    ]
    made = ["fp8_rows", "fp8_e8m0"] if wanted[1].startswith("fp8") else ["mxfp8", "mxfp8"]
    columns = ["fp8_columns"] * (COLUMNS[0] in saved) + ["mxfp8_columns"] * (COPIES[0] in saved)
    assert kinds[0] == [*made, *columns]
    assert sorted(kinds[1]) == quantized


@pytest.mark.parametrize("form", ["mxfp8", "fp8_block", "fp8_block_f32"])
def test_the_passes_keep_every_bit(form):
    x, weight, dy = operands(LAYER, form=form)
    derivative = differentiate(layer(5, form), (0, 2))
    made = derivative.forward.evaluate(x, LAYER.ends, weight)
    for fusion, inputs in (
        (derivative.forward, (x, LAYER.ends, weight)),
        (derivative.backward, (*derivative.read((x, LAYER.ends, weight), made), dy)),
    ):
        want, after = evaluate(fusion, *inputs), fusion
        for run in PASSES:
            after = run(after, TARGETS["cpu"]).verify()
            assert_same_bits(evaluate(after, *inputs), want)
        assert not any(
            v.type.quantized for op in after.ops if op.kind.role == "grouped" for v in op.values
        )
        assert str(lower_operands(after, TARGETS["cpu"])) == str(after)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("k", "n"), [(256, 128), (320, 192), (64, 448)])
def test_products_that_a_target_multiplies_as_codes(k, n, by_columns):
    """Forward, dgrad on turned weights, and wgrad on turned rows, some of them saved so, mean what
    they did, also where last blocks are short.
    """
    fd, *of_product = given_product(k, n, groups=5)
    fd.add_output(eight_bits.product(fd, *of_product, "fp8_block"))
    derivative = differentiate(fd.fusion(), (0, 1), by_columns=by_columns)
    g = torch.Generator().manual_seed(0)
    rows, dy = (torch.randn(LAYER.rows, width, generator=g) for width in (k, n))
    given_ = rows.bfloat16(), torch.randn(5, n, k, generator=g).bfloat16(), LAYER.ends
    read = [*derivative.read(given_, derivative.forward.evaluate(*given_)), dy]
    for fusion, inputs, backward in (
        (derivative.forward, given_, False),
        (derivative.backward, read, True),
    ):
        lowered = lower_operands(fusion, TARGETS["cuda"]).verify()
        codes = [op for op in lowered.ops if op.kind.name == "grouped_mm"]
        assert [[v.type.dtype for v in op.values[:2]] for op in codes] == [["fp8_rows", "fp8_e8m0"]]
        kinds = [op.kind.name for op in lowered.ops]
        turned = [0, 2 - by_columns] if backward else [1, int(by_columns)]
        assert [
            kinds.count(name) for name in ("transpose_blocks", "transpose_row_blocks")
        ] == turned
        assert str(lower_operands(lowered, TARGETS["cuda"])) == str(lowered)
        for found, want in zip(evaluate(lowered, *inputs), evaluate(fusion, *inputs), strict=True):
            near(found.float(), want.float())


@given(FEW, st.sampled_from((MXFP8_COLUMNS, FP8_COLUMNS, FP8_COLUMNS_F32)))
def test_blocks_begin_at_each_group(partition, encoding):
    """The parts along rows of groups are those of each group by itself, padded with zeros."""
    x, *_ = operands(partition)
    fd = FusionDefinition()
    v, offs = fd.from_pytorch(x), fd.from_pytorch(partition.ends)
    ends = fd.groups_of(offs, partition.rows)
    q = fd.ops.quantize(fd.partition_by(v, ends), ends, encoding=encoding.name)
    for out in (*fd.ops.unpack(q), fd.ops.dequantize(q, ends, dtype="f32")):
        fd.add_output(out)
    codes, _, numbers = evaluate(fd.fusion(), x, partition.ends)
    for _, rows in partition.runs:
        mine = x[rows]
        whole = quantize(
            torch.cat([mine, mine.new_zeros(-len(mine) % encoding.block, K)]), encoding=encoding
        )
        assert torch.equal(
            codes[rows].view(torch.uint8), whole.codes.view(torch.uint8)[: len(mine)]
        )
        assert torch.equal(numbers[rows], dequantize(whole)[: len(mine)])
    past = slice(partition.rows - partition.spare, None)
    assert not codes[past].float().any()
    assert not numbers[past].any()


def given_product(
    k: int = 64, n: int = 64, groups: int = 2
) -> tuple[FusionDefinition, Value, Value, Value]:
    """A definition with rows in groups, weights and ends."""
    fd = FusionDefinition()
    x, weight = (fd.define_tensor(shape=s, dtype="bf16") for s in ([-1, k], [groups, n, k]))
    rows, ends = in_groups(fd, x, fd.define_tensor(shape=[groups], dtype="i32"))
    return fd, rows, weight, ends


def test_refusals(golden):
    """Blocks lie along what is contracted, and divide it; of what was packed elsewhere there are no
    gradients.
    """

    def product(n: int, k: int) -> Value:
        fd, *operands = given_product(k, n)
        return eight_bits.product(fd, *operands, "mxfp8")

    fd, rows, weight, ends = given_product()
    along = fd.ops.quantize(rows, encoding="mxfp8")
    across = fd.ops.quantize(rows, ends, encoding="mxfp8_columns")
    w, w_across = (fd.ops.quantize(weight, encoding=e.name) for e in (MXFP8, MXFP8_COLUMNS))
    shapes = ([2, 64, 64], "f8e4m3"), ([2, 64, 2], "f8e8m0")
    parts = [fd.define_tensor(shape=s, dtype=d) for s, d in shapes]
    frozen = fd.ops.pack(*parts, encoding="mxfp8", layout="linear")
    fd.add_output(fd.ops.grouped_mm(along, frozen, ends, wgrad="bf16"))
    fusion = fd.fusion()
    assert product(96, 64)
    cases = {
        "N": lambda: product(33, 64),
        "K": lambda: product(96, 48),
        "a weight across": lambda: fd.ops.grouped_mm(along, w_across, ends),
        "a weight along": lambda: fd.ops.grouped_mm_t(along, w, ends),
        "rows along": lambda: fd.ops.grouped_outer(across, along, ends),
        "rows across": lambda: fd.ops.grouped_mm(across, w, ends),
        "wgrad": lambda: fd.ops.grouped_mm(along, w, ends, wgrad="f32"),
        "wgrad of bf16": lambda: fd.ops.grouped_mm(rows, weight, ends, wgrad="bf16"),
        "no ends": lambda: fd.ops.quantize(rows, encoding="mxfp8_columns"),
        "frozen copies": lambda: differentiate(fusion, (0,)),
    }
    golden(messages(cases))
