"""The kernels that are chosen on GPUs of all compute capabilities, compiled for each of them: they
fit its shared memory and its registers, and spill none. Nothing of this needs a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from cover import few
from cubins import use_of
from fusions import fusion_of_call
from kernel_tables import EIGHT_BITS, PAIRS
from test_cuda_source import (
    MODELS,
    emitted,
    encoded,
    launches,
    layer,
    product_of,
    small_operations,
    tokens_of,
)
from test_cuda_training_source import adapted, by_recipe, derivative, packed, sources

from fusion_moe import options
from fusion_moe.arch import A10, A100, B200, L40S, RTX_PRO_6000, Arch
from fusion_moe.backends.cuda.heuristics import Chosen, SizeClass
from fusion_moe.backends.cuda.launch import Launch, build
from fusion_moe.backends.cuda.mma_tile import mma_tile, warp_columns
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.backends.cuda.variants import ALL
from fusion_moe.runtime import nvrtc
from fusion_moe.runtime.kernel import Kernel

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
    pytest.mark.slow,
]
ALL_GPUS = (A100, A10, L40S, B200, RTX_PRO_6000)
GPUS = pytest.mark.parametrize("gpu", ALL_GPUS, ids=lambda gpu: gpu.nvrtc)
ENCODED = (*PAIRS, *EIGHT_BITS)
# a quarter of an hour
thorough = pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "long", reason="runs with HYPOTHESIS_PROFILE=long"
)
TOKENS = (1, 64, 1024, 8192)  # which have kernels of their own


def check(kernels: Iterable[KernelSource], gpu: Arch) -> None:
    """Each text compiles, and a multiprocessor has room for as many blocks as it is made for."""
    texts = list({kernel.text: kernel for kernel in kernels}.values())
    assert texts
    with ThreadPoolExecutor() as pool:
        for kernel, path in zip(texts, pool.map(lambda k: build(k, gpu), texts), strict=True):
            use = use_of(path)
            assert use.stack == 0, f"{kernel.name} spills {use.stack} bytes"
            shared = kernel.shared + use.shared
            room = (kernel.threads, shared, kernel.min_blocks, use.registers)
            assert not gpu.why_no_room(*room), f"{kernel.name}: {gpu.why_no_room(*room)}"


def launched(kernels: Iterable[Kernel], gpu: Arch, tokens: Iterable[int]) -> list[KernelSource]:
    """What some numbers of tokens launch."""
    launches = [k.launch for k in kernels]
    assert all(isinstance(launch, Launch) for launch in launches)
    return [
        kernel
        for launch in launches
        for t in tokens
        for kernel in launch.choose(dict.fromkeys(launch.parts.symbols, t), gpu).kernels
    ]


@cache
def layer_for(name: str, model: str, layout: str) -> list[Kernel]:
    """A layer, planned for the GPU with this name."""
    with options.override(cuda_arch=name):
        return layer(model, layout)[1]


@pytest.mark.exhaustive
@GPUS
def test_layers_fit(gpu):
    """gpt-oss's K is in no whole stages; a linear layout has kernels of its own."""
    check(launched(layer_for(gpu.name, "gptoss", "w16x64"), gpu, TOKENS), gpu)
    check(launched(layer_for(gpu.name, "qwen3", "linear"), gpu, TOKENS[:1]), gpu)


@pytest.mark.parametrize("layout", ["w16x64", "linear"])
@pytest.mark.parametrize(
    "number", few(range(len(ENCODED)), 3), ids=["-".join(names) for names in ENCODED]
)
def test_every_encoding_fits(number, layout):
    """On one GPU each."""
    gpu = ALL_GPUS[(number + (layout == "linear")) % len(ALL_GPUS)]
    with options.override(cuda_arch=gpu.name):
        source = product_of(*ENCODED[number], layout)
    check(launches(source, 16, gpu), gpu)


@thorough
@GPUS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["w16x64", "linear"])
def test_all_layers_fit(gpu, model, layout):
    check(launched(layer_for(gpu.name, model, layout), gpu, (*TOKENS, 8, 256)), gpu)


