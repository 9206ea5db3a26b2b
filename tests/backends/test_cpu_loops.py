"""The CPU backend's generated loops, and whole programs in one call, against `evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import long_sums
import pytest
import torch
from cover import examples
from cpu_tiers import together
from fusions import (
    assert_same_bits,
    bits,
    in_groups,
    inputs_of,
    mxfp8_copies,
    numbers_of_all_sizes,
    of_groups,
    programs,
)
from hypothesis import given, strategies as st
from torch import Tensor

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import Error, NonFiniteError
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import dtype_name
from fusion_moe.runtime import isa
from fusion_moe.runtime.program import Program

pytestmark = [pytest.mark.compiler, pytest.mark.once]


def compiled(fusion: Fusion, tier: str = "auto", contract: bool = False) -> Program:
    with options.override(cpu_isa=tier, contract_rounding=contract):
        return compile_fusion(fusion, TARGETS["cpu"], options.current())


def in_cpp(fusion: Fusion) -> Program:
    """The program of a fusion, none of whose kernels is the reference's."""
    program = compiled(fusion)
    assert not [k.why for k in program.kernels if k.why]
    assert program.joined
    return program


def close(found: Tensor, want: Tensor, by: float) -> None:
    """Within `by` of the size of the largest number."""
    assert found.dtype == want.dtype
    finite = want[want.isfinite()].abs().float() if want.is_floating_point() else want[:0].float()
    most = float(finite.max()) if finite.numel() else 0.0
    torch.testing.assert_close(found, want, rtol=by, atol=by * max(1.0, most), equal_nan=True)


# Each operation -----------------------------------------------------------------------------------


BOTH_TIERS = (isa.available()[0], "generic")  # with the longest vectors, and the shortest
OF_ANY_ROWS = (
    "sum_of_rows",
    "sum_of_columns",
    "moved",
    "padded_rows",
    "scales_of_matrices",
    "sum_read_again",
    "rows_from_a_size_on",
)
g = torch.Generator().manual_seed(0)
F = torch.randn(7, 33, generator=g)
CUBE = torch.randn(7, 3, 20, generator=g)
COUNTS = torch.randint(-9, 9, (7, 33), generator=g)
ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)
INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([[-INF] * 3, [-INF, 1.0, 2.0], [INF, 1.0, -INF], [NAN, INF, 1.0]])


def sum_read_again(fd, x):
    total = fd.ops.sum(x, dims=(1,), keepdim=True)
    return fd.ops.div(x, total), fd.ops.cast(total, dtype="bf16")


def moved(fd, x, y):
    turned = fd.ops.permute(
        fd.ops.pad(x, before=(0, 2), after=(0, 5), shape=(x.type.shape[0], 40)), dims=(1, 0)
    )
    cut = fd.ops.slice(x, start_indices=(0, 3), end_indices=(x.type.shape[0], 9))
    return (
        turned,
        fd.ops.cat(cut, fd.ops.cast(y, dtype="f32"), dim=1),
        fd.ops.reshape(cut, new_shape=(x.type.shape[0] * 2, 3)),
    )


def whole_numbers(fd, a, b):
    sums = fd.ops.add(fd.ops.mul(a, 3), fd.ops.cast(b, dtype="i64"))
    return (
        fd.ops.minimum(sums, 4),
        fd.ops.gt(b, 0),
        fd.ops.cast(fd.ops.where(fd.ops.lt(a, 2), a, sums), dtype="f32"),
    )


def scale_of_groups(fd, x, y, scale, offs):
    (x, ends), (y, _) = in_groups(fd, x, offs), in_groups(fd, y, offs)
    narrow = fd.ops.cast(scale, "bf16")
    return fd.ops.group_mul(x * 2.0, scale, ends), fd.ops.group_mul(y, narrow + 1.0, ends)


def routed_and_combined(fd, x, ids, w):
    _, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", 5))
    rows = fd.ops.index_select(x, row_of, dim=0)
    return fd.ops.cast(fd.ops.combine(rows, slot_of, w), dtype="bf16"), fd.ops.invert(
        slot_of, rows=rows.type.shape[0]
    )


