"""The sources of training on CUDA, compiled with NVRTC, which needs no GPU: which kernels a layer
has, and what they are made of.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cover import few
from fusions import fusion_of_call
from test_cuda_source import encoded, launches, meta, needs_nvdisasm, sass, spills, tokens_of

from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.heuristics import AUTO
from fusion_moe.backends.cuda.launch import build
from fusion_moe.backends.cuda.loops import Loops
from fusion_moe.backends.cuda.product import Product
from fusion_moe.backends.cuda.source import KernelSource, Source
from fusion_moe.backends.cuda.variants import LargeM, Matrices, SmallM
from fusion_moe.compile import compile_fusion
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import Derivative, differentiate
from fusion_moe.ir.types import dtype_name
from fusion_moe.nn import activation, swiglu
from fusion_moe.runtime import nvrtc

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
    pytest.mark.slow,
]

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, gate and up by 32": {"activation": swiglu(interleave=32)},
    "gpt-oss": {
        "activation": swiglu(interleave=32, limit=7.0, alpha=1.702, up_offset=1.0),
        "transposed": True,
    },
    "scale on input": {"scale_on": "input"},
    "a slope of each expert": {
        "activation": activation(
            lambda gate, up, slope: torch.where(gate > 0, gate, slope * gate) * up, parameters=1
        ),
        "activation_parameters": torch.zeros(8, 1, 192, device="meta"),
    },
}


def derivative(
    how: str, hidden: int = 256, inner: int = 192, dtype: torch.dtype = torch.bfloat16
) -> Derivative:
    """Of a layer of 8 experts, with respect to all floats."""
    kwargs, groups = HOW[how], 8
    down, gate_up = (groups, hidden, inner), (groups, 2 * inner, hidden)
    if kwargs.get("transposed"):
        down, gate_up = (groups, inner, hidden), (groups, hidden, 2 * inner)
    shapes = ((groups, 2 * inner), (groups, hidden)) if "activation" in kwargs else ()
    weights = ([meta(*shape, dtype=dtype)] for shape in (gate_up, down))
    args = *tokens_of(64, 2, hidden, dtype), *weights, *(meta(*s, dtype=dtype) for s in shapes)
    fusion = fusion_of_call("fused_experts", *args, weight_format=dtype_name(dtype), **kwargs)
    return differentiate(fusion, [i for i in range(len(fusion.inputs)) if i != 1])


def by_recipe(form: str, inner: int, hidden: int = 256, by_columns: bool = False) -> Derivative:
    """The same by a recipe. by_columns: whether wgrad reads codes so."""
    args = *tokens_of(64, 2, hidden), [meta(8, 2 * inner, hidden)], [meta(8, hidden, inner)]
    how = {"weight_format": "bf16", "activation_format": form}
    call = fusion_of_call("fused_experts", *args, **how)
    return differentiate(call, [0, 2, 3, 4], by_columns=by_columns)


def sources(fusion: Fusion) -> list[Source]:
    """Of all segments; none is left to the reference."""
    program = compile_fusion(fusion, TARGETS["cuda"], options.current())
    assert [s.plan.why for s in program.segments if s.plan.backend != "cuda"] == []
    return [s.plan.work for s in program.segments]


def ways(source: Source) -> str:
    """Those of a product, in the order in which they are tried; else the kind of the source."""
    made = [way.source for way in source.ways] if isinstance(source, Product) else [source]
    return ", ".join(type(s).__name__ for s in made)


@needs_nvdisasm
@pytest.mark.parametrize(
    ("form", "inner", "hidden", "copies"),
    few(
        [
            ("mxfp8", 192, 256, [5, 6]),
            ("fp8_block", 208, 288, [5, 6]),
            ("fp8_block_wgrad_bf16", 256, 256, [4, 2]),
            ("fp8_block", 64, 64, [4, 2]),  # multiples of 64: multiplied as codes
            ("fp8_block", 192, 320, [4, 2]),
            ("fp8_block", 256, 256, [4, 2]),
        ],
    ),
)
def test_a_recipe_is_one_call_of_our_kernels(form, inner, hidden, copies):
    """Copies of one tensor are made by one kernel. Rows are picked from numbers that were rounded
    once, as the product reads them; codes along rows are saved as wgrad reads them.
    """
    made, found = by_recipe(form, inner, hidden, by_columns=True), []
    for fusion in (made.forward, made.backward):
        program = compile_fusion(fusion, TARGETS["cuda"], options.current())
        assert program.joined
        found.append([ways(s.plan.work) for s in program.segments])
        for kernel in program.joined.choose(dict.fromkeys(fusion.symbols, 64), H200).kernels:
            if kernel.name.startswith(("copies", "elements", "sum", "fp8")):
                cubin = build(kernel, H200)
                assert cubin.exists()
                assert not spills(sass(cubin))
    products = [[name for name in names if name != "Loops"] for names in found]
    forward, dgrad = [["Gemm", "Gemm, ByVariants"], ["Gemm", "Gemm"]]
    if form.startswith("fp8") and inner % 64 == 0:
        forward = dgrad = ["ByCodes, DecodedRows"] * 2
    wgrad = "CodesWgrad" if form == "fp8_block" and inner % 64 == 0 else "Wgrad"
    assert products == [forward, [*dgrad, wgrad, wgrad]]
    assert [names.count("Loops") for names in found] == copies


@needs_nvdisasm
def test_copies_of_sorted_rows_stay_in_registers():
    """Those of a GroupedLinear, of which a multiprocessor has three blocks."""
    x, ends = meta(64, 2048), torch.empty(8, dtype=torch.int32, device="meta")
    how = {"weight_format": "bf16", "activation_format": "fp8_block"}
    call = fusion_of_call("grouped_mm", x, [meta(8, 1536, 2048)], ends, **how)
    made, copies = differentiate(call, [0, 1], by_columns=True), 0
    for fusion in (made.forward, made.backward):
        for kernel in kernels(fusion):
            if "make_copies<Lanes<" in kernel.text:
                assert not spills(sass(build(kernel, H200)))
                copies += 1
    assert copies == 3  # of x, the weight and dy


@pytest.mark.parametrize("how", ["exact", "saved", "float"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounded_weights_that_train_have_kernels(how, dtype):
    """The forward of "exact" is that of the weights alone; weights' gradients are stored in their
    own dtype.
    """
    weights = (
        [*encoded("nvfp4", 8, n, k), meta(8, n, k, dtype=dtype)]
        for n, k in ((384, 256), (256, 192))
    )
    args = *tokens_of(64, 2, 256), *weights
    given = {"weight_format": "nvfp4", "weight_layout": "w16x64", "straight_through": how}
    made = differentiate(fusion_of_call("fused_experts", *args, **given), [0, 2, 6, 10])
    forward, backward = (
        [ways(s) for s in sources(f) if not isinstance(s, Loops)]
        for f in (made.forward, made.backward)
    )
    assert forward == ["ByVariants", "ByVariants"]
    assert sorted(backward) == sorted(
        ["ByVariants"] * (how != "saved")
        + ["Gemm" if how == "float" else "ByVariants, Gemm"] * 2
        + ["Wgrad"] * 2
    )
    assert [v.type.dtype for v in made.backward.outputs[2:]] == [dtype_name(dtype)] * 2


def kernels(fusion: Fusion) -> list[KernelSource]:
    """For 4096 tokens."""
    return [kernel for source in sources(fusion) for kernel in launches(source, 4096)]


def test_which_kernels_a_layer_has():
    """Forward: FC1 stores the pre-activation too. Backward: FC2's dgrad with the activation's
    derivative, FC1's, both wgrads, the picking of the router's gradient.
    """
    made = derivative("plain")
    assert [ways(s) for s in sources(made.forward)] == ["Gemm", "Gemm, ByVariants"]
    assert sorted(ways(s) for s in sources(made.backward)) == [
        *["Gemm"] * 2,
        "Loops",
        *["Wgrad"] * 2,
    ]


@pytest.mark.parametrize(("how", "hidden"), few([("plain", 100), *((how, 256) for how in HOW)]))
def test_everything_compiles(how, hidden):
    made = derivative(how, hidden)
    for kernel in (*kernels(made.forward), *kernels(made.backward)):
        build(kernel, H200)


def test_a_bias_is_read_for_rows_of_groups_alone():
    """A row of no group has the number of groups as its group: one past the last bias."""
    gemms = [
        kernel.text
        for kernel in kernels(derivative("biases, gate and up by 32").forward)
        if kernel.name.startswith("gemm")
    ]
    biases = [
        (text, name)
        for text in gemms
        for name in re.findall(
            r"const bf16\* (\w+);  // "
            r"bf16\[8, \d+\]",
            text,
        )
    ]
    assert len(biases) == 2
    assert all(
        f"< 8 ? widen({name}[" in text and f"load_eight({name} " not in text
        for text, name in biases
    )


@needs_nvdisasm
@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16]))
def test_products_keep_their_registers(dtype):
    """No local memory, though accumulators are 128 registers; products run on while the next stage
    is waited for.
    """
    made = derivative("plain", 2048, 768, dtype)
    products = [
        k
        for k in (*kernels(made.forward), *kernels(made.backward))
        if k.title.startswith(("gemm", "wgrad"))
    ]
    assert sorted(k.title for k in products) == ["gemm_128x256"] * 4 + [
        "wgrad_128x256",
        "wgrad_256x128",
    ]
    for kernel in products:
        lines = sass(build(kernel, H200))
        assert not spills(lines), kernel.title
        assert sum("HGMMA" in x for x in lines) == (8 if kernel.title == "wgrad_256x128" else 4)
        assert sum("WARPGROUP.DEPBAR" in x for x in lines) == 2


def few_bits(weight_format: str, layout: str, hidden: int, inner: int, **how: Any) -> Fusion:
    """A layer of 8 experts with encoded weights."""
    shapes = (8, 2 * inner, hidden), (8, hidden, inner)
    args = *tokens_of(64, 2, hidden), *(encoded(weight_format, *shape) for shape in shapes)
    how |= {"weight_format": weight_format, "weight_layout": layout}
    return fusion_of_call("fused_experts", *args, **how)


def adapted(
    weight_format: str, layout: str, hidden: int = 256, inner: int = 192, rank: int = 16
) -> Derivative:
    """Of a layer of 8 experts with adapters, with respect to tokens, router weights and
    adapters.
    """
    names = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")
    sizes = ((rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank))
    factors = {name: meta(8, *s) for name, s in zip(names, sizes, strict=True)}
    fusion = few_bits(weight_format, layout, hidden, inner, lora_scale=2.0, **factors)
    count = len(fusion.inputs)
    return differentiate(fusion, [0, 2, *range(count - len(names), count)])


@needs_nvdisasm
def test_wgrads_of_adapters_have_tiles_of_few_columns():
    """Four products of half a tile's columns or rows: as many instructions as accumulators need,
    and no local memory.
    """
    made = adapted("nvfp4", "w16x64", 2048, 768)
    wgrads = [k for k in kernels(made.backward) if k.title.startswith("wgrad")]
    assert sorted(k.title for k in wgrads) == ["wgrad_256x64"] * 2 + ["wgrad_64x256"] * 2
    for kernel in wgrads:
        lines = sass(build(kernel, H200))
        assert not spills(lines), kernel.title
        assert sum("HGMMA" in x for x in lines) == (8 if kernel.title == "wgrad_256x64" else 4)


ADAPTED = [
    ("nvfp4", "w16x64", 16),
    ("mxfp4", "w16x64", 36),
    ("nvfp4", "linear", 16),
    ("int4", "w16x64", 64),
    ("bf16", "linear", 16),
]


@needs_nvdisasm
@pytest.mark.parametrize(("weight_format", "layout", "rank"), few(ADAPTED))
def test_an_adapters_product_joins_the_accumulators(weight_format, layout, rank):
    """B (A x) is added by the kernel of W x, for any number of rows, without local memory."""
    made = adapted(weight_format, layout, rank=rank)
    both = [s for s in sources(made.forward) if isinstance(s, Product) and s.plan.added]
    assert len(both) == 2
    for source in both:
        for rows in (2, 20000):
            *_, kernel = (
                k for k in launches(source, rows) if k.title.startswith(("gemm", "large", "small"))
            )
            lines = sass(build(kernel, H200))
            assert not spills(lines), kernel.title
            if not kernel.title.startswith("small"):
                # the mainloop's instructions are others
                assert any(x.startswith("HMMA") for x in lines)


@pytest.mark.parametrize("rank", [72, 6])
def test_other_numbers_of_features_have_a_kernel_of_their_own(rank):
    made = adapted("nvfp4", "w16x64", rank=rank)
    assert not any(s.plan.added for s in sources(made.forward) if isinstance(s, Product))


def packed(weight_format: str, layout: str, hidden: int = 256, inner: int = 192) -> Derivative:
    """Of a layer of 8 experts with weights in few bits, with respect to all other floats."""
    return differentiate(few_bits(weight_format, layout, hidden, inner), [0, 2])


FEW_BITS = [
    ("nvfp4", "w16x64", 64, "large_m_32x5"),
    ("nvfp4", "w16x64", 4096, "large_m_160x3"),
    ("mxfp4", "w16x64", 128, "large_m_64x4"),
    ("int4", "w16x64", 256, "large_m_80x4"),
    ("nvfp4", "linear", 4096, "gemm_128x256"),
    ("int4", "linear", 64, "gemm_64x256"),
]


@needs_nvdisasm
@pytest.mark.parametrize(("weight_format", "layout", "tokens", "title"), few(FEW_BITS))
def test_weights_in_few_bits_have_a_dgrad(weight_format, layout, tokens, title):
    """Both of a layer, for few rows and many: tiles are transposed in registers, and products run
    while the next fragments are made.
    """
    made = packed(weight_format, layout)
    dgrads = [s for s in sources(made.backward) if isinstance(s, Product)]
    assert [bool(s.plan.sums) for s in dgrads] == [True, False]
    for dgrad in dgrads:
        sizes = dict.fromkeys(dgrad.fusion.symbols, tokens)
        chosen = dgrad.choose(sizes, H200, title if title.startswith("large_m") else AUTO)
        (kernel,) = (
            k
            for k in dgrad.launches(chosen, sizes, H200)
            if k.title.startswith(("gemm", "large_m"))
        )
        assert kernel.title == title
        lines = sass(build(kernel, H200))
        assert any("MOVM" in x for x in lines) == (layout == "w16x64")
        products, waits = (sum(what in x for x in lines) for what in ("HGMMA", "WARPGROUP"))
        # two for each product where the compiler makes it wait for the one before
        assert waits < 0.6 * products or layout == "linear"
        # in the epilogue of high tiles
        assert len(spills(lines)) <= (
            12 if dgrad.plan.sums and tokens == 4096 and layout == "w16x64" else 0
        )


@pytest.mark.parametrize(
    ("k", "runs", "fits"),
    [(192, 1, True), (144, 1, False), (256, 2, True), (384, 2, False), (768, 3, False)],
)
def test_a_dgrad_off_the_tile_is_a_product_of_gemm(k, runs, fits):
    """K blocks are of one run each, and so are stages."""
    assert LargeM(64, 4).fits(Matrices(8, k, 16, 1, 576, True, "dgrad", runs), H200) == fits
    assert not SmallM(1, 1, 2, 1, 3, 8).fits(Matrices(8, k, 16, 1, 576, True, "dgrad", runs), H200)


def test_a_variant_that_fits_no_dgrad_is_for_others():
    (dgrad, _) = (s for s in sources(packed("nvfp4", "w16x64").backward) if isinstance(s, Product))
    sizes = dict.fromkeys(dgrad.fusion.symbols, 512)
    assert dgrad.choose(sizes, H200, "large_m_80x4").size_classes
    assert not dgrad.choose(sizes, H200, "small_m_1x1x2x1x3").size_classes


def test_rows_that_are_not_in_sixteens_are_left_to_the_reference():
    args = meta(9, 64), encoded("nvfp4", 4, 24, 64), meta(4, dtype=torch.int32)
    fusion = fusion_of_call("grouped_mm", *args, weight_format="nvfp4")
    backward = differentiate(fusion, [0]).backward
    (why,) = (
        s.plan.why
        for s in compile_fusion(backward, TARGETS["cuda"], options.current()).segments
        if s.plan.backend != "cuda"
    )
    assert "a weight of 24 rows in 1 runs with a scale each has no kernel here" in str(why)


def test_sums_of_a_row_have_a_place_for_each_tile():
    made = derivative("plain", 256, 700)
    (gemm,) = [s for s in sources(made.backward) if isinstance(s, Product) and s.plan.sums]
    (array,) = [a for a in gemm.scratch if a.name == "partial_sums"]
    sizes = dict.fromkeys(gemm.fusion.symbols, 1000)
    # rows, and parts of 64 columns of tiles of 256
    assert gemm.count(array, gemm.choose(sizes, H200), sizes) == 2 * 1000 * 3 * 4
