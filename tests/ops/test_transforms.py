"""torch.func: `vmap` calls an operation for each element, `functional_call` gives a module other
weights, and derivatives by its transforms are refused, but of what is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts import experts, float_weights, routed
from torch import Tensor, func
from torch.func import functional_call, stack_module_state

import fusion_moe
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import GroupedLinear, QuantizedLinear

OPS = torch.ops.fusion_moe
E, H, I, ROWS = 3, 64, 32, 7
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


@pytest.fixture(autouse=True)
def reference() -> Any:
    with fusion_moe.options.override(target="reference"):
        yield


def batch(*shape: int) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))


def each(f: Callable[[Tensor], Any], xs: Tensor) -> Tensor:
    return torch.stack([f(x) for x in xs])


def modules() -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of x [7, 64]."""
    module, grouped = experts(E, H, I), GroupedLinear(E, H, I)
    _, ids, w = routed(E, H)
    splits = ENDS.diff(prepend=ENDS.new_zeros(1)).long()
    weight = float_weights(E, H, I)[0]
    return {
        "experts": lambda x: module(x, ids, w.float()),
        "ids": lambda x: module(x[: len(ids)], (x[: len(ids), :2].abs() * 9).int() % E, w[:, :2]),
        "linear": QuantizedLinear(quantize(torch.randn(32, H), NVFP4)),
        "grouped": lambda x: grouped(x, splits),
        "product": lambda x: OPS.grouped_mm(x, [weight], ENDS, weight_format="f32"),
        "keywords": lambda x: OPS.scaled_swiglu(x, scale=x[:, 0], limit=2.0),
    }


@pytest.mark.parametrize("name", modules())
def test_vmap(name):
    torch.manual_seed(0)
    f, xs = modules()[name], batch(ROWS, H)
    with torch.no_grad():
        want = each(f, xs)
        assert torch.equal(torch.vmap(f)(xs), want)
        assert torch.equal(
            torch.vmap(f, in_dims=1, out_dims=1)(xs.transpose(0, 1)), want.transpose(0, 1)
        )
        assert torch.equal(torch.vmap(torch.vmap(f))(xs[None])[0], want)


def test_autograd_goes_through_it():
    f = modules()["experts"]
    grads = []
    for mapped in torch.vmap(f), lambda xs: each(f, xs):
        xs = batch(ROWS, H).requires_grad_()
        mapped(xs).square().sum().backward()
        grads.append(xs.grad)
    assert torch.equal(*grads)


def test_several_results():
    logits = batch(ROWS, 8)
    found = torch.vmap(lambda t: OPS.topk_router(t, 2))(logits)
    for i, t in enumerate(found):
        assert torch.equal(t, each(lambda x, i=i: OPS.topk_router(x, 2)[i], logits))


def test_an_ensemble():
    """Of modules with stacked weights."""
    several, (x, ids, w) = [experts(E, H, I, seed=s) for s in range(3)], routed(E, H)
    parameters, buffers = stack_module_state(several)

    def call(parameters: Any, buffers: Any) -> Tensor:
        return functional_call(several[0], (parameters, buffers), (x, ids, w))

    want = torch.stack([module(x, ids, w) for module in several])
    assert torch.equal(torch.vmap(call)(parameters, buffers), want)


DERIVATIVES = {
    "grad": lambda f, x: func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "of each": lambda f, x: torch.vmap(func.grad(lambda x: f(x).sum()))(x[None]),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "linearize": lambda f, x: func.linearize(f, x),
    "batch": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}


@pytest.mark.parametrize("name", ["experts", "grouped", "product"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_are_refused(name, derivative):
    torch.manual_seed(0)
    expected = "expected (one by autograd|none: derivatives are of reverse mode|a call for each)"
    with pytest.raises(UnsupportedError, match=expected):
        DERIVATIVES[derivative](modules()[name], batch(ROWS, H)[0])


@pytest.mark.parametrize("derivative", ["grad", "vjp", "jvp", "jacrev"])
def test_what_has_no_derivative_is_constant(derivative):
    x = batch(ROWS, H)[0]
    codes, _, decode_scale = OPS.nvfp4_quantize(x)
    results = {
        "codes": lambda x: x * OPS.nvfp4_quantize(x)[0].float().mean(),
        "scales": lambda x: x * OPS.nvfp4_quantize(x)[2],
    }
    factors = {"codes": codes.float().mean(), "scales": decode_scale}
    for name, f in results.items():
        found = DERIVATIVES[derivative](f, x)
        want = DERIVATIVES[derivative](lambda x, name=name: x * factors[name], x)
        if derivative == "vjp":
            (found,), (want,) = (of(torch.ones_like(x)) for _, of in (found, want))
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_no_elements():
    with pytest.raises(UnsupportedError, match="vmap over no elements; expected at least one"):
        torch.vmap(modules()["experts"])(batch(ROWS, H)[:0])


def test_every_operation_has_a_rule():
    for name in (*fusion_moe.definitions.operations.SPECS, "run", "encode_weight"):
        for key in "FuncTorchBatched", "Batched":
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusion_moe::{name}", key)