def routed_by_softmax(fd, logits, bias):
    ids = fd.ops.topk_ids(logits, bias, k=4)
    return (
        ids,
        fd.ops.topk_weights(logits, ids, dtype="f16"),
        fd.ops.topk_weights(logits, ids, renormalize=True),
        *fd.ops.route(ids, groups=fd.define_groups("g", 12)),
    )


def routed_by_sigmoid_in_groups(fd, logits, bias):
    how = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2}
    of = {"scoring": "sigmoid", "routed_scaling_factor": 2.5}
    ids = fd.ops.topk_ids(logits, bias, k=6, best_of_group=2, **how)
    return (
        ids,
        fd.ops.topk_ids(logits, 0, k=5, **how),
        *(fd.ops.topk_weights(logits, ids, renormalize=r, **of) for r in (False, True)),
    )


# inputs, and what is made of values like them: size 7 is a symbol
CASES: dict[str, tuple[list[Tensor], Callable[..., Any]]] = {
    "sum_of_rows": ([F], lambda fd, x: fd.ops.sum(x, dims=(1,), keepdim=True)),
    "sum_of_columns": ([F.bfloat16()], lambda fd, x: fd.ops.sum(x, dims=(0,), keepdim=False)),
    "sums_of_a_cube": ([CUBE], lambda fd, x: fd.ops.sum(fd.ops.neg(x), dims=(1,), keepdim=False)),
    "sum_of_all": ([CUBE], lambda fd, x: fd.ops.sum(x, dims=(0, 1, 2), keepdim=False)),
    "sum_of_the_outer": ([CUBE], lambda fd, x: fd.ops.sum(x, dims=(0, 2), keepdim=True)),
    "sum_read_again": ([F], sum_read_again),
    "moved": ([F, F.bfloat16()], moved),
    "padded_rows": (
        [F],
        lambda fd, x: fd.ops.pad(x, before=(1, 0), after=(2, 0), shape=(x.type.shape[0] + 3, 33)),
    ),
    "rows_joined": ([F, F[:4]], lambda fd, x, y: fd.ops.cat(x, fd.ops.neg(y), dim=0)),
    "rows_from_a_size_on": (
        [F],
        lambda fd, x: fd.ops.slice(
            fd.ops.cat(x, fd.ops.neg(x), dim=0),
            start_indices=(x.type.shape[0], 0),
            end_indices=(2 * x.type.shape[0], 33),
        ),
    ),
    "eight_bits": (
        [F.to(torch.float8_e4m3fn), F[2, 3].to(torch.float8_e4m3fn)],
        lambda fd, x, y: (fd.ops.cast(x, dtype="f32"), fd.ops.cast(y, dtype="f32")),
    ),
    "whole_numbers": ([COUNTS, COUNTS.int()], whole_numbers),
    "added_where_taken": (
        [F, torch.tensor([3, 0, 3, 6, 1]), F[:5], 2**40 + COUNTS, COUNTS[:5]],
        lambda fd, acc, index, x, whole, counts: (
            fd.ops.index_put_accumulate(acc, index, fd.ops.mul(x, 2.0)),
            fd.ops.index_put_accumulate(whole, index, counts),
        ),
    ),
    "bias_of_groups": (
        [F, ENDS],
        lambda fd, x, offs: (
            fd.ops.zero_rest(*in_groups(fd, x, offs)),
            fd.ops.full(shape=(3, 33), fill_value=0.5, dtype="f32"),
        ),
    ),
    "bias_in_memory": ([F, torch.randn(3, 33, generator=g), ENDS], of_groups("group_add")),
    "scale_of_groups": (
        [F, F.bfloat16(), torch.randn(3, 33, generator=g), ENDS],
        scale_of_groups,
    ),
    "sums_of_groups": (
        [torch.cat([F[:6], torch.full((1, 33), torch.nan)]), ENDS],
        of_groups("group_sum"),
    ),
    "routed_and_combined": (
        [F, torch.randint(0, 5, (7, 2), generator=g), torch.rand(7, 2, generator=g)],
        routed_and_combined,
    ),
    "routed_by_softmax": (
        [torch.randn(7, 12, generator=g).bfloat16(), torch.randn(12, generator=g)],
        routed_by_softmax,
    ),
    "routed_by_sigmoid_in_groups": (
        [torch.randn(7, 12, generator=g), torch.randn(12, generator=g)],
        routed_by_sigmoid_in_groups,
    ),
    "gradients_of_routers": (
        [
            torch.randn(7, 12, generator=g),
            torch.randn(7, 12, generator=g).argsort(1)[:, :3],
            torch.randn(7, 3, generator=g),
        ],
        lambda fd, logits, ids, dw: tuple(
            fd.ops.topk_weights_backward(
                logits, ids, dw, scoring=s, renormalize=r, routed_scaling_factor=2.0
            )
            for s in ("softmax", "sigmoid")
            for r in (False, True)
        ),
    ),
    "maps_and_logsumexp": (
        [torch.randn(7, 12, generator=g).argsort(1)[:, :3], F, F.bfloat16(), EDGES],
        lambda fd, ids, x, narrow, edges: (
            fd.ops.routing_map(ids, experts=12),
            *(fd.ops.sub(v, fd.ops.logsumexp(v)) for v in (x, fd.ops.mul(narrow, 90.0))),
            fd.ops.logsumexp(edges),
        ),
    ),
    "scales_of_matrices": (
        [torch.randn(7, 2, 64, generator=g).half()],
        lambda fd, x: fd.ops.decode_scale(x, encoding="nvfp4"),
    ),
}


