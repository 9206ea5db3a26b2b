"""The target "cpp" in every way: the same programs, their grouped products in C++."""

from __future__ import annotations

import pytest
import torch
from experts import experts
from ways import HOW, every_way

import fusion_moe
from fusion_moe import options
from fusion_moe.errors import UnsupportedError

pytestmark = pytest.mark.compiler
ops = torch.ops.fusion_moe
E, H, I, T, K = 4, 64, 32, 9, 2


@pytest.fixture
def cpp():
    with options.override(target="cpu"):
        yield


def inputs(dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    weights, ids = torch.rand(T, E, generator=g).topk(K)
    return torch.randn(T, H, generator=g).to(dtype), ids, weights


def by_meaning(module, *args):
    with options.override(target="reference"):
        return module(*args)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer(how, dtype, cpp):
    module, args = experts(E, H, I), inputs(dtype)
    with torch.no_grad():
        found, want = HOW[how](module)(*args), by_meaning(module, *args)
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, want, rtol=2 * rounding, atol=rounding)


@every_way
def test_gradients(how, cpp):
    """Of a forward and a backward in C++."""
    module, (x, ids, weights) = experts(E, H, I), inputs(torch.float32)
    grads = []
    for run in (HOW[how](module), lambda *args: by_meaning(module, *args)):
        leaf = x.clone().requires_grad_()
        run(leaf, ids, weights).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_explain_shows_the_kernels():
    with torch.no_grad():
        report = fusion_moe.explain(experts(E, H, I), *inputs(), target="cpu")
    assert {s.backend for f in report.fusions for s in f.segments} == {"cpu"}
    assert '#include "product.h"' in report.stage("source")


@pytest.mark.gpu
def test_tensors_elsewhere_are_refused(cpp):
    with pytest.raises(UnsupportedError, match="cpu requires CPU tensors, got cuda:0"):
        experts(E, H, I).cuda()(*(t.cuda() for t in inputs()))
