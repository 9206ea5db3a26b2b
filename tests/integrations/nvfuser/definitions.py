"""Definitions for tests: as text, or made with the real nvFuser; and NVFP4 problems with their
results.
"""

from __future__ import annotations

import math

import torch
from interpreter import interpret
from meaning.blockscale import addresses, ceil_to
from meaning.values import E4M3

DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
    torch.float8_e4m3fn: E4M3,
    torch.float8_e8m0fnu: "Float8_e8m0fnu",
    torch.float4_e2m1fn_x2: "Float4_e2m1fn_x2",
}
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def same(a, b):
    """Asserts that the tensors are equal, NaN to NaN and the signs of zeros too."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.element_size() == 1 and a.is_floating_point():
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if a.is_floating_point():
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(a) & (a == 0), torch.signbit(b) & (b == 0))
    else:
        assert torch.equal(a, b)


def text_of(*lines):
    return "\n    ".join(["def nvfuser_fusion(fd : FusionDefinition) -> None :", *lines])


def tensor_line(name, shape, dtype, rest=""):
    """An input whose memory has no gaps."""
    return (
        f"{name} = fd.define_tensor(shape={list(shape)}, contiguity={[True] * len(shape)}, "
        f"dtype=DataType.{dtype}, is_cpu=False{rest})"
    )


def run(line, *inputs, result="tv9"):
    """One operation on tensors tv0, tv1, ... that are contiguous."""
    lines = [tensor_line(f"tv{i}", x.shape, DTYPES[x.dtype]) for i, x in enumerate(inputs)]
    return interpret(
        text_of(*lines, f"{result} = {line}", *(f"fd.add_output({r})" for r in result.split(", "))),
        inputs,
    )


def exclusive(sizes):
    return torch.tensor([0, *sizes[:-1]]).cumsum(0).int()


def starts_of(sizes):
    """(first rows, first padded rows) of groups."""
    return exclusive(sizes), exclusive([ceil_to(n, 128) for n in sizes])


def dequantized(packed, scales):
    """packed [..., k/2], two codes in a byte, scales [..., k/16] -> float32[..., k]"""
    codes = packed.view(torch.uint8)
    values = torch.cat([GRID, -GRID])
    floats = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(-2)
    return floats * scales.float().repeat_interleave(16, -1)


def nvfp4_problem(sizes, k=64, n=128, m=None, seed=0):
    """a, b, scales_a, scales_b (each group swizzled), alpha, problem sizes, first rows, first
    padded rows; the result in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    count, m = len(sizes), m or sum(sizes)
    a, b = (
        torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        for shape in ((m, k // 2), (count, n, k // 2))
    )
    scales_a, scales_b = (
        (torch.rand(s, generator=generator) * 4).to(torch.float8_e4m3fn)
        for s in ((m, k // 16), (count, n, k // 16))
    )
    alpha = torch.rand(count, generator=generator) + 0.5
    x, y = dequantized(a, scales_a).double(), dequantized(b, scales_b).double()
    want = torch.full((m, n), math.nan, dtype=torch.float64)
    row = 0
    for g, size in enumerate(sizes):
        for r in range(row, row + size):
            want[r] = (x[r] * y[g]).sum(-1) * alpha[g].double()
        row += size
    memory = torch.zeros(count, n * k // 16)
    memory[:, addresses(n, k // 16).flatten()] = scales_b.float().flatten(1)
    first_rows, first_padded = starts_of(sizes)
    problem_sizes = torch.tensor([[size, n, k] for size in sizes]).int()
    swizzled = memory.view(count, n, k // 16).to(torch.float8_e4m3fn)
    return [
        a,
        b.transpose(1, 2),
        scales_a,
        swizzled,
        alpha,
        problem_sizes,
        first_rows,
        first_padded,
    ], want


def define(fd, x):
    """An input like x, which is contiguous, or a [g, k, n] whose k is the fastest dimension."""
    from nvfuser_direct import DataType

    dtype = getattr(DataType, DTYPES[x.dtype])
    if x.dim() == 3 and x.stride(1) == 1 and x.stride(2) != 1:
        return fd.define_tensor(
            shape=list(x.shape), contiguity=True, dtype=dtype, stride_order=[2, 0, 1]
        )
    return fd.define_tensor(shape=list(x.shape), contiguity=True, dtype=dtype)


def defined(build, *inputs):
    """The definition of build(fd, *its inputs, tensors or scalars) -> outputs."""
    from nvfuser_direct import DataType, FusionDefinition

    with FusionDefinition() as fd:
        values = [
            define(fd, x)
            if isinstance(x, torch.Tensor)
            else fd.define_scalar(
                None, dtype=DataType.Int if isinstance(x, int) else DataType.Double
            )
            for x in inputs
        ]
        outputs = build(fd, *values)
        for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            fd.add_output(output)
    return fd