def made(case: str) -> tuple[Fusion, list[Tensor]]:
    tensors, build = CASES[case]
    fd = FusionDefinition()
    m = fd.define_size("m")
    shapes = ([m if n == 7 else n for n in t.shape] for t in tensors)
    values = [
        fd.define_tensor(shape=shape, dtype=dtype_name(t.dtype))
        for shape, t in zip(shapes, tensors, strict=True)
    ]
    found = build(fd, *values)
    for v in found if isinstance(found, tuple) else (found,):
        fd.add_output(v)
    return fd.fusion(), tensors


@cache
def of_cases() -> dict[str, Program]:
    """All in one library."""
    return together({case: made(case)[0] for case in CASES}, BOTH_TIERS[0])


@pytest.mark.parametrize("case", CASES)
def test_an_operation(case):
    fusion, inputs = made(case)
    for found, want in zip(of_cases()[case](inputs), fusion.evaluate(*inputs), strict=True):
        of_16_bits = 2.0**-8 if want.is_floating_point() else 0
        close(found, want, 1e-5 if want.dtype == torch.float32 else of_16_bits)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    for case in OF_ANY_ROWS:
        fusion, inputs = made(case)
        inputs = [t[:rows] for t in inputs]
        for found, want in zip(of_cases()[case](inputs), fusion.evaluate(*inputs), strict=True):
            close(found, want, 2.0**-8)


# Quantize and swizzle, bit for bit ----------------------------------------------------------------


def quantized(shape, dtype: str, runs: int = 0) -> Fusion:
    fd = FusionDefinition()
    x = fd.define_tensor(shape=list(shape), dtype=dtype)
    decode_scale = fd.define_tensor(shape=[shape[0], runs] if runs else [shape[0]], dtype="f32")
    for v in fd.ops.unpack(fd.ops.quantize(x, decode_scale, encoding="nvfp4")):
        fd.add_output(v)
    return fd.fusion()


