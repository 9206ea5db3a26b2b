"""The sources of training on CUDA, compiled with NVRTC, which needs no GPU: which kernels a layer has, and what they are made of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_cuda_source import needs_nvdisasm, sass

from fusion_moe import options
from fusion_moe.arch import H200
from fusion_moe.compile import compile_fusion
from fusion_moe.emit.cuda.gemm import Gemm, PlainProduct, Wgrad
from fusion_moe.emit.cuda.launch import build
from fusion_moe.emit.cuda.loops import Loops
from fusion_moe.emit.cuda.source import KernelSource, Source
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import Derivative, differentiate
from fusion_moe.op_definitions import SPECS, bind, eager_types, fusion_of
from fusion_moe.runtime import nvrtc
from fusion_moe.target import TARGETS

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, gate and up by 32": {"interleave": 32},
    "gpt-oss": {"interleave": 32, "limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "transposed": True},
    "scale on input": {"scale_on": "input"},
}


def derivative(how: str, hidden: int = 256, inner: int = 192, dtype: torch.dtype = torch.bfloat16) -> Derivative:
    """Of a layer of 8 experts, with respect to all floats."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    kwargs, groups = HOW[how], 8
    down, gate_up = (groups, hidden, inner), (groups, 2 * inner, hidden)
    if kwargs.get("transposed"):
        down, gate_up = (groups, inner, hidden), (groups, hidden, 2 * inner)
    biases = [meta(groups, 2 * inner), meta(groups, hidden)] if "interleave" in kwargs else []
    weight_format = "bf16" if dtype == torch.bfloat16 else "f16"
    args = (meta(64, hidden), meta(64, 2, dtype=torch.int64), meta(64, 2, dtype=torch.float32), [meta(*gate_up)], [meta(*down)], *biases)
    call = bind(SPECS["fused_experts"], args, {"weight_format": weight_format, **kwargs})
    return differentiate(fusion_of("fused_experts", eager_types(call), call.others), [i for i, n in enumerate(call.tensors) if n != "ids"])


def sources(fusion: Fusion) -> list[Source]:
    """Of all segments; none is left to the reference."""
    program = compile_fusion(fusion, TARGETS["cuda"], options.current())
    assert [s.plan.why for s in program.segments if s.plan.backend != "cuda"] == []
    return [s.plan.work for s in program.segments]


