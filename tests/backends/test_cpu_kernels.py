"""The CPU backend's kernels, each tier that this machine has, against `evaluate`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from cover import examples
from cpu_tiers import (
    DTYPES,
    TIERS,
    check_segments,
    program,
    same,
    same_on_any_threads,
    small_integers,
    together,
)
from fusions import expert_mlp_variants, fusion_of_call
from hypothesis import example, given, strategies as st
from routings import Partition, Routing, partitions, routings

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS, emit
from fusion_moe.backends.cpu import readers
from fusion_moe.compile import lower
from fusion_moe.encodings import NVFP4, Quantized, dequantize
from fusion_moe.errors import GroupsError
from fusion_moe.ir.core import Fusion
from fusion_moe.layouts import LAYOUTS
from fusion_moe.runtime.program import Program

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.once,
    pytest.mark.usefixtures("amx"),
    pytest.mark.slow,
]


MANY = 256  # groups; in tests of fewer the last ones are empty, so that all share a kernel
POSITIONS, ENOUGH = (16, 48, 272, 1296), 22  # columns, and groups for them: test_every_position
SIZES = ((16, 1), (272, 70))  # k, n of test_any_groups_exactly
F32, BF16 = torch.float32, torch.bfloat16
SHAPES = (  # groups, n, k, and the dtypes of activations and results, of all products below
    *((1, 256, 256, dtype, F32) for dtype in DTYPES),
    *((ENOUGH, 37, k, dtype, F32) for k in POSITIONS for dtype in DTYPES),
    *((MANY, n, k, dtype, F32) for k, n in SIZES for dtype in DTYPES),
    *((1, 53, k, dtype, F32) for k in (784, 1536) for dtype in DTYPES),
    *((1, 40, 64, dtype, F32) for dtype in DTYPES),
    *((1, 40, 64, BF16, out) for out in DTYPES),
    *((4, 16, 4224, BF16, out) for out in (F32, BF16)),
)


@cache
def products(tier: str) -> dict[tuple[object, ...], Program]:
    """Of all shapes, in one library."""
    fusions = {}
    for groups, n, k, dtype, out in SHAPES:
        x, ends = torch.empty(2, k, dtype=dtype), torch.zeros(groups, dtype=torch.int32)
        fusions[groups, n, k, dtype, out] = fusion_of_call(
            "nvfp4_grouped_mm", x, *random_weight(groups, n, k), ends, out_dtype=out
        )
    return together(fusions, tier)


def product(tier: str, x, weight, ends, dtype=None):
    shape = (*weight.codes.shape[:2], x.shape[1], x.dtype, dtype or x.dtype)
    return products(tier)[shape]([x, *weight, ends])[0]


def random_weight(groups: int, n: int, k: int, seed: int = 0) -> Quantized:
    """Codes and scales of any size that occurs, decode scales near one."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(0x01, 0x7E, (groups, n, k // 16), generator=g, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return Quantized(
        codes,
        scales,
        torch.rand(groups, generator=g) + 0.5,
        encoding=NVFP4,
    )