@pytest.mark.parametrize("tier", BOTH_TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_is_that_of_the_reference(dtype, tier):
    """Every float16 there is, and numbers of all sizes; given scales that fit, that saturate, and
    zero.
    """
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    x = every[every.isfinite()].float()[: 62 * 1024].view(4, 62 * 2, 128)
    x = torch.cat([x, x * torch.randn(x.shape, generator=g).exp2()], 1).to(dtype)
    fusion = quantized(x.shape, dtype_name(dtype), runs=2)
    for decode_scale in (
        torch.rand(4, 2, generator=g),
        torch.tensor([[1e-6, 1e3], [0.0, 1.0], [2.0**-126, 3.4e38], [24.4, 0.01]]),
    ):
        inputs = [x.nan_to_num(posinf=1.0, neginf=-1.0), decode_scale]
        assert_same_bits(compiled(fusion, tier)(inputs), fusion.evaluate(*inputs))


def test_quantize_says_what_is_not_finite():
    x = torch.ones(1, 3, 32)
    x[0, 1, 20] = float("inf")
    with pytest.raises(NonFiniteError, match="inf"):
        in_cpp(quantized(x.shape, "f32"))([x, torch.ones(1)])


@pytest.mark.parametrize("tier", BOTH_TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", [-1, -2])
def test_mxfp8_is_that_of_the_reference(axis, dtype, tier):
    x = numbers_of_all_sizes(192, 160).to(dtype).view(2, 96, 160)
    fusion = mxfp8_copies(x, [axis])
    assert_same_bits(compiled(fusion, tier)([x]), fusion.evaluate(x))
    assert in_cpp(fusion)


@pytest.mark.parametrize("tier", BOTH_TIERS)
@pytest.mark.parametrize("sizes", [(5, 0, 33, 64, 1), (0, 0), (32,), (96, 7)])
@pytest.mark.parametrize("columns", [48, 600])
def test_mxfp8_along_rows_of_groups_is_that_of_the_reference(columns, sizes, tier):
    x, ends = (
        numbers_of_all_sizes(sum(sizes) + 4, columns).bfloat16(),
        torch.tensor(sizes).cumsum(0).int(),
    )
    x[sum(sizes) :] = torch.nan
    fusion = mxfp8_copies(x, [-2], ends)
    assert_same_bits(compiled(fusion, tier)([x, ends]), fusion.evaluate(x, ends))
    assert in_cpp(fusion)


def swizzled(sizes: tuple[int, ...], cols: int) -> tuple[Fusion, list[Tensor]]:
    ends = torch.tensor(sizes).cumsum(0).int()
    fd = FusionDefinition()
    x, offs = (
        fd.define_tensor(shape=[fd.define_size("m"), cols], dtype="f8e4m3"),
        fd.define_tensor(shape=[len(sizes)], dtype="i32"),
    )
    fd.add_output(fd.ops.grouped_swizzle(*in_groups(fd, x, offs), layout="sf128x4"))
    scales = torch.randint(0, 256, (int(ends[-1]) + 5, cols), generator=g).to(torch.uint8)
    return fd.fusion(), [scales.view(torch.float8_e4m3fn), ends]


@pytest.mark.parametrize("cols", [1, 4, 7, 8])
@pytest.mark.parametrize("sizes", [(0, 0), (1, 200), (128, 0, 129, 3), (31, 1)])
def test_swizzle_is_that_of_the_reference(sizes, cols):
    fusion, inputs = swizzled(sizes, cols)
    assert_same_bits(in_cpp(fusion)(inputs), fusion.evaluate(*inputs))


# Functions ----------------------------------------------------------------------------------------

EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def units(found: Tensor, want: Tensor) -> float:
    """The largest distance of finite numbers in units of the last place of `found`, which must be
    equal where `want` f64 is not finite.
    """
    held = want.to(found.dtype)
    finite = held.isfinite()
    torch.testing.assert_close(found[~finite], held[~finite], rtol=0, atol=0, equal_nan=True)
    assert_same_bits([found[want == 0]], [held[want == 0]])
    size = held[finite].abs()
    unit = torch.nextafter(size, torch.full_like(size, torch.inf)).double() - size.double()
    return float(((found[finite].double() - want[finite]).abs() / unit.clamp(max=1e38)).max())


def of_each(names: tuple[str, ...], dtype: str) -> Fusion:
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1], dtype=dtype)
    for name in names:
        fd.add_output(getattr(fd.ops, name)(x))
    return fd.fusion()


