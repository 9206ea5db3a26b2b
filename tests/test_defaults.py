"""torch's default dtype and device, which callers may change: results are the usual ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from experts import experts
from torch._subclasses import FakeTensorMode

import fusion_moe
from fusion_moe import options
from fusion_moe.backends.cpu import readers
from fusion_moe.backends.cuda import readers as cuda_readers
from fusion_moe.encodings import (
    INT4,
    MXFP4,
    NVFP4,
    Element,
    Encoding,
    Scale,
    dequantize,
    quantize,
)
from fusion_moe.frontends.reference_semantics import drawn
from fusion_moe.ir.activation import read
from fusion_moe.nn import swiglu
from fusion_moe.report.repro import random_inputs
from fusion_moe.runtime import build, isa


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("encoding", [NVFP4, MXFP4, INT4], ids=lambda e: e.name)
def test_decoded_weights(encoding, dtype):
    weight = quantize(
        torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)), encoding=encoding
    )
    want = dequantize(weight)
    with default_dtype(dtype):
        assert dequantize(weight).equal(want)
    assert want.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer(dtype):
    module, args = (
        experts(4, 64, 32),
        (torch.randn(5, 64).bfloat16(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)),
    )
    want = module(*args)
    for target in "auto", "reference":
        with default_dtype(dtype), options.override(target=target):
            torch.testing.assert_close(module(*args), want)


def look_up_format() -> tuple[object, ...]:
    """What is derived from a format's table: its codes, and its reader's text."""
    element = Element.look_up("quarters", [i / 4 for i in range(16)])
    of = Encoding("quarters", element, (Scale("scale", torch.float16, 32, lambda amax, _: amax),))
    return element.values, element.affine, tuple(cuda_readers._descriptor(of, tiled=False))


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
@pytest.mark.parametrize(
    "make",
    [look_up_format, lambda: str(read.__wrapped__(swiglu(limit=7.0)))],
    ids=["format", "activation"],
)
def test_what_is_derived_once(make, mode):
    """Also if it is while a model is loaded in bfloat16, or traced."""
    want = make()
    with default_dtype(torch.bfloat16), mode:
        assert make() == want


@pytest.mark.compiler  # to build what comes with the package
@options.override(cpu_isa="generic")  # which compiles in the shortest time
def test_the_product_that_came_with_the_package(monkeypatch, tmp_path):
    """Its result is float32, whatever torch makes where nothing is said."""
    monkeypatch.setattr(readers, "SHIPPED", tmp_path)
    build.ship(readers.library_source(isa.selected(), "nvfp4"), isa.features())
    weight, a = quantize(torch.randn(2, 48, 64), NVFP4), torch.randn(9, 64).bfloat16()
    call = (
        torch.ops.fusion_moe.nvfp4_grouped_mm,
        a,
        *weight,
        torch.tensor([4, 9], dtype=torch.int32),
    )
    want = call[0](*call[1:])
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    # a program of its own
    with default_dtype(torch.float64), options.override(contract_rounding=False):
        torch.testing.assert_close(call[0](*call[1:]), want)


def test_a_program_with_inputs_on_the_cpu():
    """Its results and the memory between its kernels are there too."""
    fd = fusion_moe.FusionDefinition()
    rows, groups = fd.define_size("rows"), fd.define_groups("groups", 4)
    x, ends = (
        fd.define_tensor(shape=[rows, 256], dtype="bf16"),
        fd.define_tensor(shape=[4], dtype="i32"),
    )
    gate, down = (
        fd.define_tensor(shape=shape, dtype="bf16") for shape in ([4, 512, 256], [4, 256, 512])
    )
    at = fd.ops.ends(ends, rows=rows, groups=groups)
    y = fd.ops.cast(fd.ops.relu(fd.ops.grouped_mm(fd.ops.partition(x, at), gate, at)), dtype="bf16")
    fd.add_output(fd.ops.grouped_mm(y, down, at))
    fusion = fd.fusion()
    with torch.device("meta"):
        tensors = random_inputs(fusion, seed=0, sizes={"rows": 300})
    (want,) = fusion_moe.run(fusion, tensors)
    with torch.device("meta"):
        (found,) = fusion_moe.run(fusion, tensors)
    assert found.device.type == "cpu"
    assert found.equal(want)


def test_values_for_comparisons():
    x = torch.zeros(3, 4)
    with torch.device("meta"):
        assert drawn(x).equal(drawn(x.clone()))