def exact_weight(groups: int, n: int, k: int, seed: int = 0) -> Quantized:
    """Weights whose sums with small integers float32 holds exactly: block scales 0.5, 1 and 2,
    decode scales 0.25.
    """
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-1, 2, (groups, n, k // 16), generator=g)
    return Quantized(
        codes, scales.to(torch.float8_e4m3fn), torch.full((groups,), 0.25), encoding=NVFP4
    )


# Exact --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_every_code_under_every_scale(tier, dtype):
    """Row n has block scale n, block b has code b; a row of activations picks one block. Negative
    and NaN scales included.
    """
    byte = torch.arange(256, dtype=torch.uint8)
    code = torch.arange(16, dtype=torch.uint8)
    codes = (code | code << 4).repeat_interleave(8).expand(1, 256, 128).contiguous()
    weight = Quantized(
        codes,
        byte[:, None].expand(256, 16).contiguous()[None].view(torch.float8_e4m3fn),
        torch.ones(1),
        encoding=NVFP4,
    )
    want = dequantize(weight)[0, :, ::16].T  # [code, scale]
    x = torch.zeros(16, 256, dtype=dtype)
    x[torch.arange(16), torch.arange(0, 256, 16) + torch.arange(16)] = 1
    nan = torch.tensor([(b & 0x7F) == 0x7F for b in range(256)])
    for rows in (1, 2, 4, 16, 40, 130, 250):  # each kernel there is for so many rows
        for first in range(0, 16, rows):
            picked = (torch.arange(rows) + first) % 16
            found = product(
                tier, x[picked], weight, torch.tensor([rows], dtype=torch.int32), torch.float32
            )
            same(found[:, ~nan], want[picked][:, ~nan])
            assert found[:, nan].isnan().all()


@pytest.mark.parametrize("k", POSITIONS)
@pytest.mark.parametrize("tier", TIERS)
def test_every_position(tier, k):
    """One row of activations for each k, in groups of 1, 2, 3, ... rows: what comes out is the
    weight.
    """
    sizes, left = [], k
    while left:
        sizes.append(min(left, len(sizes) + 1 if len(sizes) < 18 else 300))
        left -= sizes[-1]
    sizes += [0] * (ENOUGH - len(sizes))
    one = random_weight(1, 37, k)
    codes, scales = (t.view(torch.uint8).repeat(ENOUGH, 1, 1) for t in one[:2])
    weight = Quantized(codes, scales.view(torch.float8_e4m3fn), torch.ones(ENOUGH), encoding=NVFP4)
    ends = torch.tensor(sizes).cumsum(0).int()
    for dtype in DTYPES:
        found = product(tier, torch.eye(k, dtype=dtype), weight, ends, F32)
        same(found, dequantize(weight)[0].T)


@pytest.mark.parametrize("tier", TIERS)
@examples(0.25)
@given(partition=partitions(), dtype=st.sampled_from(DTYPES), sizes=st.sampled_from(SIZES))
@example(partition=Partition((0,), 0), dtype=torch.bfloat16, sizes=SIZES[0])
@example(partition=Partition((300, 0, 1), 5), dtype=torch.bfloat16, sizes=SIZES[1])
def test_any_groups_exactly(tier, partition: Partition, dtype, sizes):
    k, n = sizes
    x = small_integers(partition.rows, k, dtype=dtype)
    x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
    weight, dequantized = dequantized_weight(k, n)
    want = torch.zeros(partition.rows, n)
    for group, rows in partition.runs:
        want[rows] = x[rows].float() @ dequantized[group].T
    ends = partition.ends[torch.arange(MANY).clamp(max=len(partition.sizes) - 1)]
    same(product(tier, x, weight, ends, F32), want)


@cache
def dequantized_weight(k: int, n: int) -> tuple[Quantized, torch.Tensor]:
    weight = exact_weight(MANY, n, k)
    return weight, dequantize(weight)


@pytest.mark.parametrize("tier", TIERS)
def test_long_rows_exactly(tier):
    """Of which a work tile has fewer, where all are to lie in a cache: groups of several work
    tiles, the last one not whole; and three rows that lie there, and four that do not.
    """
    k, n, ends = 4224, 16, torch.tensor([250, 253, 257, 370], dtype=torch.int32)
    x, weight = small_integers(370, k), exact_weight(4, n, k)
    group = torch.bucketize(torch.arange(370), ends, right=True)
    want = torch.einsum("mk,mnk->mn", x.float(), dequantize(weight)[group])
    same(product(tier, x, weight, ends, F32), want)
    same_on_any_threads(lambda: product(tier, x, weight, ends))


# Rounding -----------------------------------------------------------------------------------------

ROWS_OF_SCALES = (784, 0x01), (784, 0x08), (1536, 0x08)  # how long, and their least byte


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("rows", [1, 3, 16, 50])
def test_float32_sums(tier, dtype, rows):
    """K products and K sums of them, each rounded once: K + 3 units in the last place of the sum of
    sizes, dequantizing's two included.

    Activations of the same size, and so many powers of two apart: kernels in integers have as many
    digits as they need. With scales that are subnormal, and without.
    """
    g = torch.Generator().manual_seed(3)
    for (k, least), spread in itertools.product(ROWS_OF_SCALES, (1, 6, 12, 20)):
        weight, w = weight_of_scales(k, least)
        x = (
            torch.randn(rows, k, generator=g)
            * 2.0 ** -torch.randint(0, spread, (rows, k), generator=g)
        ).to(dtype)
        found = product(tier, x, weight, torch.tensor([rows], dtype=torch.int32), torch.float32)
        bound = (k + 3) * 2.0**-24 * (x.double().abs() @ w.abs().T)
        assert ((found.double() - x.double() @ w.T).abs() <= bound).all()


@cache
def weight_of_scales(k: int, least: int) -> tuple[Quantized, torch.Tensor]:
    """Of scales whose bytes are not below the least one."""
    weight = random_weight(1, 53, k)
    weight.block_scale.view(torch.uint8).clamp_(min=least)
    return weight, dequantize(weight).double()[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_results_that_are_subnormal_or_nan(tier, dtype):
    """Rounded as torch rounds them, not to zero."""
    codes, scales, _ = exact_weight(1, 40, 64)
    weight = Quantized(codes, scales, torch.full((1,), 2.0**-126), encoding=NVFP4)
    x = small_integers(20, 64) / 16
    x[3, 5], x[7] = torch.nan, 0
    want = (
        x.float().double()
        @ dequantize(Quantized(codes, scales, torch.ones(1), encoding=NVFP4))[0].double().T
        * 2.0**-126
    ).float()
    same(product(tier, x, weight, torch.tensor([20], dtype=torch.int32), dtype), want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_activations_of_any_size(tier, dtype, rows):
    """NaN, infinity, what overflows, what a product of bfloat16 would flush: the reference's
    result.
    """
    weight, ends = random_weight(1, 40, 64), torch.tensor([rows], dtype=torch.int32)
    compiled = products(tier)[1, 40, 64, dtype, F32]
    for value in (
        torch.nan,
        torch.inf,
        -torch.inf,
        2.0**31,
        -(2.0**40),
        2.0**110,
        1e-38,
        1e-40,
        2.0**-24,
        -0.0,
    ):
        for decode_scale in (1.0, 2.0**-100, 2.0**60, 0.0, torch.inf, torch.nan):
            x = torch.randn(rows, 64).to(dtype)
            x[:, 5::17] = torch.tensor(value).to(dtype)  # a number may not overflow
            args = [x, weight.codes, weight.block_scale, torch.tensor([decode_scale]), ends]
            (found,), (want,) = compiled(args), compiled.fusion.evaluate(*args)
            size = (
                x.double().abs()
                @ (
                    dequantize(weight).double().abs()[0]
                    / weight.decode_scale.double()
                    * abs(decode_scale)
                ).T
            )
            size = torch.where(size.isfinite(), size, 0)
            lost = ~want.isfinite()
            # of numbers alone: a sum's order decides between infinity and NaN
            if x.isfinite().all() and abs(decode_scale) < torch.inf:
                assert (found.isfinite() != lost).all(), (value, decode_scale)
            else:
                same(found[lost], want[lost])
            near = (found.double() - want.double()).abs() <= 140 * 2.0**-24 * size + 64 * 2.0**-149
            assert (lost | near).all(), (value, decode_scale)


# What is fused ------------------------------------------------------------------------------------

G, H, I, SLOTS = 4, 80, 48, 2
VARIANTS = expert_mlp_variants(G, H, I)


def expert_mlp(name: str, dtype, routing: Routing | None = None):
    """(args, kwargs) whose first product is exact, and whose router weights are powers of two."""
    g = torch.Generator().manual_seed(2)
    groups = routing.groups if routing else G
    ids = routing.ids if routing else torch.randint(0, G, (7, SLOTS), generator=g)
    made = {
        k: small_integers(groups, v[1], dtype=dtype) if isinstance(v, tuple) else v
        for k, v in VARIANTS[name].items()
    }
    w = 2.0 ** torch.randint(-3, 1, ids.shape, generator=g)
    weights = [
        *exact_weight(groups, 2 * I, H)[:2],
        torch.full((groups, 2), 0.25),
        *exact_weight(groups, H, I),
    ]
    return (small_integers(len(ids), H, dtype=dtype), ids, w, *weights), made


def variant(name: str, dtype: torch.dtype) -> Fusion:
    args, kwargs = expert_mlp(name, dtype)
    return fusion_of_call("expert_mlp", *args, **kwargs)


@cache
def variants(tier: str) -> dict[tuple[str, torch.dtype], Program]:
    dtypes = DTYPES if tier == TIERS[0] else DTYPES[:1]
    return together(
        {(name, dtype): variant(name, dtype) for name in VARIANTS for dtype in dtypes}, tier
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("tier", "dtype"),
    [*((tier, DTYPES[0]) for tier in TIERS), *((TIERS[0], dtype) for dtype in DTYPES[1:])],
)
def test_variants(tier, name, dtype):
    args, kwargs = expert_mlp(name, dtype)
    inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    check_segments(variant(name, dtype), tier, inputs, variants(tier)[name, dtype])


def test_sizes_that_a_tracer_knows():
    """One token, or one slot, is what graphs are specialized for."""
    fusions, inputs = {}, {}
    for tokens, slots in ((1, 1), (1, 2), (2, 1)):
        for name in ("plain", "bias", "local experts"):
            routing = Routing(torch.arange(tokens * slots).view(tokens, slots) % G, G)
            args, kwargs = expert_mlp(name, torch.bfloat16, routing)
            key = name, tokens, slots
            fusions[key] = fusion_of_call("expert_mlp", *args, static=True, **kwargs)
            inputs[key] = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    for key, compiled in together(fusions, TIERS[0]).items():
        check_segments(fusions[key], TIERS[0], inputs[key], compiled)


@examples(0.7)
@given(routings())
@example(Routing(torch.zeros(0, 2, dtype=torch.int64), 3))
@example(Routing(torch.zeros(70, 1, dtype=torch.int32), 2))
@example(Routing(torch.zeros(250, 1, dtype=torch.int32), 2))
def test_any_routing(routing: Routing):
    args, kwargs = expert_mlp("plain", torch.bfloat16, Routing(routing.ids, MANY))
    check_segments(fusion_of_call("expert_mlp", *args, **kwargs), TIERS[0], list(args))


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), (0, 4)])
def test_shapes_and_strides(shape):
    """Activations of more dimensions, and of memory that is not contiguous."""
    fd = FusionDefinition()
    b, t = fd.define_size("b"), fd.define_size("t")
    x, offs = (
        fd.define_tensor(shape=[b, t, 64], dtype="bf16"),
        fd.define_tensor(shape=[2], dtype="i32"),
    )
    packed = [
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([2, 24, 32], "u8"), ([2, 24, 4], "f8e4m3"), ([2], "f32"))
    ]
    ends = fd.ops.ends(offs, rows=b * t, groups=fd.define_groups("g", 2))
    rows = fd.ops.partition(fd.ops.reshape(x, new_shape=(b * t, 64)), ends)
    y = fd.ops.grouped_mm(rows, fd.ops.pack(*packed, encoding="nvfp4", layout="linear"), ends)
    fd.add_output(fd.ops.reshape(fd.ops.relu(y), new_shape=(b, t, 24)))
    inputs = [
        small_integers(*shape, 128)[..., ::2],
        torch.tensor([1, 5], dtype=torch.int32).clamp(max=shape[0] * shape[1]),
    ]
    inputs += exact_weight(2, 24, 64)
    same(program(fd.fusion(), TIERS[0])(inputs)[0], fd.fusion().evaluate(*inputs)[0])