@pytest.mark.parametrize("tier", isa.available())
def test_functions_are_right_to_two_units(tier):
    """For every bfloat16, and numbers between them; infinities, NaN, subnormals and both zeros are
    among them. Powers, and logarithms, to one unit: also those of what has rules of its own,
    exponents that are odd, even, neither, or just so large that all are even.
    """
    names = ("tanh", "erf", "exp", "log", "expm1", "log1p")
    names = (*names, "erfc", "sin", "cos", "atan", "floor", "round")
    fd = FusionDefinition()
    floats, narrow = (fd.define_tensor(shape=[-1], dtype=dtype) for dtype in ("f32", "bf16"))
    count = fd.define_size("n")
    base, exponent = (fd.define_tensor(shape=[count], dtype="f32") for _ in range(2))
    for x in (floats, narrow):
        for name in names:
            fd.add_output(getattr(fd.ops, name)(x))
    fd.add_output(fd.ops.pow(base, exponent))
    between = torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)
    x, (a, b) = torch.cat([EVERY_BF16.float(), between]), powers()
    *found, power = compiled(fd.fusion(), tier)([x, EVERY_BF16, a, b])
    for i, made in enumerate(found):
        name, of = names[i % len(names)], (x, EVERY_BF16)[i // len(names)]
        most = {"log": 1, "log1p": 1, "erfc": 3}.get(name, 2) if of is x else 0.501
        assert units(made, getattr(torch, name)(of.double())) < most, name
    assert units(power, torch.pow(a.double(), b.double())) < 1


def test_nan_of_any_bits_stays_nan():
    """Also those that rounding to bf16 would carry into infinity or zero."""
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF], dtype=torch.int32)
    x = torch.cat([bits, bits | -(2**31)]).view(torch.float32)
    fd = FusionDefinition()
    y = fd.ops.cast(fd.define_tensor(shape=[8], dtype="f32"), dtype="bf16")
    names = ("exp", "expm1", "tanh", "erf", "log", "log1p", "sqrt", "reciprocal", "relu")
    names = (*names, "erfc", "sin", "cos", "atan", "floor", "round")
    for name in (*names, "sigmoid", "silu"):
        fd.add_output(getattr(fd.ops, name)(y))
    for name in ("add", "mul", "minimum", "pow"):
        fd.add_output(getattr(fd.ops, name)(y, 2.0))
    assert all(made.isnan().all() for made in in_cpp(fd.fusion())([x]))


def powers() -> tuple[Tensor, Tensor]:
    """Bases and exponents: each of special numbers with each; any; any to whole powers; near 1."""
    special = [0.0, 1.0, 2.0, 0.5, 3.0, 2.5, 1e-40, 1e30, 2.0**24 - 1, 2.0**24 + 2, torch.inf]
    each = torch.tensor([*special, *(-x for x in special), torch.nan])
    of_each = torch.cartesian_prod(each, each).unbind(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=g)
    x, y = bits.to(torch.int32).view(torch.float32), torch.randn(bits.shape, generator=g)
    whole = torch.randint(-9, 9, bits.shape, generator=g).float()
    near_one = 1 + torch.randn(bits.shape, generator=g) / 1000
    return torch.cat([of_each[0], x, x, near_one]), torch.cat([of_each[1], 2 * y, whole, 1e4 * y])


def test_functions_call_no_others():
    """Otherwise loops over them are not vector code."""
    names = ("tanh", "erf", "exp", "log", "expm1", "log1p", "sigmoid", "silu")
    for kernel in in_cpp(of_each(names, "bf16")).kernels:
        assert "std::" not in kernel.source


# Sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", isa.available())
@pytest.mark.parametrize("kind", long_sums.KINDS)
def test_errors_of_long_sums_do_not_grow(kind, tier):
    """torch's is about 2e-7 here, that of a single accumulator 3e-5."""
    fusion, shape, axis = long_sums.sum_of(kind, 1_000_000)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    (found,) = compiled(fusion, tier)(long_sums.inputs_of(kind, x))
    assert long_sums.error(found, x, axis) < 2e-7
    assert in_cpp(fusion)


