"""The interpreter of printed nvFuser definitions: the text, what each operation means, and what is
refused. tests/fusions.py compares it with all that is evaluated where nvFuser is installed.
"""

import math
from itertools import product

import pytest
import torch
from definitions import (
    DTYPES,
    GRID,
    defined,
    nvfp4_problem,
    run,
    same,
    starts_of,
    tensor_line,
    text_of,
)
from interpreter import UnknownOperation, canonical, interpret, output_dtypes, rebuilt, round_trip
from meaning.blockscale import addresses, ceil_to, swizzle, unswizzle
from meaning.values import E2M1, E4M3, Refused, Value, converted, to_e2m1, to_e8m0

nvfuser = pytest.mark.nvfuser

# The text -----------------------------------------------------------------------------------------


def test_inputs_in_order_and_dead_code():
    text = text_of(
        "c0 = fd.define_scalar(None, dtype=DataType.Int)",
        tensor_line("tv0", [-1, 4], "Float"),
        "c7 = fd.ops.div(128, 16)",
        "c5 = fd.define_scalar(None, dtype=DataType.Double)",
        "tv8 = fd.ops.exp(tv0)",
        "c9 = fd.ops.cast(c0, dtype=DataType.Index)",
        "tv1 = fd.ops.reshape(tv0, new_shape=[c9, 2, 2])",
        "tv2 = fd.ops.mul(tv1, c5)",
        "fd.add_output(tv2)",
        "fd.add_output(tv1)",
        "fd.add_output(tv2)",
    )
    x = torch.randn(3, 4)
    outputs = interpret(text, [3, x, 0.1])
    for got, want in zip(outputs, (x * 0.1, x, x * 0.1), strict=True):
        same(got, want.reshape(3, 2, 2))


def test_an_unknown_operation_is_named():
    with pytest.raises(UnknownOperation, match=r"fd\.ops\.welford has no meaning"):
        run("fd.ops.welford(tv0, dims=[0])", torch.ones(3))


ONES, WHOLE, NARROW = torch.ones(2), torch.ones(2).int(), torch.ones(2).bfloat16()


@pytest.mark.parametrize(
    ("line", "inputs", "message"),
    [
        ("fd.ops.add(tv0, tv1)", (ONES, ONES.double()), "several dtypes"),
        ("fd.ops.add(tv0, tv1)", (ONES, torch.ones(1, 2)), "several ranks"),
        ("fd.ops.add(tv0, tv1)", (NARROW, NARROW), "add of BFloat16"),
        ("fd.ops.relu(tv0)", (NARROW,), "relu of BFloat16"),
        ("fd.ops.mul(tv0, 2)", (ONES,), "with a Float operand"),
        ("fd.ops.mul(tv0, 2.0)", (WHOLE,), "with a Int32 operand"),
        ("fd.ops.where(tv0, tv0, tv0)", (WHOLE,), "not Bool"),
        ("fd.ops.cast(tv0, dtype=DataType.Float8_e4m3fn)", (WHOLE,), "no cast from Int32"),
        ("fd.ops.cast(tv0, dtype=DataType.UInt64)", (WHOLE,), "no meaning for the dtype UInt64"),
        ("fd.ops.sum(tv0, dims=[0], dtype=DataType.Float)", (NARROW,), "BFloat16 tensor"),
        ("fd.ops.squeeze(tv0, dims=[0])", (ONES,), "squeeze of dimension 0"),
        ("fd.ops.expand(tv0, shape=[4])", (ONES,), "expand of"),
        ("fd.ops.reshape(tv0, new_shape=[3])", (ONES,), "reshape of"),
        ("fd.ops.index_select(tv0, tv1, dim=0)", (ONES, -WHOLE), "negative index"),
        ("fd.ops.div(tv0, tv1)", (WHOLE, 0 * WHOLE), "ZeroDivisionError"),
    ],
)
def test_refused_with_the_line(line, inputs, message):
    with pytest.raises(Refused, match=message) as error:
        run(line, *inputs)
    assert f"in: tv9 = {line}" in str(error.value)


