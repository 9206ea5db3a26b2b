"""The CUDA backend's sources, compiled with NVRTC, which needs no GPU: every variant, what it is
made of, and what has no kernel.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from cover import few
from experts import experts_of_ones
from fusions import fusion_of_call
from kernel_tables import EIGHT_BITS, PAIRS, TABLE, use, variants_of

from fusion_moe import FusionDefinition, options
from fusion_moe.arch import A100, H100, H200, L40S, Arch
from fusion_moe.backends import TARGETS, emit, in_place_of_kernel
from fusion_moe.backends.cuda.columns import columns
from fusion_moe.backends.cuda.grouped_mm import ACTIVATIONS, ByVariants
from fusion_moe.backends.cuda.heuristics import (
    Chosen,
    SizeClass,
    blocks,
    choose_kernels,
)
from fusion_moe.backends.cuda.join import join
from fusion_moe.backends.cuda.launch import KERNELS, build
from fusion_moe.backends.cuda.product import Product
from fusion_moe.backends.cuda.source import KernelSource, Source
from fusion_moe.backends.cuda.table import ALWAYS, Regime
from fusion_moe.backends.cuda.variants import (
    M8,
    M16,
    M32,
    M48_96,
    M80,
    M160,
    SETS,
    LargeM,
    Matrices,
    SmallM,
    Variant,
)
from fusion_moe.backends.cxx.indices import Number, Variable
from fusion_moe.compile import lower
from fusion_moe.definitions.operations import (
    fusion_of,
)
from fusion_moe.encodings import ENCODINGS
from fusion_moe.errors import BuildError, UnsupportedError
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.sizes import AnySize, symbol
from fusion_moe.ir.types import DTYPES, TensorType
from fusion_moe.layouts import SF128X4, W16X64
from fusion_moe.nn import activation, swiglu
from fusion_moe.options import Options
from fusion_moe.runtime import nvrtc, timeline
from fusion_moe.runtime.kernel import Kernel

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
    pytest.mark.slow,
]
NVDISASM = next((d for d in metadata.distributions() if d.name == "nvidia-cuda-nvdisasm"), None)
needs_nvdisasm = pytest.mark.skipif(
    NVDISASM is None, reason="nvidia-cuda-nvdisasm is not installed"
)

# experts, slots of a token, hidden and intermediate features
MODELS = {
    "qwen3": (128, 8, 2048, 768),
    "gptoss": (128, 4, 2880, 2880),
    "dsv3": (256, 8, 7168, 2048),
}
MORE_MODELS = {"mixtral": (8, 2, 4096, 14336), "scout": (16, 1, 5120, 8192)}
DEFAULTS = {
    "activation": None,
    "scale_on": "output",
    "activation_format": "bf16",
    "gate_up_bias": None,
    "down_bias": None,
    "first_expert": None,
}
VARIANTS = sorted({*variants_of("tiled"), *variants_of("linear")}, key=lambda v: v.name)
NVFP4 = 576  # bytes of 16 rows and 64 columns
UNBOUNDED = 2**31 - 1  # rows
LOOP = 72  # instructions for 1,024 weights of the loop of small-M kernels
MOVES = 8  # more of them in row order, where activations move to registers that follow each other


TOKENS = symbol("s0")  # any number of them


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def tokens_of(count: int, slots: int, hidden: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Tokens, the ids of their experts, and the router's weights."""
    ids, w = (meta(count, slots, dtype=d) for d in (torch.int64, torch.float32))
    return [meta(count, hidden, dtype=dtype), ids, w]


def encoded(encoding: str, groups: int, n: int, k: int) -> list[torch.Tensor]:
    """The parts of a weight."""
    of = ENCODINGS[encoding]
    return [meta(*of.part_shape(part, (groups,), n, k), dtype=part.dtype) for part in of.parts]


def emitted(fusion: Fusion) -> list[Kernel]:
    lowered = lower(fusion, TARGETS["cuda"], Options())
    return [emit(s, TARGETS["cuda"]) for s in lowered.segments]


def expert_mlp(*args, **kwargs) -> list[Kernel]:
    """The kernels of a layer of a model's size."""
    return layer(*args, **kwargs)[1]