def test_long_sums_do_not_stand_still():
    """At 2^24, the first integer whose successor float32 does not have."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[1], dtype="f32")
    fd.add_output(
        fd.ops.sum(
            fd.ops.broadcast_in_dim(x, shape=[2**24 + 2**20, 1], broadcast_dims=[1]),
            dims=[0],
            keepdim=False,
        )
    )
    fd.add_output(
        fd.ops.sum(
            fd.ops.broadcast_in_dim(x, shape=[2**29], broadcast_dims=[0]), dims=[0], keepdim=True
        )
    )
    assert [t.tolist() for t in in_cpp(fd.fusion())([torch.ones(1)])] == [[2**24 + 2**20], [2**29]]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", long_sums.KINDS)
def test_long_sums_of_what_is_not_finite(kind, value):
    fusion, shape, axis = long_sums.sum_of(kind, 3000)
    for place in (0, 700, 2999):
        x = torch.ones(shape)
        x.select(axis, place).fill_(value)
        (found,) = compiled(fusion)(long_sums.inputs_of(kind, x))
        assert_same_bits([found.flatten()], [torch.full_like(found.flatten(), value)])


# Whole programs -----------------------------------------------------------------------------------


@examples(0.5)
@given(programs(), st.sampled_from([0, 1, 5]), st.sampled_from(isa.available()), st.booleans())
def test_any_program(fusion, tokens, tier, contract):
    """In one call and kernel by kernel; what was not rounded, or rounded elsewhere, grows with the
    steps of a program.
    """
    inputs = inputs_of(tokens)
    program = compiled(fusion, tier, contract)
    found, want = program(inputs), fusion.evaluate(*inputs)
    for a, b in zip(found, want, strict=True):
        close(a, b, 2.0**-4)
    assert_same_bits(program._one_by_one(inputs, fusion.bind(inputs)), found)


@examples(0.3)
@given(programs(), st.sampled_from(("ids", "weights")))
def test_any_program_says_what_the_reference_says(fusion, what):
    inputs = inputs_of(3)
    if what == "ids":
        inputs[2][1, 1] = 77
    program, reference, told = (
        compiled(fusion),
        compile_fusion(fusion, TARGETS["reference"], options.current()),
        [],
    )
    # which drops what nobody reads, as all programs do
    for run in (lambda: program(inputs), lambda: reference(inputs)):
        try:
            told.append(list(map(bits, run())))
        except Error as error:
            told.append(str(error))
    assert isinstance(told[0], str) == isinstance(told[1], str)
    if isinstance(told[0], str):
        assert told[0] == told[1]


def test_memory_is_taken_in_turn_and_never_returned_twice():
    """A chain of products goes to and fro between two arrays; a result that is returned keeps its
    own.
    """
    fd = FusionDefinition()
    m, groups = fd.define_size("m"), fd.define_groups("g", 2)
    x, offs = fd.define_tensor(shape=[m, 32], dtype="f32"), fd.define_tensor(shape=[2], dtype="i32")
    packed = [
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([2, 32, 16], "u8"), ([2, 32, 2], "f8e4m3"), ([2], "f32"))
    ]
    ends = fd.ops.ends(offs, rows=m, groups=groups)
    made, w = [fd.ops.partition(x, ends)], fd.ops.pack(*packed, encoding="nvfp4", layout="linear")
    for _ in range(5):
        made.append(fd.ops.grouped_mm(made[-1], w, ends))
    fd.add_output(made[2])
    fd.add_output(made[-1])
    program = in_cpp(fd.fusion())
    sizes = dict.fromkeys(program.fusion.symbols, 16)
    whole = program.joined.plan(torch.device("cpu"), sizes).workspace
    assert len(whole.arrays) == 3
    assert whole.nbytes == 2 * 16 * 32 * 4
    weight = quantize(torch.randn(2, 32, 32, generator=g) / 6, NVFP4)
    inputs = [torch.randn(6, 32, generator=g), torch.tensor([2, 6], dtype=torch.int32), *weight]
    for found, want in zip(program(inputs), fd.fusion().evaluate(*inputs), strict=True):
        close(found, want, 1e-5)


@pytest.mark.usefixtures("pythons_own_recursion_limit")
def test_more_operations_in_a_row_than_python_nests():
    fd = FusionDefinition()
    v = fd.define_tensor(shape=[-1, 4], dtype="f32")
    for i in range(600):
        v = fd.ops.add(v, float(i))
    fd.add_output(v)
    program, x = compiled(fd.fusion()), torch.zeros(3, 4)
    assert len(program.kernels) > 1
    assert {k.backend for k in program.kernels} == {"cpu"}
    assert {s.boundary for s in program.segments[1:]} == {"too many operations in one expression"}
    assert torch.equal(program([x])[0], fd.fusion().evaluate(x)[0])