def test_inputs_are_what_the_definition_says():
    text = text_of(tensor_line("tv0", [-1, 4], "Float"), "fd.add_output(tv0)")
    interpret(text, [torch.ones(0, 4)])
    for inputs, message in (
        ([torch.ones(3, 5)], "expected .-1, 4."),
        ([torch.ones(3)], "expected 2 dimensions"),
        ([torch.ones(3, 4).double()], "expected torch.float32"),
        ([torch.ones(4, 3).T], "strides"),
        ([7], "expected a tensor"),
        ([torch.ones(3, 4), 5], "1 inputs fewer"),
        ([], "expected a tensor"),
    ):
        with pytest.raises(Refused, match=message):
            interpret(text, inputs)


def test_canonical_text_numbers_names_in_order():
    a = text_of(
        "c0 = fd.define_scalar(None, dtype=DataType.Int)",
        "c9 = fd.ops.cast(c0, dtype=DataType.Index)",
        "tv3 = fd.ops.iota(length=c9)",
    )
    b = text_of("c4 = fd.define_scalar(None, dtype=DataType.Int)", "tv7 = fd.ops.iota(length=c4)")
    assert canonical(a) == canonical(b)


@nvfuser
@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (2688.0, "2688.00"),
        (-0.0, "-0.00000"),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        (2.0**-10, "0.000976562"),  # is 0.0009765625
        (2.0**40, "1.09951e+12"),
    ],
)
def test_floats_are_printed_with_six_digits(value, printed):
    x = torch.arange(1, 4).double()
    fd = defined(lambda fd, x: fd.ops.mul(x, value), x)
    assert f"fd.ops.mul(tv0, {printed})" in str(fd)
    same(interpret(str(fd), [x])[0], x * eval(printed))


@nvfuser
def test_the_dtype_of_the_cutlass_product_is_not_printed():
    from nvfuser_direct import DataType

    inputs, want = nvfp4_problem([2, 0, 3], k=128)
    inputs = [x.view(torch.float4_e2m1fn_x2) if x.dtype == torch.uint8 else x for x in inputs]

    def cutlass(fd, a, b, scales_a, scales_b, alpha, sizes, rows, padded):
        scales = fd.ops.preprocess_grouped_matmul_input_sf(scales_a, rows, padded)
        more = (scales, scales_b, alpha, sizes, rows, padded)
        return fd.ops.cutlass_nvfp4_grouped_mm(a, b, *more, dtype=DataType.Half)

    fd = defined(cutlass, *inputs)
    assert round_trip(fd) == ["Half"] != output_dtypes(str(fd), inputs)
    assert [o.dtype().name for o in rebuilt(str(fd)).fusion.outputs()] == ["BFloat16"]
    assert output_dtypes(str(fd), inputs, cutlass_dtype="Half") == ["Half"]
    same(interpret(str(fd), inputs)[0], want.bfloat16())


@nvfuser
def test_round_trip_fails_where_the_text_means_something_else():
    # printed as [], which means none
    fd = defined(lambda fd, x: fd.ops.stride_order(x, [1, 0]), torch.ones(4, 6))
    with pytest.raises(AssertionError, match="executed, prints"):
        round_trip(fd)


# Values -------------------------------------------------------------------------------------------


def test_e2m1_rounds_to_even_and_saturates():
    halfway = (GRID[1:] + GRID[:-1]) / 2
    x = torch.cat(
        [
            GRID,
            halfway,
            torch.nextafter(halfway, torch.tensor(9.0)),
            torch.nextafter(halfway, torch.tensor(0.0)),
            torch.rand(999) * 9,
        ]
    )
    x = torch.cat([x, -x])
    ml_dtypes = pytest.importorskip("ml_dtypes")
    want = torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).astype("float32"))
    same(to_e2m1(x), want)
    same(
        to_e2m1(torch.tensor([math.inf, -math.inf, math.nan, 1e30, -0.1])),
        torch.tensor([6, -6, 6, 6, -0.0]),
    )


def test_e4m3_saturates():
    x = torch.arange(2**16).to(torch.uint16).view(torch.float16).float()
    got = converted(x, "Float", E4M3)
    want = x.to(torch.float8_e4m3fn).float()
    inside = x.abs() <= 448
    same(got[inside], want[inside])
    past = x.abs() > 448
    same(got[past], torch.copysign(torch.tensor(448.0), x[past]))
    assert got[x.isnan()].isnan().all()


