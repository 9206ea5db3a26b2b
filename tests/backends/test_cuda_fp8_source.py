"""Kernels of products of rows in e4m3: which are chosen, and their machine code."""

from __future__ import annotations

import pytest
from cover import few
from cubins import use_of
from fusions import fusion_of_call
from test_cuda_source import (
    MODELS,
    MORE_MODELS,
    emitted,
    encoded,
    meta,
    needs_nvdisasm,
    sass,
    spills,
    tokens_of,
)

from fusion_moe.arch import A100, H200, L40S, Arch
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda import choices
from fusion_moe.backends.cuda.block_copies import why_slow
from fusion_moe.backends.cuda.choose import Step
from fusion_moe.backends.cuda.heuristics import choose_kernels
from fusion_moe.backends.cuda.launch import Call, build
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.backends.cuda.variants import TILE, WIDE_M8, Matrices, SmallM
from fusion_moe.compile import compile_fusion
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.kinds import eight_bits
from fusion_moe.nn import swiglu
from fusion_moe.options import Options
from fusion_moe.runtime import nvrtc

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
    pytest.mark.slow,
]
ENCODED = ("nvfp4", "mxfp4", "int4", "fp8", "fp8_e8m0", "fp8_channel", "fp8_tensor")


def kernels(
    model: str,
    tokens: int,
    encoding: str = "fp8",
    layout: str = "linear",
    activation: str | None = None,
) -> list[list[KernelSource]]:
    """Those of each segment of a layer."""
    e, k, h, i = (MODELS | MORE_MODELS)[model]
    biases = {"gate_up_bias": 2 * i, "down_bias": h} if model == "gptoss" else {}
    fusion = fusion_of_call(
        "fused_experts",
        *tokens_of(tokens, k, h),
        encoded(encoding, e, 2 * i, h),
        encoded(encoding, e, h, i),
        weight_format=encoding,
        weight_layout=layout,
        activation_format="fp8",
        activation=activation,
        **{name: meta(e, n) for name, n in biases.items()},
    )
    made = emitted(fusion)
    assert [kernel.why for kernel in made] == [""] * len(made)
    sizes = dict.fromkeys(fusion.symbols, tokens)
    return [[*step.kernels] for step in choices(fusion, made, sizes, H200)[1] if step]


def names(model: str, tokens: int, encoding: str) -> list[list[str]]:
    return [[kernel.name for kernel in segment] for segment in kernels(model, tokens, encoding)]


def assert_apart(model: str, apart: bool, activation: str | None = None) -> None:
    """Whether the activation is a kernel of its own, beside its copy."""
    _, *made = kernels(model, 4096, activation=activation)
    found = [[kernel.name for kernel in segment] for segment in made]
    assert [names[-2:] for names in found] == [
        ["sort_rows", "fp8_gemm"],
        *([["copies_0"]] if apart else []),
        ["fp8_gemm", "combine"],
    ]


@pytest.mark.parametrize(("recipe", "frozen"), [("fp8_block", False), ("mxfp8", False), ("", True)])
def test_a_step_that_rounds_weights_for_few_rows_says_so(recipe, frozen):
    """Only what rounds them in the call: not a layer whose weights are stored in FP8."""
    fd, groups = FusionDefinition(), 8
    tokens = fd.define_size("m")
    ids = fd.define_tensor(shape=[tokens, 1], dtype="i64")
    ends, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", groups))
    x = fd.define_tensor(shape=[tokens, 256], dtype="bf16")
    x = fd.ops.index_select(x, row_of, dim=0)
    if frozen:
        shapes = ([groups, 384, 256], "f8e4m3"), ([groups, 384, 2], "f32")
        parts = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in shapes]
        w = fd.ops.pack(*parts, encoding="fp8", layout="linear")
        y = fd.ops.grouped_mm(fd.ops.quantize(x, encoding="fp8_rows"), w, ends)
    else:
        w = fd.define_tensor(shape=[groups, 384, 256], dtype="bf16")
        y = eight_bits.product(fd, x, w, ends, recipe)
    fd.add_output(y)
    few, enough = ({"m": groups * average} for average in (100, 384))
    slow = recipe == "fp8_block"
    assert bool(why_slow([fd.fusion()], few)) == slow
    assert not why_slow([fd.fusion()], enough)
    if slow:
        assert "bf16[8, 384, 256] for 100 rows of each matrix" in why_slow([fd.fusion()], few)