# Errors, and what there is no kernel for ----------------------------------------------------------


def assert_told_as_by_the_reference(fusion: Fusion, args) -> None:
    with pytest.raises(GroupsError) as want:
        fusion.evaluate(*args)
    with pytest.raises(GroupsError) as found:
        program(fusion, TIERS[0])(list(args))
    assert str(found.value) == str(want.value)


@pytest.mark.parametrize("ends", [[-1, 2], [3, 2], [1, 4], [0, 2**30]])
def test_bad_ends(ends):
    args = (small_integers(3, 64), *exact_weight(2, 24, 64), torch.tensor(ends, dtype=torch.int32))
    fusion = fusion_of_call("nvfp4_grouped_mm", *args)
    assert_told_as_by_the_reference(fusion, args)


@pytest.mark.parametrize("bad", [-2, G, 2**40])
def test_bad_ids(bad):
    args, _ = expert_mlp("plain", torch.bfloat16)
    args[1][3, 1] = bad
    fusion = fusion_of_call("expert_mlp", *args)
    assert_told_as_by_the_reference(fusion, args)


@pytest.mark.parametrize("bad", [-1, 14])
def test_bad_slots(bad):
    """Rows to sum that are not there: nothing is read, and the error is the reference's."""
    fd = FusionDefinition()
    t, g = fd.define_size("t"), fd.define_groups("g", 2)
    x, offs = (
        fd.define_tensor(shape=[2 * t, 64], dtype="bf16"),
        fd.define_tensor(shape=[2], dtype="i32"),
    )
    slot_of, w = (
        fd.define_tensor(shape=[t, 2], dtype="i32"),
        fd.define_tensor(shape=[t, 2], dtype="f32"),
    )
    packed = [
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([2, 24, 32], "u8"), ([2, 24, 4], "f8e4m3"), ([2], "f32"))
    ]
    ends = fd.ops.ends(offs, rows=2 * t, groups=g)
    y = fd.ops.grouped_mm(
        fd.ops.partition(x, ends), fd.ops.pack(*packed, encoding="nvfp4", layout="linear"), ends
    )
    fd.add_output(fd.ops.combine(y, slot_of, w))
    at = torch.arange(14, dtype=torch.int32).view(7, 2)
    at[4, 1] = bad
    inputs = [
        small_integers(14, 64),
        torch.tensor([3, 14], dtype=torch.int32),
        at,
        torch.ones(7, 2),
        *exact_weight(2, 24, 64),
    ]
    with pytest.raises(GroupsError):
        program(fd.fusion(), TIERS[0])(inputs)