def layer(
    model: str = "qwen3",
    layout: str = "w16x64",
    dtype: str = "bf16",
    tokens: AnySize = TOKENS,
    slots: int = 0,
    order: str = "free",
    **changes,
) -> tuple[Fusion, list[Kernel]]:
    """The same with what they compute."""
    e, k, h, i = MODELS[model]
    t, k = TensorType, slots or k
    given = {
        "x": t((tokens, h), dtype),
        "ids": t((tokens, k), "i64"),
        "w": t((tokens, k), "f32"),
        "gate_up_codes": t((e, 2 * i, h // 2), "u8"),
        "gate_up_block_scale": t((e, 2 * i, h // 16), "f8e4m3"),
        "gate_up_decode_scale": t((e, 2), "f32"),
        "down_codes": t((e, h, i // 2), "u8"),
        "down_block_scale": t((e, h, i // 16), "f8e4m3"),
        "down_decode_scale": t((e,), "f32"),
    }
    others = {**DEFAULTS, "weight_layout": layout, **changes}
    if others.pop("bias", False):
        given |= {"gate_up_bias": t((e, 2 * i), dtype), "down_bias": t((e, h), dtype)}
        others = {k: v for k, v in others.items() if k not in given}
    fusion = fusion_of("expert_mlp", tuple(given.items()), tuple(others.items()))
    lowered = lower(fusion, TARGETS["cuda"], Options(order=order))
    return lowered.stages[-1][1], [emit(s, TARGETS["cuda"]) for s in lowered.segments]


def sources(*args, **kwargs) -> list[Source]:
    kernels = expert_mlp(*args, **kwargs)
    assert [k.why for k in kernels] == [""] * len(kernels)
    return [k.launch.source for k in kernels]


def by_variants(source: Source) -> ByVariants:
    """The way of a product by kernels of variants."""
    assert isinstance(source, Product)
    assert source.by_variants
    return source.by_variants


def launches(source: Source, tokens: int, arch: Arch = H200) -> list[KernelSource]:
    sizes = dict.fromkeys(source.fusion.symbols, tokens)
    return source.launches(source.choose(sizes, arch), sizes, arch)


def only(variant: Variant) -> Chosen:
    """One kernel for all groups."""
    return Chosen((SizeClass(variant),))


def build_all(kernels: Iterable[KernelSource], arch: Arch) -> None:
    """In threads: NVRTC lets others run meanwhile."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert all(path.stat().st_size for path in pool.map(partial(build, arch=arch), kernels))


@cache
def sass(path: Path) -> tuple[str, ...]:
    """The instructions and labels of a cubin."""
    assert NVDISASM is not None
    tool = next(f for f in NVDISASM.files or [] if f.name == "nvdisasm").locate()
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s*(?:/\*[0-9a-f]{4,}\*/\s+(.*?);|(\.L_x_\d+):)", text, re.MULTILINE)
    return tuple(a or b for a, b in found)


def all_loops(lines: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What stands between a label and a jump back to it."""
    start = {line: i for i, line in enumerate(lines) if line.startswith(".L")}
    jumps = [
        (start[m[1]], i)
        for i, line in enumerate(lines)
        if (m := re.search(r"BRA.*?(\.L_x_\d+)", line)) and start[m[1]] < i
    ]
    return [tuple(x for x in lines[a : b + 1] if not x.startswith(".L")) for a, b in jumps]


def loops(lines: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Those without a barrier: a kernel's parts stand in any order."""
    return [loop for loop in all_loops(lines) if not any("BAR" in x for x in loop)]


def spills(lines: tuple[str, ...]) -> list[str]:
    """The instructions that use local memory."""
    return [x for x in lines if re.search(r"\b(LDL|STL)\b", x)]


# Every source compiles ----------------------------------------------------------------------------


CLAMPED = {
    "activation": swiglu(interleave=8, limit=7.0, alpha=1.702, up_offset=1.0),
    "bias": True,
}


@pytest.mark.parametrize(
    ("layout", "arch", "tokens", "changes"),
    few(
        [
            ("linear", A100, 1, CLAMPED),
            ("w16x64", A100, 300, CLAMPED),
            ("w16x64", L40S, 1, {}),  # which has an instruction that converts scales
            ("w16x64", H200, 1, CLAMPED),  # ids that fit one block
            ("w16x64", H200, 300, {"scale_on": "input", "activation": swiglu(interleave=1)}),
        ],
        2,
    ),
)
def test_a_layer_compiles_for_every_architecture(layout, arch, tokens, changes):
    build_all(
        [
            kernel
            for source in sources(layout=layout, **changes)
            for kernel in launches(source, tokens, arch)
        ],
        arch,
    )


@pytest.mark.parametrize("width", few([1, 768]))
def test_parameters_of_each_expert_are_read_by_the_first_product(width):
    e, k, h, i = MODELS["qwen3"]
    args = *tokens_of(64, k, h), encoded("nvfp4", e, 2 * i, h), encoded("nvfp4", e, h, i)
    text = activation(
        lambda gate, up, slope: torch.where(gate > 0, gate, slope * gate) * up, parameters=1
    )
    others = {"weight_format": "nvfp4", "weight_layout": "w16x64", "activation": text}
    others["activation_parameters"] = meta(e, 1, width, dtype=torch.float32)
    kernels = emitted(fusion_of_call("fused_experts", *args, **others))
    products = [by_variants(kernel.launch.source) for kernel in kernels]
    assert len(products) == 2
    for arch in (A100, H200):
        build_all(launches(products[0], 300, arch), arch)


# those of layers are compiled above
BESIDE_LAYERS = [*PAIRS[1:], *EIGHT_BITS]


def product_of(
    fmt: str,
    activations: str,
    layout: str,
    k: int = 1024,
    n: int = 1024,
    groups: int = 16,
    out_dtype: torch.dtype | None = None,
) -> ByVariants:
    """One product with weights of an encoding."""
    args = meta(64, k, dtype=DTYPES[activations]), encoded(fmt, groups, n, k)
    how = {"weight_format": fmt, "weight_layout": layout, "out_dtype": out_dtype}
    ends = meta(groups, dtype=torch.int32)
    (kernel,) = emitted(fusion_of_call("grouped_mm", *args, ends, **how))
    assert not kernel.why
    return by_variants(kernel.launch.source)


sorted_rows = partial(product_of, "nvfp4", "bf16", "w16x64", n=1536, groups=128)


@needs_nvdisasm
@pytest.mark.parametrize(("groups", "rows"), [(1, 8), (8, 8), (33, 512)])
@pytest.mark.parametrize("cuda_variant", ["auto", "small_m_4x2x4x1x1"])
def test_products_read_groups_in_the_form_of_nvfuser(groups, rows, cuda_variant):
    """No kernel comes before them, and they need no more memory than those that read ends."""
    ints, n, k = partial(meta, dtype=torch.int32), 256, 512
    codes, scale, factor = encoded("nvfp4", groups, n, k)
    swizzled = meta(*SF128X4.storage_shape(scale.shape), dtype=scale.dtype)
    args = meta(rows, k), codes.transpose(1, 2), swizzled, factor
    args = *args, ints(groups), ints(groups), ints(groups, 3)
    with options.override(cuda_variant=cuda_variant):
        (seed,) = emitted(fusion_of_call("f16a_nvfp4weight_scaled_grouped_mm", *args))
    (kernel,) = launches(seed.launch.source, rows)
    assert kernel.reads_before_wait
    assert "problem_ends" not in kernel.text
    assert not spills(sass(build(kernel, H200)))


@pytest.mark.parametrize("count", [1, 33, 0, "any"])
def test_ends_in_the_form_of_nvfuser_have_a_kernel_for_each_number_of_groups(count):
    """Others are made in plain torch: the number is a parameter of the kernel's template."""
    fd = FusionDefinition()
    rows, groups = fd.define_size("m"), fd.define_size("n") if count == "any" else count
    given = [fd.define_tensor(shape=[groups, *more], dtype="i32") for more in ((), (3,), ())]
    groups = fd.define_groups("g", groups)
    fd.add_output(fd.ops.problem_ends(*given, rows=rows, groups=groups, n=256, k=512))
    (made,) = emitted(fd.fusion())
    assert bool(made.why) == (count in (0, "any"))
    if not made.why:
        build(launches(made.launch.source, 8)[0], H200)


@pytest.mark.parametrize(
    ("fmt", "layout", "change", "sentence"),
    [
        (
            "int4",
            "linear",
            ("BLOCK = 32", "BLOCK = 128"),
            "block scales of four-bit codes cover 16, 32 or 64 columns",
        ),
        (
            "int4",
            "w16x64",
            ("BLOCK = 32", "BLOCK = 64"),
            "has codes and block scales of other sizes than its reader",
        ),
        (
            "mxfp4",
            "linear",
            ("BLOCK = 32", "BLOCK = 16"),
            "has codes and block scales of other sizes than its reader",
        ),
    ],
)
def test_readers_say_what_they_need_of_an_encoding(monkeypatch, fmt, layout, change, sentence):
    product = launches(product_of(fmt, "bf16", layout), 16)[-1]
    headers = nvrtc.headers(KERNELS)  # no key was made of them yet
    headers[f"weights/{fmt}.cuh"] = headers[f"weights/{fmt}.cuh"].replace(*change)
    with pytest.raises(BuildError, match=f"static assertion failed with .*{sentence}"):
        nvrtc.build(product.text, name=product.name, arch=H200.nvrtc, headers=headers)


@needs_nvdisasm
@pytest.mark.parametrize("variant", [M8[0], SETS["WIDE_M8"][0], *M160], ids=lambda v: v.name)
@pytest.mark.parametrize(("fmt", "activations"), few(BESIDE_LAYERS, 4))
def test_encodings_need_no_local_memory(fmt, activations, variant):
    source = product_of(fmt, activations, "w16x64")
    if not variant.fits(source.matrices, H200):
        assert source.matrices.wide
        return
    if variant in SETS["WIDE_M8"] and not source.matrices.wide:
        return  # no table has it for these
    lines = sass(build(source.products(only(variant), {"s0": 512}, H200)[0], H200))
    assert not spills(lines)
    assert {m[1] for x in lines if (m := re.search(r"\bHG?MMA\.\S*?F32(\.BF16)?", x))} == {
        ".BF16" if activations == "bf16" else None
    }


@pytest.mark.parametrize("fmt", few(["fp8_e8m0", "fp8_tensor"]))
def test_results_in_float32_are_transposed_where_a_stage_has_few_bytes(fmt):
    source = product_of(fmt, "bf16", "w16x64", out_dtype=torch.float32)
    build_all(source.products(only(M160[0]), {"s0": 512}, H200), H200)


def test_wide_tiles_have_kernels_of_their_own():
    """From the bytes of a tile alone: registers and stages of shared memory."""
    narrow, wide = (
        product_of("nvfp4", "bf16", "w16x64").matrices,
        product_of("bf16", "bf16", "w16x64").matrices,
    )
    assert (
        narrow.tile_bytes,
        product_of("mxfp4", "bf16", "w16x64").matrices.tile_bytes,
        wide.tile_bytes,
    ) == (576, 544, 2048)
    assert not any(v.fits(wide, H200) for v in (*M8, *M16))
    double = replace(wide, tile_bytes=4096)
    assert [(v.stages(double, H200), v.fits(double, H200)) for v in (M32[0], M80[0])] == [
        (2, False),
        (3, True),
    ]
    for rows in (1, 16, 160, 640, 10**4):
        for arch in (H200, A100):
            (size_class, *_) = choose_kernels(rows, wide, arch)
            assert size_class.variant.fits(wide, arch)
    assert isinstance(choose_kernels(10**4, wide, H200)[0].variant, LargeM)
    assert isinstance(choose_kernels(10**4, replace(wide, tiled=False), H200)[0].variant, SmallM)


@pytest.mark.parametrize(("hidden", "inner"), few([(256, 96), (240, 1392)]))
def test_sizes_off_the_tiles_have_kernels_when_they_are_padded(monkeypatch, hidden, inner):
    layer = experts_of_ones(1, hidden, inner)
    h, i = layer.padding("down", W16X64).padded
    assert (h, i) == (256, -(-inner // 64) * 64)
    assert layer.padding("gate_up", W16X64).padded == (2 * i, h)
    monkeypatch.setitem(MODELS, "shard", (8, 2, h, i))
    made = sources("shard")
    assert all(by_variants(source).reader.tiled for source in made)
    build_all([x for source in made for x in launches(source, 300)], H200)


@pytest.mark.parametrize(
    ("tokens", "slots", "bias"), few([(1, 1, False), (1, 8, True), (2, 1, False)])
)
def test_sizes_that_a_tracer_knows_have_kernels(tokens, slots, bias):
    """One token, or one slot, is what graphs are specialized for."""
    build_all(
        [
            x
            for source in sources(tokens=tokens, slots=slots, bias=bias)
            for x in launches(source, 0)
        ],
        H200,
    )


def round_of(variant: SmallM) -> int:
    """Blocks of 64 k that the kernel's loop takes each time."""
    return math.lcm(variant.in_flight + variant.batch, variant.batch, 2)


@needs_nvdisasm
@pytest.mark.parametrize(
    ("number", "variant"),
    few(enumerate(VARIANTS), 2),
    ids=[f"{v.name}@{v.per_sm}" for v in VARIANTS],
)
def test_variants_need_no_local_memory_and_have_lean_loops(number, variant: Variant):
    """The models, whose K is in whole stages or not, take turns, in both products of a layer."""
    models = list(MODELS)
    of_products = [models[(number + i) % len(models)] for i in range(2)]
    order = "row" if isinstance(variant, SmallM) and variant.row_order else "free"
    for layout, regimes in (("w16x64", TABLE.tiled), ("linear", TABLE.linear)):
        if not any(variant in regime.variants for regime in regimes):
            continue
        for i, model in enumerate(of_products):
            source = by_variants(sources(model, layout, order=order)[i])
            if not variant.fits(source.matrices, H200):
                continue  # gate and up would be in two blocks, or registers would not do
            # blocks enough for halves
            lines = sass(build(source.products(only(variant), {"s0": 512}, H200)[0], H200))
            assert not spills(lines)
            assert any("HGMMA" in x if isinstance(variant, LargeM) else "HMMA" in x for x in lines)
            # a compiler that cannot follow which registers are in use makes each product wait for
            # the one before
            assert (
                sum("WARPGROUP.DEPBAR" in x for x in lines) <= sum("HGMMA" in x for x in lines) / 2
            )
            if isinstance(variant, SmallM) and layout == "w16x64" and variant.tiles_m == 1:
                # a tile of 16 rows and 64 k is 1,024 weights and 4 products
                products = 4 * variant.tiles_per_warp * round_of(variant)
                sizes = [
                    len(loop) for loop in loops(lines) if sum("HMMA" in x for x in loop) == products
                ]
                most = LOOP + MOVES * (order == "row")
                assert all(size / (products / 4) <= most for size in sizes)
                # two rounds are no loop
                assert sizes or source.matrices.k <= 64 * variant.split_k * 2 * round_of(variant)


@needs_nvdisasm
def test_rounded_gate_and_up_need_no_local_memory():
    """In row order they are rounded before SwiGLU: no other stores are as long."""
    source = by_variants(sources("qwen3", order="row")[0])
    product = source.products(only(LargeM(160, 3)), {"s0": 64}, H200)[0]
    assert not spills(sass(build(product, H200)))


@needs_nvdisasm
@pytest.mark.parametrize(
    ("variant", "product", "fragment_order"),
    few([(LargeM(160, 3), 0, False), (LargeM(160, 3), 1, True), (LargeM(48, 4, 2), 0, True)]),
)
def test_large_m_stores_by_whole_instructions(variant, product, fragment_order):
    """At least 8 bytes at a time; elements of 16 bits are transposed."""
    source = by_variants(sources("qwen3")[product])
    chosen = replace(only(variant), writes_fragment_order=fragment_order)
    lines = sass(build(source.products(chosen, {"s0": 64}, H200)[0], H200))
    stores = [m[1] for line in lines if (m := re.search(r"\bSTG\.E\.(\w+)(?!.*STRONG)", line))]
    assert set(stores) <= {"64", "128"}
    assert any("STSM" in line for line in lines)


@needs_nvdisasm
@pytest.mark.parametrize("in_fragment_order", [False, True])
@pytest.mark.parametrize(
    ("variant", "k"),
    few([(M48_96[0], 2048), (M48_96[1], 320), (M80[0], 64), (M160[0], 320)], 2),
    ids=str,
)
def test_rows_in_natural_order_are_reordered_or_read_as_they_are(
    variant, k, in_fragment_order, monkeypatch
):
    monkeypatch.setattr(ByVariants, "needs_reordering", lambda self, variant: in_fragment_order)
    source, sizes = sorted_rows(k), {"s0": 2**17}
    assert variant.fits(source.matrices, H200)
    lines = sass(build(source.products(only(variant), sizes, H200)[0], H200))
    assert not spills(lines)
    assert any(x.startswith("LDSM") for x in lines) != in_fragment_order
    assert [x.name for x in launches(source, 2**17)[:-1]] == (
        ["reorder_activations"] if in_fragment_order else []
    )
    assert source.count(source.activations, source.choose(sizes, H200), sizes) == (
        2**17 * k if in_fragment_order else 0
    )


@pytest.mark.parametrize("product", [0, 1])
def test_in_row_order_kernels_beside_each_other_read_rows_as_each_adds_up(product):
    """Large M from a copy in fragment order, small M as they are: bits depend on neither."""
    kernels = launches(sources("gptoss", order="row")[product], 128)
    large, small = [x for x in kernels if x.size_class]
    assert [x.name for x in kernels if x.name == "reorder_activations"] == ["reorder_activations"]
    assert (large.name, small.name) == ("large_m_80x4", "small_m_1x1x1x3x1_row")
    assert "FRAGMENT_ORDER = true;" in large.text
    assert [f"return {ACTIVATIONS} + " in x.text for x in (large, small)] == [True, False]


def test_large_m_computes_few_rows_of_few_groups_in_row_order(monkeypatch):
    """If most multiprocessors have a tile; others keep the kernels of small M."""
    monkeypatch.setitem(MODELS, "mixtral", MORE_MODELS["mixtral"])

    def names(model: str, tokens: int, order: str = "row") -> set[str]:
        kernels = [launches(source, tokens) for source in sources(model, order=order)]
        return {k.name for ks in kernels for k in ks if k.size_class}

    assert names("mixtral", 13) == names("mixtral", 44) == {"large_m_32x4"}
    for model, tokens, order in (
        ("mixtral", 12, "row"),
        ("mixtral", 44, "free"),
        ("qwen3", 64, "row"),
    ):
        assert all(name.startswith("small_m") for name in names(model, tokens, order))
    of = by_variants(sources("mixtral", order="row")[1]).matrices
    (narrow,) = choose_kernels(64, replace(of, tiles=of.tiles // 2), H200)
    assert narrow.variant.name.startswith("small_m")


def test_many_rows_in_natural_order_are_read_as_they_are():
    source = sorted_rows(2048)
    for rows, first in ((2**17, "large_m_160x3"), (2**11, "reorder_activations")):
        assert launches(source, rows)[0].name == first


@pytest.mark.parametrize("arch", [H100, H200], ids=lambda arch: arch.name)
@pytest.mark.parametrize("model", MODELS | MORE_MODELS)
def test_all_counts_of_tokens_need_few_kernels(model, arch, monkeypatch):
    """What differs between launches of a variant is no text: size classes, who is concurrent with
    whom, waves, ids or ends.
    """
    for name, sizes in MORE_MODELS.items():
        monkeypatch.setitem(MODELS, name, sizes)
    fusion, kernels = layer(model)
    call, counts = join(fusion, kernels)[1], [1]
    while counts[-1] < 2**17:
        counts.append(counts[-1] * 51 // 50 + 1)
    steps = [call.choose({"s0": count}, arch).steps for count in counts]
    for of_segment in zip(*steps, strict=True):
        products = {
            kernel.text for step in of_segment for kernel in step.kernels if kernel.size_class
        }
        assert 1 < len(products) <= 12
    assert (
        len({kernel.text for of_count in steps for step in of_count for kernel in step.kernels})
        <= 26
    )


# What is chosen -----------------------------------------------------------------------------------


def test_the_choice_looks_at_rows_and_groups_alone():
    def chosen(rows, groups, k=2048, tiles=96, block=2, tiled=True, arch=H200):
        size_classes = choose_kernels(rows, Matrices(groups, k, tiles, block, NVFP4, tiled), arch)
        # of average groups
        return next(
            s.variant for s in size_classes if s.max_rows is None or rows <= s.max_rows * groups
        )

    # as measured: few tiles, or long matrices, take more of split-K
    assert [chosen(8 * t, 128).split_k for t in (1, 8, 32)] == [4, 2, 1]
    assert [chosen(8 * t, 128, 768, 128, 1).split_k for t in (8, 32)] == [1, 1]
    assert [chosen(1, 16, 5120, 1024).split_k, chosen(1, 16, 8192, 320, 1).split_k] == [4, 8]
    assert [chosen(16, 8, 4096, 1792).split_k, chosen(16, 8, 14336, 256, 1).split_k] == [1, 2]
    assert chosen(64, 8, 4096, 1792).tiles_m == 2
    # a last wave of halves is half as long, where more blocks have no work than could take them
    assert [chosen(64, 8, 4096, 1792).split_k, chosen(32, 128, 2880, 180, 1).split_k] == [1, 2]
    # two repeats where columns are a multiple of 512; fewer are wasted without them
    wide, narrow = chosen(16 * 256, 256, 7168, 256), chosen(16 * 128, 128, 2880, 360)
    assert [(v.tile_m, v.consumers, v.repeats) for v in (wide, narrow)] == [(32, 4, 2), (32, 5, 1)]
    # nearly all groups fit one M tile, where rows pick them evenly
    assert [chosen(256 * rows, 256).tile_m for rows in (16, 32, 64, 256)] == [32, 48, 80, 160]
    # where one M tile more than there are groups would begin another wave: high ones
    assert [chosen(256, 8, 14336, 256, 1).tile_m, chosen(256, 8, 4096, 1792).tile_m] == [96, 64]
    assert isinstance(chosen(2**20, 8, 4096, 1792), LargeM)
    assert chosen(2**20, 8, 4096, 1792, arch=L40S).tile_m == 48
    assert chosen(2**20, 8, 4096, 1792, tiled=False, arch=L40S).tiles_m == 4
    assert chosen(120, 8, 4096, 1792, arch=A100).tiles_m == 2
    for rows, groups, tiled in itertools.product((1, 64, 4096), (1, 8, 256), (True, False)):
        assert chosen(rows, groups, tiled=tiled).tiles % 2 == 0


def test_long_products_have_kernels_for_groups_by_their_sizes():
    def chosen(rows, groups=256, k=7168, tiles=256, arch=H200):
        return choose_kernels(rows * groups, Matrices(groups, k, tiles, 2, NVFP4, True), arch)

    for rows in (8, 16, 24, 32, 64):
        found = chosen(rows)
        assert len(found) > 1
        assert [c.above_rows for c in found] == [0, *(c.max_rows for c in found[:-1])]
        assert found[-1].max_rows is None
        heights = [c.variant.tile_m for c in found]
        assert heights == sorted(heights)
        assert all(c.variant.reads_fragment_order for c in found)
    for small in (
        chosen(1),
        chosen(400),
        chosen(16, 8, 4096, 1792),
        chosen(16, arch=L40S),
        chosen(64, 128, 2048, 32),
    ):
        assert [(c.above_rows, c.max_rows) for c in small] == [(0, None)]


def test_few_heavy_groups_of_a_decode_have_a_large_m_kernel(monkeypatch):
    """It is launched first, since its blocks want whole multiprocessors; others fill what it
    leaves, and read the same rows.
    """
    few, tall = M8[0].name, M80[0].name
    use(monkeypatch, tiled=(Regime(ALWAYS, M8, ((12, M8), (None, M80))), *TABLE.tiled))
    for source in map(by_variants, sources("dsv3")):
        high, low = [x for x in launches(source, 128) if "_m_" in x.name]
        assert [high.title, low.title] == [
            f"{tall} (groups of more than 12 rows)",
            f"{few} (groups of 1 to 12 rows)",
        ]
        assert [high.carveout_blocks, low.carveout_blocks] == [0, 8]
        assert [x.size_class for x in (high, low)] == [
            (12, UNBOUNDED, high.reads_before_wait, 0, 1, 1, 0, 0, 0),
            (0, 12, 1, 1, 0, 0, 0, 0, 0),
        ]
        chosen = source.choose({"s0": 128}, H200)
        assert chosen.activation_reader.name == few
        # rows are read as they are
        assert source.count(source.activations, chosen, {"s0": 128}) == 0
        assert not any(x.name in ("prologue", "reorder_activations") for x in launches(source, 128))
    for source in sources("dsv3", scale_on="input"):
        made = launches(source, 128)
        assert not any("fragment_place(" in x.text for x in made if x.name == "prologue")
        assert all("FRAGMENT_ORDER = false" in x.text for x in made if x.name == tall)


@pytest.mark.parametrize(
    "variant", [LargeM(32, 5), TABLE.tiled[0].variants[0]], ids=lambda v: v.name
)
def test_blocks_of_a_size_class(variant):
    """As many as the worst groups need, of sizes in its bounds."""
    for rows, groups, (above, most) in itertools.product(
        (1, 40, 333), (1, 2, 5), ((0, None), (0, 32), (32, 80), (80, None))
    ):
        worst = 0
        for sizes in itertools.product((0, 1, 32, 33, 64, 65, 80, 81, 333), repeat=groups):
            if sum(sizes) <= rows:
                mine = [size for size in sizes if size > above and (most is None or size <= most)]
                rest = [] if most else [rows - sum(sizes)]
                worst = max(worst, sum(-(-size // variant.tile_m) for size in (*mine, *rest)))
        of = Matrices(groups, 2048, 40, 1, NVFP4, True)
        assert worst * 40 // variant.tiles <= blocks(SizeClass(variant, above, most), rows, of)


def test_facts_of_a_gpu_are_in_what_it_launches():
    """Shared memory, how fast weights are read, and the blocks of kernels that loop; nothing else
    is different.
    """
    half = replace(H200, multiprocessors=66, shared_per_block=200 * 1024, memory_bandwidth=2.4e12)
    source, tokens = sources("dsv3")[0], 16 * 32  # 16 rows of a group
    for arch in (H200, half):
        made = launches(source, tokens, arch)
        large = next(x for x in made if "large_m" in x.name)
        assert f"GROUPS_READ_PER_TWO_TILES = {arch.groups_read_per_two_tiles};" in large.text
        assert f"MAX_SHARED_BYTES = {arch.shared_per_block};" in large.text
        assert large.shared == arch.shared_per_block
        assert large.grid(arch) == arch.multiprocessors < large.blocks
        reorder = next(x for x in made if x.name == "reorder_activations")
        assert reorder.grid(arch) == min(16 * arch.multiprocessors, reorder.blocks)
    small = launches(source, 1)[-1]
    assert small.grid(half) == small.grid(H200) == small.blocks


def test_variants_follow_the_facts_of_a_gpu():
    of = Matrices(256, 7168, 256, 2, NVFP4, True)
    assert LargeM(80, 4).stages(of, H200) > LargeM(80, 4).stages(
        of, replace(H200, shared_per_block=150 * 1024)
    )
    assert not LargeM(160, 3).fits(of, replace(H200, shared_per_block=100 * 1024))
    assert not M8[0].fits(of, replace(H200, registers=32768))
    # few blocks: an H200's multiprocessors take more warps along K than a GPU of which they fill
    # every one
    few = replace(H200, name="few", multiprocessors=8, memory_bandwidth=4.8e12 * 8 / 132)
    narrow = Matrices(16, 8192, 320, 1, NVFP4, True)
    splits = [choose_kernels(1, narrow, arch)[0].variant.split_k for arch in (H200, few)]
    assert splits[0] > splits[1]


def test_columns_of_a_result():
    j, eight = Variable("j"), Number(8)
    up, third = j + Number(64), j + Number(128)
    separate = columns([j, up], 64, aligned=True)
    assert (separate.block, separate.tiles) == (16, 2)
    interleaved = columns(
        [j // eight * Number(16) + j % eight, j // eight * Number(16) + eight + j % eight],
        64,
        aligned=True,
    )
    assert (interleaved.block, interleaved.tiles) == (8, 1)
    assert columns([j, j + Number(24)], 24, aligned=False).tiles == 2
    with pytest.raises(
        UnsupportedError, match="3 columns of the product has no kernel here; expected 1, 2 or 4"
    ):
        columns([j, up, third], 64, aligned=True)
    with pytest.raises(UnsupportedError, match="has no kernel here; expected runs of 16 columns"):
        columns([j, j + Number(24)], 24, aligned=True)


# What has no kernel -------------------------------------------------------------------------------


def operations(kernel: Kernel) -> list[str]:
    return [op.kind.name for op in kernel.segment.fusion.ops if not op.kind.view]


def test_what_has_no_kernel_says_why():
    products = [k for k in expert_mlp(dtype="f32") if k.backend == "reference"]
    assert [operations(k) for k in products] == [["grouped_mm"]] * 2
    for kernel in products:
        assert kernel.why.startswith(
            "in plain torch: activations in f32 with weights in nvfp4 "
            "have no kernel here; expected bf16 or f16"
        )
        assert not kernel.graph_safe
    assert all(k.graph_safe for k in expert_mlp())


def test_more_groups_than_a_block_can_know_are_refused(monkeypatch):
    monkeypatch.setitem(MODELS, "large", (2048, 8, 512, 256))
    assert all(k.backend == "cuda" for k in expert_mlp("large"))
    monkeypatch.setitem(MODELS, "larger", (2049, 8, 512, 256))
    for kernel in expert_mlp("larger"):
        assert (kernel.backend == "reference") == (operations(kernel) == ["grouped_mm"])
        assert (
            kernel.backend == "cuda"
            or "2049 groups have no kernel here; expected at most 2048" in kernel.why
        )


def test_without_nvrtc_the_reference_is_used_and_says_so(monkeypatch):
    monkeypatch.setattr(
        nvrtc,
        "why_missing",
        lambda: "cuda-bindings is not installed; pip install '.[cuda]' in a clone of fusion_moe",
    )
    for kernel in expert_mlp():
        assert kernel.backend == "cuda"
        stand_in = in_place_of_kernel(kernel.segment, TARGETS["cuda"])
        assert (stand_in.backend, stand_in.why) == (
            "reference",
            "in plain torch: cuda-bindings is not installed; pip install "
            "'.[cuda]' in a clone of fusion_moe",
        )


def test_on_a_gpu_that_is_too_old_the_reference_is_used_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    for kernel in expert_mlp():
        assert (kernel.backend, len(operations(kernel))) == ("reference", 1)
        assert kernel.why == (
            "in plain torch: this GPU has compute capability 7.5, kernels require 8.0 or higher"
        )


def test_a_source_that_does_not_compile():
    with pytest.raises(
        BuildError,
        match=r"broken does not compile with "
        r"NVRTC.*(?s:.)*broken.cu\(1\): error",
    ) as caught:
        nvrtc.build("int f( {", name="broken", arch="sm_90a", headers=nvrtc.headers(KERNELS))
    assert Path(caught.value.where).read_text() == "int f( {"


def test_rows_that_are_cast_from_eight_bits():
    """In the kernel of the product, as in one of their own; a tensor of one element too."""
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 256], dtype="f8e4m3")
    w = fd.define_tensor(shape=[4, 128, 256], dtype="bf16")
    ends = fd.groups_of(fd.define_tensor(shape=[4], dtype="i32"), x.type.shape[0])
    rows = fd.ops.neg(fd.ops.cast(fd.partition_by(x, ends), dtype="bf16"))
    fd.add_output(fd.ops.relu(fd.ops.grouped_mm(rows, w, ends)))
    fusions = [fd.fusion()]
    for shape in ([-1, 256], []):
        alone = FusionDefinition()
        x = alone.define_tensor(shape=shape, dtype="f8e4m3")
        alone.add_output(alone.ops.cast(x, dtype="f32"))
        fusions.append(alone.fusion())
    for fusion in fusions:
        (kernel,) = emitted(fusion)
        for tokens in (8, 700):
            build_all(launches(kernel.launch.source, tokens), H200)


@pytest.mark.parametrize("model", few(["qwen3", "gptoss"]))
def test_experts_in_places(model):
    """A kernel before routing looks expert_map up; what follows are the kernels without them."""
    _, k, h, i = MODELS[model]
    args = *tokens_of(64, k, h), encoded("nvfp4", 16, 2 * i, h), encoded("nvfp4", 16, h, i)
    how = {"weight_format": "nvfp4", "weight_layout": "w16x64"}
    expert_map = meta(128, dtype=torch.int32)
    kernels = emitted(fusion_of_call("fused_experts", *args, expert_map=expert_map, **how))
    assert [kernel.why for kernel in kernels] == ["", ""]
    first = launches(kernels[0].launch.source, 8)
    assert [x.name for x in first[:2]] == ["place", "route"]
    assert all(build(x, H200).stat().st_size for x in first)


def small_operations() -> list[Fusion]:
    y, ids, w = meta(6, 32), *tokens_of(3, 2, 32)[1:]
    return [
        fusion_of_call("route", ids, 4),
        fusion_of_call("route", ids, 4, first_expert=8),
        fusion_of_call("combine", y, ids.int(), w),
        fusion_of_call("group_add", y, y[:2], meta(2, dtype=torch.int32)),
    ]


def test_small_operations_have_kernels():
    for fusion in small_operations():
        for kernel in emitted(fusion):
            assert kernel.backend == "cuda", kernel.why
            assert all(build(x, H200).stat().st_size for x in launches(kernel.launch.source, 3))


def test_scales_of_groups_are_in_products():
    """In the epilogue of one product and the prologue of the next."""
    fd = FusionDefinition()
    m = fd.define_size("m")
    x = fd.define_tensor(shape=[m, 64], dtype="bf16")
    offs = fd.define_tensor(shape=[4], dtype="i32")
    up, scale = (
        fd.define_tensor(shape=shape, dtype="bf16", role="weight")
        for shape in ((4, 128, 64), (4, 128))
    )
    down = fd.define_tensor(shape=[4, 64, 128], dtype="bf16", role="weight")
    ends = fd.groups_of(offs, m)
    y = fd.ops.grouped_mm(fd.partition_by(x, ends), up, ends)
    y = fd.ops.group_mul(fd.ops.relu(fd.ops.cast(y, dtype="bf16")), scale, ends)
    fd.add_output(fd.ops.cast(fd.ops.grouped_mm(y, down, ends), dtype="bf16"))
    kernels = emitted(fd.fusion())
    assert ["group_mul" in str(kernel.segment.fusion) for kernel in kernels] == [True, False]
    assert [kernel.why for kernel in kernels] == ["", ""]
    for count in (3, 300):
        built = [
            build(x, H200) for kernel in kernels for x in launches(kernel.launch.source, count)
        ]
        assert all(cubin.stat().st_size for cubin in built)


@pytest.mark.parametrize(
    ("is_read", "names"), [(False, ["combine"]), (True, ["combine", "elements_0"])]
)
def test_a_combine_rounds_its_sums(is_read, names):
    """In its own kernel, unless something else reads them."""
    fd = FusionDefinition()
    t = fd.define_size("t")
    y = fd.define_tensor(shape=[2 * t, 64], dtype="bf16")
    slot_of = fd.define_tensor(shape=[t, 2], dtype="i32")
    total = fd.ops.combine(y, slot_of, fd.define_tensor(shape=[t, 2], dtype="f32"))
    fd.add_output(fd.ops.cast(total, dtype="bf16"))
    if is_read:
        fd.add_output(total)
    (kernel,) = emitted(fd.fusion())
    found = launches(kernel.launch.source, 3)
    assert [x.name for x in found] == names
    assert all(build(x, H200).stat().st_size for x in found)


@needs_nvdisasm
def test_sums_wait_for_rows_only():
    """A thread reads its rows' numbers and weights, and the last end, before it waits, then all
    rows at once.
    """
    kernel = next(x for x in launches(sources("qwen3")[-1], 8) if x.name == "combine")
    lines = sass(build(kernel, H200))
    (wait,) = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    of_rows = [i for i, line in enumerate(lines) if "LDG.E.128" in line]
    assert sum("LDG" in line for line in lines[:wait]) == 2 * 8 + 1
    assert len(of_rows) == 8
    assert wait < of_rows[0]
    assert not any("FADD" in line for line in lines[wait : of_rows[-1]])
    assert [line.split()[0] for line in lines if "STG" in line and "STRONG" not in line] == [
        "STG.E.128"
    ]
    assert not spills(lines)


@pytest.mark.parametrize(("filled", "kernels"), [(8, 1), (7, 2)])
def test_ends_that_a_fusion_fills(filled, kernels):
    """QuantizedLinear under torch.compile, followed by a residual: where they say that all rows
    are of one group, nobody writes them.
    """
    fd, groups, k, n = FusionDefinition(), 1, 128, 64
    x = fd.define_tensor(shape=[8, k], dtype="bf16")
    parts = [([1, n, k // 2], "u8"), ([1, n, k // 16], "f8e4m3"), ([1], "f32")]
    weight = fd.ops.pack(
        *(fd.define_tensor(shape=s, dtype=t, role="weight") for s, t in parts),
        encoding="nvfp4",
        layout="w16x64",
    )
    residual = fd.define_tensor(shape=[8, n], dtype="bf16")
    ends = fd.ops.ends(
        fd.ops.full(shape=[groups], fill_value=filled, dtype="i32"),
        rows=8,
        groups=fd.define_groups("g", groups),
    )
    y = fd.ops.cast(
        fd.ops.grouped_mm(fd.ops.partition(x, ends), weight, ends, w_layout="w16x64"), dtype="bf16"
    )
    fd.add_output(fd.ops.add(y, residual))
    made = emitted(fd.fusion())
    assert [kernel.backend for kernel in made] == ["cuda"] * kernels
    for variant in ("small_m_1x1x4x2x2", "large_m_64x4"):
        with options.override(cuda_variant=variant):
            sources = [source for kernel in made for source in launches(kernel.launch.source, 8)]
            assert all(("ends = nullptr" in source.text) == (kernels == 1) for source in sources)
            build_all(sources, H200)


def test_local_experts():
    """A block more, of many ids eight, sorts the rows of ids that name no group; only if all
    experts are here are those other than -1 reported, and few.
    """
    for first_expert, route, of_many, rest in (
        (None, "Route<i64, false, 1, 1>{", "Route<i64, false, 4, 1>{", 1),
        (32, "Route<i64, true, 1, 1>{", "Route<i64, true, 4, 8>{", 8),
    ):
        up, down = sources(first_expert=first_expert)
        routing, product = (
            launches(up, 4)[0],
            next(x for x in launches(up, 4) if "find_tile" in x.text),
        )
        assert routing.blocks == 129
        assert route in routing.text
        many = next(x for x in launches(up, 4096) if x.name == "route")
        assert of_many in many.text
        assert many.blocks == 128 + rest
        assert f", {first_expert or 0}, i32(rows()));" in product.text  # by ids
    build_all([routing, many, product, *launches(down, 4)], H200)


def test_tensors_elsewhere_are_refused():
    with (
        options.override(target="cuda"),
        pytest.raises(UnsupportedError, match="cuda requires CUDA tensors, got cpu"),
    ):
        torch.ops.fusion_moe.scaled_swiglu(torch.randn(4, 8))


# Marks of tiles -----------------------------------------------------------------------------------


@pytest.mark.skipif(NVDISASM is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("tokens", few([1, 4096]))
def test_tiles_are_marked_only_on_request(tokens):
    """Of a product that reads weights and of one that multiplies. Marks need no memory of threads:
    nothing is kept in registers between them.
    """
    product = sources()[1]
    (kernel,) = [k for k in launches(product, tokens) if "_m" in k.name]
    plain = build(kernel, H200)
    with options.override(cuda_debug="timeline"):
        marking = build(kernel, H200)
    codes = [path.read_bytes() for path in (plain, marking)]
    assert [timeline.marks(code) for code in codes] == [False, True]
    reads = [
        sum("SR_VIRTUALSMID" in x or "SR_SMID" in x for x in sass(p)) for p in (plain, marking)
    ]
    assert reads[0] == 0 < reads[1]
    assert not spills(sass(marking))


def test_no_lambda_is_generic():
    """NVRTC of CUDA 12.8 and 13.0 takes those with `auto` parameters for functions of the host."""
    generic = re.compile(r"\]\s*\([^)]*\bauto\b")
    assert [p.name for p in KERNELS.rglob("*.cuh") if generic.search(p.read_text())] == []