def test_e8m0_rounds_up():
    x = torch.tensor(
        [0.0, 1e-45, 2.0**-127, 1.0, 1.0001, 1.9999, 2.0, 3.0, 3e38, math.inf, math.nan]
    )
    want = torch.tensor(
        [2.0**-127, 2.0**-127, 2.0**-127, 1, 2, 2, 2, 4, 2.0**127, 2.0**127, math.nan]
    )
    same(to_e8m0(x), want)


def test_floats_become_integers_toward_zero():
    x = torch.tensor([2.9, -2.9, 1e10, -1e10, 1e30, -math.inf, math.nan, -0.0])
    big, low = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    same(
        converted(x, "Float", "Int32"),
        torch.tensor([2, -2, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 0]).int(),
    )
    same(converted(x, "Float", "Int"), torch.tensor([2, -2, 10**10, -(10**10), big, low, low, 0]))
    same(converted(x, "Float", "Bool"), x != 0)
    same(converted(torch.tensor([2**32 + 5]), "Int", "Int32"), torch.tensor([5]).int())


def test_e2m1_bytes():
    codes = torch.randint(0, 256, (3, 5, 4), dtype=torch.uint8)
    values = torch.cat([GRID, -GRID])
    rows = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)
    line = "tv1 = fd.ops.cast(tv0, dtype=DataType.Float)"
    text = text_of(
        tensor_line("tv0", [-1, 5, 8], E2M1), line, "fd.add_output(tv1)", "fd.add_output(tv0)"
    )
    for x in (codes, codes.view(torch.float4_e2m1fn_x2)):
        floats, packed = interpret(text, [x])
        same(floats, rows)
        assert packed.dtype == torch.float4_e2m1fn_x2
        assert torch.equal(packed.view(torch.uint8), codes)
    # K, packed, is the middle dimension, and the fastest one in memory
    text = text_of(
        tensor_line("tv0", [3, 8, 5], E2M1, rest=", stride_order=[2, 0, 1]"),
        line,
        "fd.add_output(tv1)",
    )
    same(interpret(text, [codes.transpose(1, 2)])[0], rows.transpose(1, 2))
    with pytest.raises(Refused, match="strides"):
        interpret(text, [codes.transpose(1, 2).contiguous()])


def test_minimum_and_maximum_give_nan_for_nan():
    a, b = torch.tensor([1.0, math.nan, 2.0, -0.0]), torch.tensor([math.nan, 1.0, 3.0, 0.0])
    same(run("fd.ops.maximum(tv0, tv1)", a, b)[0], torch.tensor([math.nan, math.nan, 3, 0]))
    same(run("fd.ops.minimum(tv0, tv1)", a, b)[0], torch.tensor([math.nan, math.nan, 2, -0.0]))
    assert run("fd.ops.max(tv0, dims=[0])", a)[0].isnan()
    same(
        run("fd.ops.relu(tv0)", torch.tensor([-1.0, -0.0, math.nan, 2]))[0],
        torch.tensor([0, 0, math.nan, 2]),
    )


def test_integers():
    a = torch.tensor([7, -7, 2, -1, 0]).int()
    same(run("fd.ops.div(tv0, 2)", a)[0], torch.tensor([3, -3, 1, 0, 0]).int())
    same(run("fd.ops.bitwise_right_shift(tv0, 1)", a)[0], torch.tensor([3, -4, 1, -1, 0]).int())
    same(run("fd.ops.bitwise_left_shift(tv0, 32)", a)[0], torch.zeros(5).int())


def test_equal_elements_come_in_their_order_only_if_stable():
    x = torch.tensor([2, 1, 2, 1])
    same(run("fd.ops.argsort(tv0, dim=0, stable=True)", x)[0], torch.tensor([1, 3, 0, 2]))
    same(
        run("fd.ops.argsort(tv0, dim=0, descending=True, stable=True)", x)[0],
        torch.tensor([0, 2, 1, 3]),
    )
    same(run("fd.ops.argsort(tv0, dim=0)", x)[0], torch.tensor([3, 1, 2, 0]))