def test_why_there_is_no_kernel():
    """What has no kernel is the reference's, and says why."""
    weight, ends = (
        LAYOUTS["w16x64"].pack(*exact_weight(2, 32, 64), encoding=NVFP4),
        torch.tensor([2, 6], dtype=torch.int32),
    )
    fusion = fusion_of_call(
        "nvfp4_grouped_mm", small_integers(6, 64), *weight, ends, weight_layout="w16x64"
    )
    lowered = lower(fusion, TARGETS["cpu"], options.current())
    *around, kernel = (
        emit(s, TARGETS["cpu"])
        for s in lowered.segments
        if "grouped_mm" in (op.kind.name for op in s.fusion.ops)
    )
    why = (
        "in plain torch: weights in the layout w16x64 have no kernel here; expected linear or "
        "sf128x4"
    )
    assert (around, kernel.backend, kernel.why) == ([], "reference", why)


def test_sources_are_plain_cpp():
    for path in readers.KERNELS.rglob("*.*"):
        source = path.read_text(encoding="utf-8")
        assert not [word for word in ("torch", "ATen", "Python.h") if word in source]


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
def test_sanitized(tier):
    """The kernels, built with ASan and UBSan, read and write nothing that is not theirs."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        pytest.skip("no libasan beside g++")
    script = Path(__file__).parent / "cpu_sanitized.py"
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "FUSION_MOE_CPU_ISA": tier,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FUSION_MOE_CACHE_DIR": options.current().cache_dir,
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr
