"""The CPU backend's kernels, each tier that this machine has, against `evaluate`."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from cpu_tiers import (
    DTYPES,
    TIERS,
    check_segments,
    emulated_amx,
    fusion_of_call,
    program,
    same,
    same_on_any_threads,
    small_integers,
    together,
)
from fusions import evaluate, expert_mlp_variants
from hypothesis import example, given, settings
from hypothesis import strategies as st
from routings import Partition, Routing, partitions, routings

from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS, emit
from fusion_moe.backends.cpu import readers
from fusion_moe.compile import lower
from fusion_moe.definitions import operations
from fusion_moe.encodings import NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.ir.core import Fusion
from fusion_moe.layouts import LAYOUTS
from fusion_moe.runtime.program import Program

pytestmark = [pytest.mark.compiler, pytest.mark.once]


@pytest.fixture(autouse=True, scope="module")
def amx() -> Iterator[None]:
    with emulated_amx():
        yield


def product(tier: str, x, weight, ends, dtype=None):
    args = (x, *weight, ends)
    return program(fusion_of_call("nvfp4_grouped_mm", *args, out_dtype=dtype), tier)(list(args))[0]


def random_weight(groups: int, n: int, k: int, seed: int = 0, runs: int = 0) -> Quantized:
    """Codes and scales of any size that occurs, decode scales near one."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (groups, n, k // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(0x01, 0x7E, (groups, n, k // 16), generator=g, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    return Quantized(
        codes,
        scales,
        torch.rand((groups, runs) if runs else (groups,), generator=g) + 0.5,
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


@pytest.mark.parametrize("k", [16, 48, 272, 1296])
@pytest.mark.parametrize("tier", TIERS)
def test_every_position(tier, k):
    """One row of activations for each k, in groups of 1, 2, 3, ... rows: what comes out is the
    weight.
    """
    sizes, left = [], k
    while left:
        sizes.append(min(left, len(sizes) + 1 if len(sizes) < 18 else 300))
        left -= sizes[-1]
    one = random_weight(1, 37, k)
    codes, scales = (t.view(torch.uint8).repeat(len(sizes), 1, 1) for t in one[:2])
    weight = Quantized(
        codes, scales.view(torch.float8_e4m3fn), torch.ones(len(sizes)), encoding=NVFP4
    )
    ends = torch.tensor(sizes).cumsum(0).int()
    rows = {dtype: torch.eye(k, dtype=dtype) for dtype in DTYPES}
    fusions = {
        dtype: fusion_of_call("nvfp4_grouped_mm", x, *weight, ends, out_dtype=torch.float32)
        for dtype, x in rows.items()
    }
    for dtype, compiled in together(fusions, tier).items():
        same(compiled([rows[dtype], *weight, ends])[0], dequantize(weight)[0].T)


@settings(max_examples=25)
@given(
    partitions(),
    st.sampled_from(DTYPES),
    st.sampled_from(((16, 1), (64, 16), (80, 33), (272, 70))),
    st.sampled_from(TIERS),
)
@example(Partition((0,), 0), torch.bfloat16, (16, 1), "generic")
@example(Partition((300, 0, 1), 5), torch.bfloat16, (272, 70), TIERS[0])
def test_any_groups_exactly(partition: Partition, dtype, sizes, tier):
    k, n = sizes
    x = small_integers(partition.rows, k, dtype=dtype)
    x[int(partition.ends[-1]) :] = torch.nan  # rows of no group are not read
    weight = exact_weight(len(partition.sizes), n, k)
    want = torch.zeros(partition.rows, n)
    for group, rows in partition.runs:
        want[rows] = x[rows].float() @ dequantize(weight)[group].T
    same(product(tier, x, weight, partition.ends, torch.float32), want)


@pytest.mark.parametrize("tier", TIERS)
def test_long_rows_exactly(tier):
    """Of which a work tile has fewer, where all are to lie in a cache: groups of several work
    tiles, the last one not whole.
    """
    k, n, ends = 4224, 16, torch.tensor([250, 250, 257, 370], dtype=torch.int32)
    x, weight = small_integers(370, k), exact_weight(4, n, k)
    group = torch.bucketize(torch.arange(370), ends, right=True)
    want = torch.einsum("mk,mnk->mn", x.float(), dequantize(weight)[group])
    same(product(tier, x, weight, ends, torch.float32), want)
    same_on_any_threads(lambda: product(tier, x, weight, ends))


@pytest.mark.parametrize("tier", TIERS)
def test_threads_change_no_bit(tier):
    x, weight = torch.randn(200, 272).bfloat16(), random_weight(5, 150, 272)
    ends = torch.tensor([1, 1, 20, 120, 200], dtype=torch.int32)
    same_on_any_threads(lambda: product(tier, x, weight, ends))


# Rounding -----------------------------------------------------------------------------------------


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
    for (k, least), spread in itertools.product(((784, 0x01), (1536, 0x08)), (1, 6, 12, 20)):
        weight = random_weight(1, 53, k, runs=1)
        weight.block_scale.view(torch.uint8).clamp_(min=least)
        w = dequantize(weight).double()[0]
        x = (
            torch.randn(rows, k, generator=g)
            * 2.0 ** -torch.randint(0, spread, (rows, k), generator=g)
        ).to(dtype)
        found = product(tier, x, weight, torch.tensor([rows], dtype=torch.int32), torch.float32)
        bound = (k + 3) * 2.0**-24 * (x.double().abs() @ w.abs().T)
        assert ((found.double() - x.double() @ w.T).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_results_that_are_subnormal_or_nan(tier, dtype):
    """Rounded as torch rounds them, not to zero."""
    codes, scales, _ = exact_weight(1, 48, 64)
    weight = Quantized(codes, scales, torch.full((1,), 2.0**-126), encoding=NVFP4)
    x = small_integers(20, 64) / 16
    x[3, 5], x[7] = torch.nan, 0
    want = (
        x.float().double()
        @ dequantize(Quantized(codes, scales, torch.ones(1), encoding=NVFP4))[0].double().T
        * 2.0**-126
    ).float()
    same(product(tier, x, weight, torch.tensor([20], dtype=torch.int32), dtype), want.to(dtype))


@pytest.mark.parametrize("tier", TIERS)
def test_error_is_that_of_rounding_the_output(tier):
    x, w = torch.randn(64, 2048).bfloat16(), quantize(torch.randn(2, 128, 2048) * 0.02, NVFP4)
    ends = torch.tensor([1, 64], dtype=torch.int32)
    found = product(tier, x, w, ends).double()
    dequantized = dequantize(w).double()
    want = torch.cat([x[:1].double() @ dequantized[0].T, x[1:].double() @ dequantized[1].T])
    rms = ((found - want).square().mean() / want.square().mean()).sqrt()
    rounding = ((want.bfloat16().double() - want).square().mean() / want.square().mean()).sqrt()
    assert rms < 1.01 * rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_activations_of_any_size(tier, dtype, rows):
    """NaN, infinity, what overflows, what a product of bfloat16 would flush: the reference's
    result.
    """
    weight, ends = random_weight(1, 40, 64), torch.tensor([rows], dtype=torch.int32)
    fusion = fusion_of_call(
        "nvfp4_grouped_mm",
        torch.empty(rows, 64, dtype=dtype),
        *weight,
        ends,
        out_dtype=torch.float32,
    )
    compiled = program(fusion, tier)
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
            x[:, 5::17] = value
            args = [x, weight.codes, weight.block_scale, torch.tensor([decode_scale]), ends]
            (found,), (want,) = compiled(args), fusion.evaluate(*args)
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
    return together(
        {(name, dtype): variant(name, dtype) for name in VARIANTS for dtype in DTYPES}, tier
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tier", TIERS)
def test_variants(tier, name, dtype):
    args, kwargs = expert_mlp(name, dtype)
    inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    check_segments(variant(name, dtype), tier, inputs, variants(tier)[name, dtype])


@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("name", VARIANTS)
def test_sizes_that_a_tracer_knows(name, tokens, slots):
    """One token, or one slot, is what graphs are specialized for."""
    routing = Routing(torch.arange(tokens * slots).view(tokens, slots) % G, G)
    args, kwargs = expert_mlp(name, torch.bfloat16, routing)
    call = operations.bind(operations.SPECS["expert_mlp"], args, kwargs)
    fusion = operations.fusion_of("expert_mlp", call.types(lambda arg, dim, n: n), call.others)
    check_segments(
        fusion, TIERS[0], [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    )


@settings(max_examples=20)
@given(routings(), st.sampled_from(TIERS))
@example(Routing(torch.zeros(0, 2, dtype=torch.int64), 3), "generic")
@example(Routing(torch.zeros(70, 1, dtype=torch.int32), 2), TIERS[0])
@example(Routing(torch.zeros(250, 1, dtype=torch.int32), 2), TIERS[0])
def test_any_routing(routing: Routing, tier):
    args, kwargs = expert_mlp("plain", torch.bfloat16, routing)
    check_segments(fusion_of_call("expert_mlp", *args, **kwargs), tier, list(args))


@pytest.mark.parametrize("tier", TIERS)
def test_first_product_is_exact(tier):
    """Without functions that round in their own way, every bit: products of small integers,
    clamped, biased, gathered, summed.
    """
    fd = FusionDefinition()
    t, g = fd.define_size("t"), fd.define_groups("g", G)
    x = fd.define_tensor(shape=[t, H], dtype="bf16")
    ids, w = (
        fd.define_tensor(shape=[t, SLOTS], dtype="i32"),
        fd.define_tensor(shape=[t, SLOTS], dtype="bf16"),
    )
    packed = [
        fd.define_tensor(shape=s, dtype=d)
        for s, d in (([G, 2 * I, H // 2], "u8"), ([G, 2 * I, H // 16], "f8e4m3"), ([G], "f32"))
    ]
    bias = fd.define_tensor(shape=[G, 2 * I], dtype="f32")
    ends, row_of, slot_of = fd.ops.route(ids, groups=g)
    y = fd.ops.grouped_mm(
        fd.ops.index_select(x, row_of, dim=0),
        fd.ops.pack(*packed, encoding="nvfp4", layout="linear"),
        ends,
    )
    y = fd.ops.group_add(y, bias, ends)
    rows = y.type.shape[0]
    left, right = (fd.ops.slice(y, start_indices=(0, a), end_indices=(rows, a + I)) for a in (0, I))
    y = fd.ops.mul(fd.ops.minimum(left, 9.0), fd.ops.relu(fd.ops.neg(right)))
    fd.add_output(y)
    fd.add_output(fd.ops.gt(left, right))
    fd.add_output(fd.ops.cast(fd.ops.combine(y, slot_of, w), dtype="f16"))
    fd.add_output(row_of)
    inputs = [
        small_integers(9, H),
        torch.randint(0, G, (9, SLOTS), dtype=torch.int32),
        2.0 ** torch.randint(-2, 2, (9, SLOTS)).bfloat16(),
        *exact_weight(G, 2 * I, H),
        small_integers(G, 2 * I, dtype=torch.float32, seed=1),
    ]
    for found, want in zip(
        program(fd.fusion(), tier)(inputs), evaluate(fd.fusion(), *inputs), strict=True
    ):
        same(found, want)


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
    why = "in plain torch: weights in the layout w16x64 have no kernel here; expected linear"
    assert (around, kernel.backend, kernel.why) == ([], "reference", why)


def test_sources_are_plain_cpp():
    for path in readers.KERNELS.rglob("*.*"):
        source = path.read_text(encoding="utf-8")
        assert not [word for word in ("torch", "ATen", "Python.h") if word in source]


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_sanitized(tier, tmp_path):
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
        "FUSION_MOE_CACHE_DIR": str(tmp_path),
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "clean"), done.stderr