def test_scalars():
    text = text_of(
        "c0 = fd.define_scalar(None, dtype=DataType.Int)",
        "c1 = fd.ops.add(c0, 127)",
        "c2 = fd.ops.div(c1, 128)",
        "c3 = fd.ops.mul(c2, 128)",
        "c4 = fd.ops.maximum(c3, 5)",
        "c5 = fd.ops.cast(c4, dtype=DataType.Index)",
        "c6 = fd.ops.div(1.00000, 448.000)",
        "c7 = fd.ops.cast(c6, dtype=DataType.Float)",
        "tv0 = fd.ops.full(shape=[c5], fill_value=c7, dtype=DataType.Float)",
        "fd.add_output(tv0)",
    )
    same(interpret(text, [130])[0], torch.full((256,), 1 / 448))
    same(interpret(text, [-7])[0], torch.full((5,), 1 / 448))


@pytest.mark.parametrize(
    ("rows", "columns"), list(product([1, 31, 32, 33, 127, 128, 129, 300], [1, 3, 4, 6, 8, 16]))
)
def test_addresses_are_tiles_of_128_by_4(rows, columns):
    padded = torch.full((ceil_to(rows, 128), ceil_to(columns, 4)), -1)
    padded[:rows, :columns] = torch.arange(rows * columns).view(rows, columns)
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()
    at = addresses(rows, columns)
    assert len(set(at.flatten().tolist())) == rows * columns
    assert torch.equal(tiles[at].flatten(), torch.arange(rows * columns))


ROUTINGS = [
    [5],
    [128],
    [0, 3],
    [3, 0],
    [115, 144, 8, 257],
    [0, 0, 1, 0],
    [1, 1, 1, 1],
    [129, 0, 127],
]


@pytest.mark.parametrize(("sizes", "columns"), list(product(ROUTINGS, [1, 3, 4, 6, 8])))
def test_grouped_swizzle(sizes, columns):
    m, (rows, padded) = sum(sizes), starts_of(sizes)
    scales = (torch.arange(m * columns) % 255 + 1).view(m, columns).to(torch.uint8)
    scales = (
        torch.where(scales.view(torch.float8_e4m3fn).float().isnan(), 1, scales)
        .to(torch.uint8)
        .view(torch.float8_e4m3fn)
    )
    (memory,) = run(
        "fd.ops.preprocess_grouped_matmul_input_sf(tv0, tv1, tv2)", scales, rows, padded
    )
    assert memory.shape == ((m + 127 * len(sizes)) * ceil_to(columns, 4),)
    assert int((~memory.float().isnan()).sum()) == m * columns  # padding is not written
    for size, row, padded_row in zip(sizes, rows.tolist(), padded.tolist(), strict=True):
        same(unswizzle(memory.float(), padded_row, size, columns), scales[row : row + size].float())


@pytest.mark.parametrize(
    ("m", "rows", "padded", "message"),
    [
        (0, [0], [0], "no rows"),
        (5, [1, 3], [0, 128], "must start at row 0"),
        (5, [0, 3, 2], [0, 128, 256], "not starts"),
        (5, [0, 6], [0, 128], "not starts"),
        (5, [0, 3], [0, 64], "multiples of 128, from 128"),
        (200, [0, 150], [0, 128], "multiples of 128, from 256"),
        (5, [0, 3], [0, 256], "leave the memory"),
        (5, [0, 3], [0], "offsets"),
    ],
)
def test_grouped_swizzle_refuses(m, rows, padded, message):
    with pytest.raises(Refused, match=message):
        swizzle(
            torch.ones(m, 4),
            "Float",
            Value(torch.tensor(rows), "Int"),
            Value(torch.tensor(padded), "Int"),
        )


def test_swizzled_scales_are_taken_by_the_product_alone():
    lines = [
        tensor_line("tv0", [5, 4], "Float"),
        *(tensor_line(f"tv{i}", [2], "Int32") for i in (1, 2)),
    ]
    lines.append("tv3 = fd.ops.preprocess_grouped_matmul_input_sf(tv0, tv1, tv2)")
    for line in (
        "fd.ops.cast(tv3, dtype=DataType.Float)",
        "fd.ops.reshape(tv3, new_shape=[20])",
        "fd.ops.add(tv3, tv3)",
    ):
        with pytest.raises(Refused, match="only cutlass_nvfp4_grouped_mm and outputs take"):
            interpret(text_of(*lines, f"tv4 = {line}"), [torch.ones(5, 4), *starts_of([2, 3])])


def test_grouped_mm_by_ends():
    sizes, m = [2, 0, 4], 8  # two rows in no group
    ends = torch.tensor(sizes).cumsum(0).int()
    a, b = torch.randn(m, 5).bfloat16(), torch.randn(3, 5, 7).bfloat16()
    (out,) = run("fd.ops.grouped_mm(tv0, tv1, tv2)", a, b, ends)
    want = torch.cat([a[:2].double() @ b[0].double(), a[2:6].double() @ b[2].double()]).bfloat16()
    same(out[:6], want)
    assert out[6:].isnan().all()
    (out,) = run(
        "fd.ops.grouped_mm(tv0, tv1, tv2)", a.T.contiguous(), torch.randn(8, 7).bfloat16(), ends
    )
    assert out.shape == (3, 5, 7)
    assert not out[1].any()
    (out,) = run("fd.ops.grouped_mm(tv0, tv1, tv2)", torch.randn(3, 5, 7), torch.randn(7, 8), ends)
    assert out.shape == (5, 8)
    assert out[:, 6:].isnan().all()
    for bad, message in (
        (ends.long(), "expected Int32"),
        (ends.flip(0), "no ends"),
        (ends + 3, "no ends"),
        (ends[:2].clone(), "groups"),
    ):
        with pytest.raises(Refused, match=message):
            run("fd.ops.grouped_mm(tv0, tv1, tv2)", a, b, bad)


CUTLASS = "fd.ops.cutlass_nvfp4_grouped_mm(tv0, tv1, tv8, tv3, tv4, tv5, tv6, tv7)"


def cutlass_text(inputs, dtype="Float8_e4m3fn"):
    a, b, scales_a, scales_b, alpha, problem_sizes, first_rows, first_padded = inputs
    lines = [tensor_line("tv0", [-1, a.shape[1] * 2], E2M1)]
    lines.append(
        tensor_line(
            "tv1", [b.shape[0], b.shape[1] * 2, b.shape[2]], E2M1, rest=", stride_order=[2, 0, 1]"
        )
    )
    for i, x in enumerate(
        (scales_a, scales_b, alpha, problem_sizes, first_rows, first_padded), start=2
    ):
        lines.append(tensor_line(f"tv{i}", x.shape, DTYPES[x.dtype]))
    return text_of(
        *lines,
        "tv8 = fd.ops.preprocess_grouped_matmul_input_sf(tv2, tv6, tv7)",
        f"tv9 = {CUTLASS}",
        "fd.add_output(tv9)",
    )


@pytest.mark.parametrize("sizes", [[3], [2, 0, 5], [0, 130], [1, 1], [128, 3, 0]])
@pytest.mark.parametrize("k", [64, 192])
def test_cutlass_product(sizes, k):
    inputs, want = nvfp4_problem(sizes, k)
    text = cutlass_text(inputs)
    same(interpret(text, inputs)[0], want.bfloat16())
    same(interpret(text, inputs, cutlass_dtype="Half")[0], want.half())
    same(interpret(text, inputs, simulated=True)[0], want.bfloat16())


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (5, lambda x: x.long(), "problem_sizes: expected Int32"),
        (6, lambda x: x.long(), "expected Int, found a Int32"),
        (7, lambda x: x + 128, "leave the memory"),
        (4, lambda x: x[:1].clone(), "alpha .1., expected contiguous .2."),
        (4, lambda x: x.double(), "alpha: expected Float"),
        (5, lambda x: x.flip(1), "problem_sizes.0."),
        (5, lambda x: x + torch.tensor([1, 0, 0]).int(), "expert_offsets.1. = 2 with 4 rows"),
        (5, lambda x: x.flip(0), "expert_offsets.1. = 2 with 2 rows, expected within 3"),
        (3, lambda x: x[:, :64].clone(), "scale2 has"),
        (
            1,
            lambda x: x[:, :, :64].transpose(1, 2).contiguous().transpose(1, 2),
            "multiples of 64 and 128",
        ),
        (1, lambda x: x[:1], "alpha .2., expected contiguous .1."),
    ],
)
def test_cutlass_product_refuses(at, change, message):
    inputs, _ = nvfp4_problem([2, 3])
    inputs[at] = change(inputs[at])
    with pytest.raises(Refused, match=message):
        interpret(cutlass_text(inputs), inputs)