def test_mxfp8_is_one_call_of_our_kernels():
    """Copies of one tensor are made by one kernel. Rows are picked from numbers that were rounded once, as the product reads them."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    args = (meta(64, 256), meta(64, 2, dtype=torch.int64), meta(64, 2, dtype=torch.float32), [meta(8, 384, 256)], [meta(8, 256, 192)])
    call = bind(SPECS["fused_experts"], args, {"weight_format": "bf16", "activation_format": "mxfp8"})
    made = differentiate(fusion_of("fused_experts", eager_types(call), call.others), [0, 2, 3, 4])
    found = []
    for fusion in (made.forward, made.backward):
        program = compile_fusion(fusion, TARGETS["cuda"], options.current())
        assert program.joined
        found.append([type(s.plan.work).__name__ for s in program.segments])
        for kernel in program.joined.choose(dict.fromkeys(fusion.symbols, 64), H200).kernels:
            if kernel.name.startswith(("copies", "elements", "sum")):
                assert build(kernel, H200).exists()
    products = [[name for name in names if name != "Loops"] for names in found]
    assert products == [["Gemm", "PlainProduct"], ["Gemm", "Gemm", "Wgrad", "Wgrad"]]
    assert [names.count("Loops") for names in found] == [5, 6]


def kernels(fusion: Fusion) -> list[KernelSource]:
    """For 4096 tokens."""
    sizes = dict.fromkeys(fusion.symbols, 4096)
    return [kernel for source in sources(fusion) for kernel in source.launches(source.choose(sizes, H200), sizes, H200)]


def test_which_kernels_a_layer_has():
    """Forward: FC1 stores the pre-activation too. Backward: FC2's dgrad with the activation's derivative, FC1's, both wgrads, the picking
    of the router's gradient.
    """
    made = derivative("plain")
    assert [type(s) for s in sources(made.forward)] == [Gemm, PlainProduct]
    assert sorted(type(s).__name__ for s in sources(made.backward)) == sorted(t.__name__ for t in (Gemm, Gemm, Wgrad, Wgrad, Loops))


@pytest.mark.parametrize(("how", "hidden"), [*((how, 256) for how in HOW), ("plain", 100)])
def test_everything_compiles(how, hidden):
    made = derivative(how, hidden)
    for kernel in (*kernels(made.forward), *kernels(made.backward)):
        build(kernel, H200)


@needs_nvdisasm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_keep_their_registers(dtype):
    """No local memory, though accumulators are 128 registers; products run on while the next stage is waited for."""
    made = derivative("plain", 2048, 768, dtype)
    products = [k for k in (*kernels(made.forward), *kernels(made.backward)) if k.title.startswith(("gemm", "wgrad"))]
    assert sorted(k.title for k in products) == ["gemm_128x256"] * 4 + ["wgrad_128x256", "wgrad_256x128"]
    for kernel in products:
        lines = sass(build(kernel, H200))
        assert not [x for x in lines if re.search(r"\b(LDL|STL)\b", x)], kernel.title
        assert sum("HGMMA" in x for x in lines) == (8 if kernel.title == "wgrad_256x128" else 4)
        assert sum("WARPGROUP.DEPBAR" in x for x in lines) == 2


def packed(weight_format: str, layout: str, hidden: int = 256, inner: int = 192) -> Derivative:
    """Of a layer of 8 experts with weights in few bits, with respect to all other floats."""

    def weight(*shape: int) -> list[torch.Tensor]:
        parts = quantize(torch.randn(shape), encoding=ENCODINGS[weight_format])
        return [t.to("meta") for t in parts]

    x, ids, w = torch.zeros(64, hidden).bfloat16(), torch.zeros(64, 2, dtype=torch.int64), torch.zeros(64, 2)
    args = (x.to("meta"), ids.to("meta"), w.to("meta"), weight(8, 2 * inner, hidden), weight(8, hidden, inner))
    call = bind(SPECS["fused_experts"], args, {"weight_format": weight_format, "weight_layout": layout})
    return differentiate(fusion_of("fused_experts", eager_types(call), call.others), [0, 2])


FEW_BITS = [
    ("nvfp4", "w16x64", 64),
    ("nvfp4", "w16x64", 4096),
    ("nvfp4", "linear", 4096),
    ("mxfp4", "w16x64", 4096),
    ("int4", "linear", 64),
]


@needs_nvdisasm
@pytest.mark.parametrize(("weight_format", "layout", "tokens"), FEW_BITS)
def test_weights_in_few_bits_have_a_dgrad(weight_format, layout, tokens):
    """Both of a layer, for few rows and many, in kernels that keep their registers."""
    made = packed(weight_format, layout)
    gemms = [s for s in sources(made.backward) if isinstance(s, Gemm)]
    assert len(gemms) == 2
    for gemm in gemms:
        sizes = dict.fromkeys(gemm.fusion.symbols, tokens)
        (kernel,) = (k for k in gemm.launches(gemm.choose(sizes, H200), sizes, H200) if k.title.startswith("gemm"))
        assert kernel.title == ("gemm_64x256" if tokens == 64 else "gemm_128x256")
        lines = sass(build(kernel, H200))
        assert not [x for x in lines if re.search(r"\b(LDL|STL)\b", x)], kernel.title
        assert sum("HGMMA" in x for x in lines) == 4
        assert any("UBLKCP" in x for x in lines) == (layout == "w16x64")  # tiles are copied ahead


def test_rows_that_are_not_in_sixteens_are_left_to_the_reference():
    codes, scales, decode = (t.to("meta") for t in quantize(torch.randn(4, 24, 64)))
    args = (
        torch.zeros(9, 64, dtype=torch.bfloat16, device="meta"),
        [codes, scales, decode],
        torch.zeros(4, dtype=torch.int32, device="meta"),
    )
    call = bind(SPECS["grouped_mm"], args, {"weight_format": "nvfp4"})
    backward = differentiate(fusion_of("grouped_mm", eager_types(call), call.others), [0]).backward
    (why,) = (s.plan.why for s in compile_fusion(backward, TARGETS["cuda"], options.current()).segments if s.plan.backend != "cuda")
    assert "a weight of 24 rows in 1 runs with a scale each has no kernel here" in str(why)


def test_sums_of_a_row_have_a_place_for_each_tile():
    made = derivative("plain", 256, 700)
    (gemm,) = [s for s in sources(made.backward) if isinstance(s, Gemm) and s.plan.sums]
    (array,) = [a for a in gemm.scratch if a.name == "partial_sums"]
    sizes = dict.fromkeys(gemm.fusion.symbols, 1000)
    assert gemm.count(array, gemm.choose(sizes, H200), sizes) == 2 * 1000 * 3  # rows, and tiles of 256 columns