@thorough
@GPUS
@pytest.mark.parametrize("layout", ["w16x64", "linear"])
@pytest.mark.parametrize(("fmt", "activations"), ENCODED)
def test_all_variants_fit(gpu, fmt, activations, layout):
    """Every kernel of products that a table of such a GPU could name, whatever the sizes."""
    with options.override(cuda_arch=gpu.name):
        source = product_of(fmt, activations, layout)
    fitting = [v for v in ALL if v.fits(source.matrices, gpu)]
    check(
        (k for v in fitting for k in source.products(Chosen((SizeClass(v),)), {"s0": 512}, gpu)),
        gpu,
    )


@pytest.mark.parametrize("gpu", few(ALL_GPUS, 2), ids=lambda gpu: gpu.nvrtc)
def test_small_operations_fit(gpu):
    made = [kernel for fusion in small_operations() for kernel in emitted(fusion)]
    check(launched(made, gpu, (3, 3000)), gpu)


TRAINED = {
    "float weights": lambda: derivative("plain", 2048, 768),
    "biases, four columns of a product": lambda: derivative("gpt-oss", 256, 192),
    "rows that are not aligned": lambda: derivative("plain", 100),
    "few bits": lambda: packed("nvfp4", "w16x64", 2048, 768),
    "few bits, linear": lambda: packed("int4", "linear"),
    "adapters": lambda: adapted("nvfp4", "w16x64", 2048, 768),
    "codes": lambda: by_recipe("fp8_block", 192, 320),
}


@pytest.mark.parametrize("number", few(range(len(TRAINED))), ids=list(TRAINED))
def test_training_fits(number):
    """Forward and backward, for few rows of a group and many, each layer for one kind of GPU."""
    gpu = ALL_GPUS[number % len(ALL_GPUS)]
    with options.override(cuda_arch=gpu.name):
        made = list(TRAINED.values())[number]()
        found = [s for f in (made.forward, made.backward) for s in sources(f)]
    kernels = [
        kernel
        for source in found
        for tokens in (64, 8192)
        for kernel in launches(source, tokens, gpu)
        if kernel.name.startswith(("gemm", "wgrad", "large"))
    ]
    assert kernels
    assert all("_mma_" in kernel.name for kernel in kernels)
    check(kernels, gpu)


@pytest.mark.parametrize("read", [1, 4])
@pytest.mark.parametrize("groups", [1, 128, 256, 1500])
def test_tiles_of_products_without_wgmma_fit(groups, read):
    """`read`: columns of the product that one of a result reads, which a warp has."""
    for gpu in ALL_GPUS:
        for tile in ((128, 256), (128, 128), *([(64, 256), (256, 64)] if read == 1 else [])):
            m, n = mma_tile(*tile, groups, gpu, read)
            assert m <= tile[0]
            assert warp_columns(read) <= n <= tile[1]
            assert 2 * 128 * (m + n) + 20 * groups < gpu.shared_per_block
    assert mma_tile(128, 256, 128, A100) == (128, 256)
    assert mma_tile(128, 256, 128, L40S) == (128, 128)


@pytest.mark.parametrize("gpu", few([L40S, RTX_PRO_6000]), ids=lambda gpu: gpu.nvrtc)
@pytest.mark.parametrize("inner", few([768, 208]))
def test_products_of_codes_fit(gpu, inner):
    """Of a layer with rows in FP8: the first quantizes its result, in whole blocks or not."""
    weights = encoded("fp8", 8, 2 * inner, 512), encoded("fp8", 8, 512, inner)
    args = *tokens_of(64, 2, 512), *weights
    with options.override(cuda_arch=gpu.name):
        how = {"weight_format": "fp8", "activation_format": "fp8"}
        found = sources(fusion_of_call("fused_experts", *args, **how))
    kernels = [kernel for source in found for kernel in launches(source, 8192, gpu)]
    assert any(k.name.startswith("fp8_gemm_mma") for k in kernels)
    check(kernels, gpu)
