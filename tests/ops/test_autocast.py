"""The operations under torch.autocast: dtypes as torch's linear has them, packed weights untouched,
gradients in the parameters' dtypes.
"""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits
from test_float_weights import FLOATS, FORMATS, ROUTING, call, layer
from torch import Tensor

from fusion_moe.encodings import NVFP4, quantize

ops = torch.ops.fusion_moe
pytestmark = pytest.mark.usefixtures("meaning")
OFFS = torch.tensor([1, 1, 4], dtype=torch.int32)


def grads(
    given: dict[str, Tensor], dtype: torch.dtype | None, cast: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and gradients of a layer whose tensors are cast by hand, or under autocast."""
    leaves = {n: t.detach().clone().requires_grad_(n in FLOATS) for n, t in given.items()}
    used = {n: t.to(cast) if cast and n in FLOATS and n != "w" else t for n, t in leaves.items()}
    if dtype is None:
        y = call(used)
    else:
        with torch.autocast("cpu", dtype):
            y = call(used)
    y.float().sum().backward()
    return y, {n: leaves[n].grad for n in FLOATS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_compute_in_its_dtype(dtype):
    """Float32 parameters, as if cast by hand; their gradients are float32, and the slots' weights
    never leave it.
    """
    given = layer(ROUTING, torch.float32)
    (y, found), (want, expected) = grads(given, dtype), grads(given, None, cast=dtype)
    assert y.dtype == torch.nn.functional.linear(given["x"].to(dtype), given["x"].to(dtype)).dtype
    assert_same_bits([y, *found.values()], [want, *expected.values()])
    assert {g.dtype for g in found.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", FORMATS)
def test_as_linear(dtype):
    """The dtype of the result for every dtype of the parameters, float64 too, which autocast leaves
    alone.
    """
    a, w = torch.ones(5, 4, dtype=dtype), torch.ones(3, 8, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.grouped_mm(a, [w], OFFS, weight_format=FORMATS[dtype])
        assert y.dtype == torch.nn.functional.linear(a, w[0]).dtype
        assert ops.group_add(y, torch.ones(3, 8, dtype=dtype), OFFS).dtype == y.dtype
        assert (
            ops.grouped_mm(
                a, [w.mT.contiguous()], OFFS, weight_format=FORMATS[dtype], transposed=True
            ).dtype
            == y.dtype
        )
        assert (
            ops.grouped_mm(
                a, [w], OFFS, weight_format=FORMATS[dtype], out_dtype=torch.float32
            ).dtype
            == torch.float32
        )


def test_packed_weights_stay_as_they_are():
    a, q = (
        torch.randn(5, 32, generator=torch.Generator().manual_seed(0)),
        quantize(torch.ones(3, 16, 32), NVFP4),
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = (
            ops.nvfp4_grouped_mm(a, *q, OFFS),
            ops.grouped_mm(a, list(q), OFFS, weight_format="nvfp4"),
        )
    want = ops.nvfp4_grouped_mm(a.bfloat16(), *q, OFFS)
    assert_same_bits(found, (want, want))


def test_a_gradient_through_it():
    """The cast is part of the graph, whether an input is a leaf or not."""
    a, w = torch.randn(5, 4).requires_grad_(), torch.randn(3, 8, 4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.grouped_mm(a * 2, [w], OFFS, weight_format="f32")
    y.sum().backward()
    assert a.grad.dtype == w.grad.dtype == torch.float32
    assert a.grad[:4].all()
    assert not a.grad[4:].any()


def test_compiled():
    given = layer(ROUTING, torch.float32)
    want, _ = grads(given, torch.bfloat16)

    def step(leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return call(leaves)

    found = torch.compile(step, backend="fusion_moe", fullgraph=True)(given)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


def test_other_operations_run_as_they_are():
    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.scaled_swiglu(x).dtype == torch.float32