@pytest.mark.parametrize("interleave", [1, 32])
def test_blocks_of_32_columns_may_alternate(interleave):
    """With others the activation is a kernel of its own, beside its copy."""
    assert_apart("qwen3", interleave == 1, swiglu(interleave=interleave))


@pytest.mark.parametrize("inner", [96, 144])
def test_runs_of_32_columns_lie_in_one_block(inner, monkeypatch):
    """Up begins at the row after gate's last: if that divides a run, scales may differ within."""
    monkeypatch.setitem(MODELS, "halves", (8, 2, 256, inner))
    assert_apart("halves", inner % 32 != 0)


@pytest.mark.parametrize("encoding", ["fp8", "fp8_tensor"])
def test_codes_are_multiplied_where_groups_have_many_rows(encoding):
    assert names("qwen3", 4096, encoding) == [
        ["copies_0"],
        ["reset_tile_counter", "route", "sort_rows", "fp8_gemm"],
        ["reset_tile_counter", "fp8_gemm", "combine"],
    ]
    few = names("qwen3", 8, encoding)
    assert [segment[0] for segment in few] == ["copies_0", "route", "reorder_activations"]
    assert few[1][-1] == "quantize"


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_k_blocks_are_requested_by_whole_lines(tokens):
    """Of 8 bits in the linear layout two K blocks lie in each line of 128 bytes."""
    found = [n for s in names("qwen3", tokens, "fp8") for n in s if n.startswith("small_m")]
    assert [int(count) % 2 for n in found for count in n.split("x")[-2:]] == [0] * 4


@pytest.mark.parametrize("rows", [8, 16, 20, 32])
@pytest.mark.parametrize("k", [2048, 4096, 8192])
def test_k_blocks_of_16_bits_are_whole_lines(k, rows):
    """They are requested one by one, as they were measured."""
    weight = Matrices(128, k, 96, 2, 2 * TILE, tiled=False)
    assert choose_kernels(rows, weight, H200)[0].variant in WIDE_M8


