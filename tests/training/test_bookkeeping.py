"""Where gradients of GroupedLinear go: main_grad, and backward_dw."""

from __future__ import annotations

import copy
import re
import weakref
from itertools import product

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits
from layers import (
    BOTH,
    COUNTS,
    ROWS,
    SIZES,
    G,
    K,
    N,
    gradients,
    layer,
    uniform,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fusion_moe import options
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import GroupedLinear, ScaledSwiGLU, Sequential

pytestmark = pytest.mark.usefixtures("meaning")


def halves(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Small multiples of 1/2, whose sums of products are exact in any order."""
    return (torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed)) / 2).to(
        dtype
    )


def rows(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return halves(ROWS, K, dtype=dtype, seed=seed).requires_grad_()


def dy(dtype: torch.dtype = torch.float32, seed: int = 8) -> Tensor:
    return halves(ROWS, N, dtype=dtype, seed=seed)


def weights(module: GroupedLinear) -> list[nn.Parameter]:
    return [getattr(module, key) for key in module.keys("weight")]


def with_main_grad(
    module: GroupedLinear,
    value: float = 0.5,
    dtype: torch.dtype = torch.float32,
    together: bool = True,
) -> GroupedLinear:
    """Each weight with a main_grad, neighbours in one buffer or apart."""
    params = weights(module)
    buffer = torch.full((len(params), *params[0].shape), value, dtype=dtype)
    for p, main in zip(params, buffer if together else [t.clone() for t in buffer], strict=True):
        p.main_grad, p.grad_added_to_main_grad = main, False
    return module


def main_grads(module: GroupedLinear) -> list[Tensor]:
    found = [p.main_grad for p in weights(module)]
    return list(found[0]) if module.single["weight"] else found


def plain(dtype: torch.dtype = torch.float32, seed: int = 0, **how) -> tuple[GroupedLinear, Tensor]:
    """The module without bookkeeping after a backward, and its x."""
    module, x = layer(G, K, N, dtype=dtype, **how), rows(dtype, seed)
    module(x, COUNTS).backward(dy(dtype))
    return module, x


# main_grad ----------------------------------------------------------------------------------------

FORMS = list(product([torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16], BOTH, BOTH))


@pytest.mark.parametrize(("dtype", "main", "single", "delayed"), FORMS)
def test_main_grad_gets_the_sums(dtype, main, single, delayed):
    """What was there plus the sums in float32, rounded once; everything else as without."""
    want, other = plain(dtype, single_grouped_weight=single)
    how = {
        "accumulate_into_main_grad": True,
        "single_grouped_weight": single,
        "delay_wgrad_compute": delayed,
    }
    module, x = with_main_grad(layer(G, K, N, dtype=dtype, **how), dtype=main), rows(dtype)
    module(x, COUNTS).backward(dy(dtype))
    if delayed:
        assert all((m == 0.5).all() for m in main_grads(module))
        module.backward_dw()
    sums, row = [], 0
    for size in SIZES:
        part = slice(row, row + size)
        sums.append(dy(dtype)[part].float().T @ x.detach()[part].float())
        row += size
    assert_same_bits(main_grads(module), [(0.5 + s).to(main) for s in sums])
    assert_same_bits([x.grad, *gradients(module, "bias")], [other.grad, *gradients(want, "bias")])
    for p in weights(module):
        assert p.grad_added_to_main_grad
        assert (p.grad is None) == delayed
        assert delayed or p.grad.shape == p.shape


@pytest.mark.parametrize("delayed", BOTH)
def test_main_grad_has_no_second_derivative(delayed):
    module = with_main_grad(
        layer(G, K, N, accumulate_into_main_grad=True, delay_wgrad_compute=delayed)
    )
    x = rows()
    with pytest.raises(UnsupportedError, match="backward: create_graph=True; expected a backward"):
        torch.autograd.grad(module(x, COUNTS).square().sum(), x, create_graph=True)
    assert all((m == 0.5).all() for m in main_grads(module))


def test_kernels_of_main_grad():
    with options.override(target="auto"):
        test_main_grad_gets_the_sums(torch.bfloat16, torch.float32, False, False)
        test_each_product_runs_once((0,))


@pytest.mark.parametrize(("single", "zeros", "delayed"), list(product(BOTH, BOTH, BOTH)))
def test_main_grad_is_written_over(single, zeros, delayed):
    """NaN becomes the gradient; whether something is returned for hooks does not depend on what was
    there before.
    """
    want, _ = plain(single_grouped_weight=single)
    how = {"single_grouped_weight": single, "delay_wgrad_compute": delayed}
    module = layer(G, K, N, accumulate_into_main_grad=True, **how)
    with_main_grad(module, float("nan"))
    for p in weights(module):
        p.overwrite_main_grad, p.zero_out_wgrad = True, zeros
    module(rows(), COUNTS).backward(dy())
    if delayed:
        module.backward_dw()
    assert_same_bits(main_grads(module), gradients(want, "weight"))
    for p in weights(module):
        assert p.grad_added_to_main_grad
        assert (p.grad is None) == delayed
        assert delayed or not zeros or not p.grad.any()


def test_hooks_of_autograd_run_once():
    """With a gradient for those that ask where it went; else there is none."""
    module, seen = with_main_grad(layer(G, K, N, accumulate_into_main_grad=True)), []
    del module.weight1.grad_added_to_main_grad
    for g, p in enumerate(weights(module)):
        p.register_post_accumulate_grad_hook(lambda p, g=g: seen.append((g, p.grad is not None)))
    module(rows(), COUNTS).backward(dy())
    assert sorted(seen) == [(0, True), (1, False), (2, True), (3, True)]
    assert module.weight1.grad is None
    assert_same_bits([module.weight1.main_grad], [torch.full((N, K), 0.5)])  # its group is empty


def asked_for(p):
    kept, p.main_grad = p.main_grad, None
    p.get_main_grad = lambda: kept


APART = {
    "apart": (lambda p: None, lambda grad: 0.5 + grad),
    "one frozen": (lambda p: p.requires_grad_(False), lambda grad: torch.full((N, K), 0.5)),
    "one written over": (lambda p: setattr(p, "overwrite_main_grad", True), lambda grad: grad),
    "two dtypes": (
        lambda p: setattr(p, "main_grad", p.main_grad.bfloat16()),
        lambda grad: (0.5 + grad).bfloat16(),
    ),
    "get_main_grad": (asked_for, lambda grad: 0.5 + grad),
}


@pytest.mark.parametrize("how", APART)
def test_main_grads_that_are_not_one_tensor(how):
    want, _ = plain()
    change, expected = APART[how]
    module = with_main_grad(layer(G, K, N, accumulate_into_main_grad=True), together=how != "apart")
    change(module.weight2)
    module(rows(), COUNTS).backward(dy())
    grads = gradients(want, "weight")
    sums = [expected(grad) if g == 2 else 0.5 + grad for g, grad in enumerate(grads)]
    found = [p.get_main_grad() if p.main_grad is None else p.main_grad for p in weights(module)]
    assert_same_bits(found, sums)
    assert module.weight2.grad_added_to_main_grad == (how != "one frozen")
    assert (module.weight2.grad is None) == (how == "one frozen")


def test_without_gradients_main_grad_is_not_asked_for():
    module = layer(G, K, N, accumulate_into_main_grad=True)
    with torch.no_grad():
        module(rows(), COUNTS)
    module.requires_grad_(False)
    module(rows(), COUNTS).sum().backward()


def test_bad_main_grads(golden):
    def call(**main):
        module = with_main_grad(layer(G, K, N, accumulate_into_main_grad=True))
        for key, value in main.items():
            setattr(module.weight2, key, value)
        return lambda: module(rows(), COUNTS)

    cases = {
        "none": lambda: layer(G, K, N, accumulate_into_main_grad=True)(rows(), COUNTS),
        "none of one": call(main_grad=None),
        "another shape": call(main_grad=torch.zeros(K, N)),
        "another dtype": call(main_grad=torch.zeros(N, K).half()),
        "elsewhere": call(main_grad=torch.zeros(N, K, device="meta")),
    }
    golden(messages(cases))


# backward_dw --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("single", "scaled"), list(product(BOTH, BOTH)))
def test_delayed_gradients_are_the_same(single, scaled):
    how = {"single_grouped_weight": single, "scale_bias": scaled}
    results = []
    for delayed in BOTH:
        module, x = layer(G, K, N, delay_wgrad_compute=delayed, **how), rows()
        scales = uniform(ROWS, seed=4).requires_grad_()
        module(x, COUNTS, *([scales] if scaled else [])).backward(dy())
        if delayed:
            assert gradients(module, "weight") == [None] * G
            assert all(p.skip_backward_post_hook for p in weights(module))
            module.backward_dw()
        results.append(
            [
                x.grad,
                *gradients(module, "weight"),
                *gradients(module, "bias"),
                *([scales.grad] if scaled else []),
            ]
        )
    assert_same_bits(*results)


def test_oldest_first_and_accumulated():
    """Two uses before the first backward_dw, and one after: the sum of all."""
    module, want = layer(G, K, N, delay_wgrad_compute=True), layer(G, K, N)
    first, second = (module(rows(seed=seed), COUNTS) for seed in (0, 1))
    second.backward(dy(seed=1))
    first.backward(dy(seed=0))
    for seed in (1, 0):  # in the order of the backwards
        want(rows(seed=seed), COUNTS).backward(dy(seed=seed))
        module.backward_dw()
        assert_same_bits(gradients(module, "weight"), gradients(want, "weight"))
    with pytest.raises(UnsupportedError, match="nothing to do"):
        module.backward_dw()


def test_hooks_run_once_for_each_call():
    module, seen = layer(G, K, N, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append([p.grad is not None for p in weights(module)])
    )
    module(rows(), COUNTS).backward(dy())
    assert seen == []
    module.backward_dw()
    assert seen == [[True] * G]


def test_what_was_saved_is_freed():
    module, x = layer(G, K, N, delay_wgrad_compute=True), uniform(ROWS, K)
    module(x, COUNTS).backward(dy())
    alive = weakref.ref(x)
    del x
    assert alive() is not None
    module.backward_dw()
    assert alive() is None


@pytest.mark.parametrize("which", ["f32[17, 24]", "f32[17, 40]", "i32[4]"])
def test_reused_buffers_are_refused(which):
    """The input, the gradient or the ends: as autograd refuses them, for what waits."""
    module, ends = layer(G, K, N, delay_wgrad_compute=True), COUNTS.cumsum(0, dtype=torch.int32)
    tensors = {"f32[17, 24]": rows().detach(), "f32[17, 40]": dy(), "i32[4]": ends}
    x, grad, _ = tensors.values()
    for _ in range(2):
        module(x, offs=ends).backward(grad)
    module.backward_dw()
    before = [p.grad.clone() for p in weights(module)]
    tensors[which].add_(0)
    says = (
        f"GroupedLinear: {which} was written in place after the backward: version 1, not 0; "
        "expected inputs and gradients as the backward found them; call backward_dw before their "
        "memory is used again"
    )
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        module.backward_dw()
    assert_same_bits([p.grad for p in weights(module)], before)


@pytest.mark.parametrize("inference", BOTH)
def test_nothing_but_weights(inference):
    """Of a gradient that counts its versions, or of an inference tensor, which does not."""
    module, want = (
        layer(G, K, N, bias=False, delay_wgrad_compute=delay) for delay in (True, False)
    )
    with torch.inference_mode(inference):
        grad = dy().clone()
    for m in (module, want):
        m(rows().detach(), COUNTS).backward(grad)
    module.backward_dw()
    assert_same_bits(gradients(module, "weight"), gradients(want, "weight"))


def test_what_waits_for_nothing():
    """A frozen weight, and a copy of a module whose backward waits."""
    frozen, module = (layer(G, K, N, delay_wgrad_compute=True) for _ in range(2))
    for p in weights(frozen):
        p.requires_grad_(False)
    for m in (frozen, module):
        m(rows(), COUNTS).backward(dy())
    assert all(b is not None for b in gradients(frozen, "bias"))
    other = copy.deepcopy(module)
    assert all(p.skip_backward_post_hook for p in weights(other))
    for m in (frozen, other):
        with pytest.raises(UnsupportedError):
            m.backward_dw()
    module.backward_dw()


def test_compiled_with_a_break():
    """Calls that write leave the graph; they do the same."""
    results = []
    for compile_ in BOTH:
        module = with_main_grad(
            layer(G, K, N, accumulate_into_main_grad=True, delay_wgrad_compute=True)
        )
        x, out = rows(), torch.zeros(ROWS, N)
        torch._dynamo.reset()
        run = torch.compile(module, backend="eager") if compile_ else module
        run(x * 2, COUNTS, out=out).backward(dy())
        module.backward_dw()
        results.append([out, x.grad, *main_grads(module), *gradients(module, "bias")])
    assert_same_bits(*results)


# In a Sequential ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delayed", [(), (0,), (1,), (0, 1)])
def test_an_expert_mlp(delayed):
    """Both layers with main_grad, some of them delayed: the gradients that they have without."""
    results = []
    for main in BOTH:
        up, down = (
            layer(
                G,
                *sizes,
                scale_bias=True,
                accumulate_into_main_grad=main,
                delay_wgrad_compute=main and i in delayed,
            )
            for i, sizes in enumerate(((K, 2 * N), (N, K)))
        )
        layers = [with_main_grad(m) if main else m for m in (up, down)]
        x, scales = rows(), uniform(ROWS, seed=4).requires_grad_()
        y = Sequential(up, ScaledSwiGLU(), down)(x, COUNTS, scales, scales, COUNTS, scales)
        y.backward(uniform(ROWS, K, seed=5))
        for i in delayed if main else ():
            layers[i].backward_dw()
        of_weights = [g for m in layers for g in (main_grads if main else plus_half)(m)]
        of_biases = [g for m in layers for g in gradients(m, "bias")]
        results.append([y, x.grad, scales.grad, *of_biases, *of_weights])
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def plus_half(module: GroupedLinear) -> list[Tensor]:
    return [0.5 + grad for grad in gradients(module, "weight")]


@pytest.mark.parametrize("delayed", [(), (0,), (0, 1)])
def test_each_product_runs_once(delayed):
    """Forward, backward and what waits: three products of each layer, one of which waits."""
    up, down = (
        layer(G, k, n, delay_wgrad_compute=i in delayed)
        for i, (k, n) in enumerate(((K, 2 * N), (N, K)))
    )
    model, x = Sequential(up, ScaledSwiGLU(), down), rows()
    each = {0: 2 * ROWS * K * 2 * N, 1: 2 * ROWS * N * K}
    with FlopCounterMode(display=False) as counter:
        y = model(x, COUNTS, uniform(ROWS), COUNTS)
    assert counter.get_total_flops() == sum(each.values())
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 2 * sum(each.values()) - sum(each[i] for i in delayed)
    for i in delayed:
        with FlopCounterMode(display=False) as counter:
            (up, down)[i].backward_dw()
        assert counter.get_total_flops() == each[i]


def test_a_layer_that_is_used_twice():
    """In one program, or in two with its parameters in two modules: the sum of both parts."""
    how = [{"accumulate_into_main_grad": True}, *[{"delay_wgrad_compute": True}] * 2, {}]
    twice, module, other, want = (layer(G, K, K, **some) for some in how)
    with_main_grad(twice, 0.0)
    for key, p in module.named_parameters():
        other.register_parameter(key, p)
    Sequential(twice, twice)(rows(), COUNTS, COUNTS).square().sum().backward()
    for first, second in (module, other), (want, want):
        second(first(rows(), COUNTS), COUNTS).square().sum().backward()
    other.backward_dw()
    module.backward_dw()
    for found in main_grads(twice), gradients(module, "weight"):
        for grad, expected in zip(found, gradients(want, "weight"), strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)