def of_few_rows(gpu: Arch, k: int = 256, change: str = "") -> tuple[Step, ...]:
    """What a product of three rows launches that are quantized before it, and changed."""
    fd, groups = FusionDefinition(), 8
    tokens = fd.define_size("m")
    ids = fd.define_tensor(shape=[tokens, 1], dtype="i64")
    ends, row_of, _ = fd.ops.route(ids, groups=fd.define_groups("g", groups))
    x = fd.define_tensor(shape=[tokens, k], dtype="bf16")
    parts = fd.ops.unpack(fd.ops.quantize(x, encoding="fp8_rows"))
    other = fd.define_tensor(shape=[tokens, k // 128], dtype="f32")
    read = (parts[0], other) if change == "other scales" else parts
    picked = [fd.ops.index_select(part, row_of, dim=0) for part in read]
    rows = fd.ops.pack(*picked, encoding="fp8_rows", layout="linear")
    shapes = ([groups, 384, k], "f8e4m3"), ([groups, 384, k // 128], "f32")
    weight = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in shapes]
    weight = fd.ops.pack(*weight, encoding="fp8", layout="linear")
    y = fd.ops.grouped_mm(rows, weight, ends)
    if change == "scales read after":
        first = fd.ops.slice(picked[1], start_indices=[0, 0], end_indices=[y.type.shape[0], 1])
        y = fd.ops.mul(y, first)
    fd.add_output(fd.ops.cast(y, dtype="bf16"))
    if change.endswith("stored"):
        fd.add_output(parts[change == "scales stored"])
    call = compile_fusion(fd.fusion(), TARGETS["cuda"], Options()).joined
    assert isinstance(call, Call)
    return call.choose(dict.fromkeys(call.parts.symbols, 3), gpu).steps


@pytest.mark.parametrize(
    "change", ["", "codes stored", "scales stored", "scales read after", "other scales"]
)
def test_few_rows_are_quantized_by_the_product_that_reads_them(change):
    """In shared memory, unless something else needs the codes, or they have other scales."""
    first, second = of_few_rows(H200, change=change)
    assert (first.kernels == ()) == (not change)
    assert ("quantized by the product" in str(first)) == (not change)
    product = next(k for k in second.kernels if k.size_class)
    assert product.shared == (0 if change else 8 * (2 * 256 + 16))
    assert ("static_cast<const bf16*>(unrounded)" in product.text) == (not change)


@pytest.mark.parametrize("k", [2560, 2688, 3072, 3328])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_rows_have_room_in_as_many_blocks_as_are_chosen(k, rows):
    """The fewer the longer they are."""
    weight = Matrices(256, k, 192, 2, 1088, tiled=False)
    (of,) = choose_kernels(rows, weight, H200)
    assert isinstance(of.variant, SmallM)
    room = of.variant.declared + of.variant.tile_m * (2 * k + 16)
    assert not H200.why_no_room(of.variant.threads, room, of.variant.per_sm), of


@pytest.mark.parametrize("gpu", [A100, L40S, H200], ids=lambda gpu: gpu.name)
def test_rows_have_room_beside_what_a_kernel_declares(gpu):
    """The longest ones that are quantized there: as many blocks as it is made for find room."""
    wide = (of_few_rows(gpu, k)[1].kernels for k in range(4096, 0, -128))
    product = next(k for kernels in wide for k in kernels if k.size_class and k.shared)
    use = use_of(build(product, gpu))
    shared = product.shared + use.shared
    assert use.shared
    assert not gpu.why_no_room(product.threads, shared, product.min_blocks, use.registers)


@pytest.mark.parametrize(
    ("rows", "slots", "at_once"),
    [("tokens", 2, 2), ("tokens", "any", 1), ("tokens that an index picks", 2, 1)],
)
def test_a_token_is_read_once_for_its_slots(rows, slots, at_once):
    """If their number is known, and tokens are read as they lie in memory."""
    fd = FusionDefinition()
    tokens, groups, k = fd.define_size("t"), fd.define_groups("g", 8), 256
    of_slots = [tokens, fd.define_size("s") if slots == "any" else slots]
    ids = fd.define_tensor(shape=of_slots, dtype="i64")
    ends, row_of, slot_of = fd.ops.route(ids, groups=groups)
    picked = fd.define_tensor(shape=[tokens], dtype="i64")
    parts = []
    for columns, dtype in (k, "f8e4m3"), (k // 128, "f32"):
        x = fd.define_tensor(shape=[tokens, columns], dtype=dtype)
        x = fd.ops.index_select(x, picked, dim=0) if rows != "tokens" else x
        parts.append(fd.ops.index_select(x, row_of, dim=0))
    x = fd.ops.pack(*parts, encoding="fp8_rows", layout="linear")
    shapes = ([8, k, k], "f8e4m3"), ([8, k, k // 128], "f32")
    weight = [fd.define_tensor(shape=shape, dtype=dtype) for shape, dtype in shapes]
    weight = fd.ops.pack(*weight, encoding="fp8", layout="linear")
    y = fd.ops.cast(fd.ops.grouped_mm(x, weight, ends), dtype="bf16")
    fd.add_output(fd.ops.combine(y, slot_of, fd.define_tensor(shape=of_slots, dtype="f32")))
    fusion = fd.fusion()
    made = emitted(fusion)
    assert [kernel.why for kernel in made] == [""] * len(made)
    sizes = {name: 4096 if name == "t" else 2 for name in fusion.symbols}
    steps = [step for step in choices(fusion, made, sizes, H200)[1] if step]
    (sort,) = (kernel for step in steps for kernel in step.kernels if kernel.name == "sort_rows")
    assert f"copy_row<4, {k}, {at_once}>(" in sort.text
    build(sort, H200)


@needs_nvdisasm
@pytest.mark.parametrize(
    ("encoding", "layout"), few([*((e, "linear") for e in ENCODED), ("nvfp4", "w16x64")])
)
def test_weights_in_every_encoding_are_multiplied_by_rows_in_e4m3(encoding, layout):
    made = [kernel for segment in kernels("qwen3", 8, encoding, layout) for kernel in segment]
    products = [kernel for kernel in made if kernel.name.startswith("small_m")]
    assert len(products) == 2
    for kernel in products:
        assert not spills(sass(build(kernel, H200))), kernel.name


@needs_nvdisasm
@pytest.mark.parametrize(
    ("model", "encoding"),
    few([*((m, "fp8") for m in MODELS), ("scout", "fp8_e8m0"), ("qwen3", "fp8_tensor")]),
)
def test_sums_stay_in_registers(model, encoding):
    """Each half of a tile is multiplied by four instructions, which nothing serializes."""
    made = [kernel for segment in kernels(model, 8192, encoding) for kernel in segment]
    for kernel in made:
        if kernel.name in ("fp8_gemm", "copies_0"):
            lines = sass(build(kernel, H200))
            assert not spills(lines), kernel.name
            if kernel.name == "fp8_gemm":
                # for tiles of all rows and columns, of few rows, and of half of the columns
                kinds = 3 if model == "gptoss" else 2
                assert sum("QGMMA" in line for line in lines) == 4 * (kinds + 1)
