"""Where gradients of GroupedLinear go: main_grad, and backward_dw."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product

import pytest
import torch
from fusions import assert_same_bits
from layers import (
    BOTH,
    COUNTS,
    ROWS,
    SIZES,
    G,
    K,
    N,
    assert_near,
    gradients,
    layer,
    linear,
    stacked,
    uniform,
    wide,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fusion_moe import options
from fusion_moe.errors import DeviceError, DtypeError, ShapeError, UnsupportedError
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
    with pytest.raises(UnsupportedError) as e:
        torch.autograd.grad(module(x, COUNTS).square().sum(), x, create_graph=True)
    assert str(e.value) == (
        "backward: create_graph=True; expected a backward without a graph, since gradients are "
        "written to main_grad; "
        "leave it out, or leave out accumulate_into_main_grad"
    )
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
    how = {
        "accumulate_into_main_grad": True,
        "single_grouped_weight": single,
        "delay_wgrad_compute": delayed,
    }
    module = with_main_grad(layer(G, K, N, **how), float("nan"))
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


@pytest.mark.parametrize(
    "how", ["apart", "one frozen", "one written over", "two dtypes", "get_main_grad"]
)
def test_main_grads_that_are_not_one_tensor(how):
    want, _ = plain()
    module = with_main_grad(layer(G, K, N, accumulate_into_main_grad=True), together=how != "apart")
    expected = [0.5 + grad for grad in gradients(want, "weight")]
    two = module.weight2
    if how == "one frozen":
        two.requires_grad_(False)
        expected[2] = torch.full((N, K), 0.5)
    elif how == "one written over":
        two.overwrite_main_grad = True
        expected[2] = gradients(want, "weight")[2]
    elif how == "two dtypes":
        two.main_grad = two.main_grad.bfloat16()
        expected[2] = expected[2].bfloat16()
    elif how == "get_main_grad":
        kept = two.main_grad
        two.main_grad, two.get_main_grad = None, lambda: kept
    module(rows(), COUNTS).backward(dy())
    assert_same_bits(
        [
            getattr(p, "main_grad", None) if p.main_grad is not None else p.get_main_grad()
            for p in weights(module)
        ],
        expected,
    )
    assert two.grad_added_to_main_grad == (how != "one frozen")
    assert (two.grad is None) == (how == "one frozen")


def test_steps_add_up():
    module, want = (
        with_main_grad(layer(G, K, N, accumulate_into_main_grad=True), 0.0),
        layer(G, K, N),
    )
    for seed in range(3):
        module(rows(seed=seed), COUNTS).backward(dy(seed=seed))
        want(rows(seed=seed), COUNTS).backward(dy(seed=seed))
    for found, expected in zip(main_grads(module), gradients(want, "weight"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_without_gradients_main_grad_is_not_asked_for():
    module = layer(G, K, N, accumulate_into_main_grad=True)
    with torch.no_grad():
        module(rows(), COUNTS)
    module.requires_grad_(False)
    module(rows(), COUNTS).sum().backward()


def test_bad_main_grads(golden):
    def broken(**main) -> GroupedLinear:
        module = with_main_grad(layer(G, K, N, accumulate_into_main_grad=True))
        for key, value in main.items():
            setattr(module.weight2, key, value)
        return module

    cases = {
        "none": layer(G, K, N, accumulate_into_main_grad=True),
        "none of one": broken(main_grad=None),
        "another shape": broken(main_grad=torch.zeros(K, N)),
        "another dtype": broken(main_grad=torch.zeros(N, K).half()),
        "elsewhere": broken(main_grad=torch.zeros(N, K, device="meta")),
    }
    said = []
    for what, module in cases.items():
        with pytest.raises((ShapeError, DtypeError, DeviceError)) as caught:
            module(rows(), COUNTS)
        said.append(f"{what}\n    {caught.value}")
    golden("\n".join(said))


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


def test_tied_weights():
    """Two modules of the same parameters: each adds its part."""
    module, other, want = (
        layer(G, K, K, delay_wgrad_compute=True),
        layer(G, K, K, delay_wgrad_compute=True),
        layer(G, K, K),
    )
    for key, p in module.named_parameters():
        other.register_parameter(key, p)
    ends = COUNTS.cumsum(0, dtype=torch.int32)
    other(module(rows(), offs=ends), offs=ends).square().sum().backward()
    want(want(rows(), offs=ends), offs=ends).square().sum().backward()
    other.backward_dw()
    module.backward_dw()
    for found, expected in zip(gradients(module, "weight"), gradients(want, "weight"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_hooks_run_once_for_each_call():
    module, seen = layer(G, K, N, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append([p.grad is not None for p in weights(module)])
    )
    for seed in range(2):
        module(rows(seed=seed), COUNTS).backward(dy())
    assert seen == []
    for count in (1, 2):
        module.backward_dw()
        assert seen == [[True] * G] * count


def test_what_was_saved_is_freed():
    module, x = layer(G, K, N, delay_wgrad_compute=True), uniform(ROWS, K)
    module(x, COUNTS).backward(dy())
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is not None
    module.backward_dw()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("which", ["input", "gradient", "ends"])
def test_reused_buffers_are_refused(which):
    """As autograd refuses them, for what waits."""
    module, x, grad, ends = (
        layer(G, K, N, delay_wgrad_compute=True),
        rows().detach(),
        dy(),
        COUNTS.cumsum(0, dtype=torch.int32),
    )
    for _ in range(2):
        module(x, offs=ends).backward(grad)
    module.backward_dw()
    before = [p.grad.clone() for p in weights(module)]
    {"input": x, "gradient": grad, "ends": ends}[which].add_(0)
    what = {"input": f"f32[{ROWS}, {K}]", "gradient": f"f32[{ROWS}, {N}]", "ends": f"i32[{G}]"}[
        which
    ]
    with pytest.raises(UnsupportedError) as e:
        module.backward_dw()
    assert str(e.value) == (
        f"GroupedLinear: {what} was written in place after the backward: version 1, not 0; "
        "expected inputs and gradients as the backward found them; call backward_dw before their "
        "memory is used again"
    )
    assert_same_bits([p.grad for p in weights(module)], before)


def test_inference_tensors_have_no_versions():
    module, want = layer(G, K, N, bias=False, delay_wgrad_compute=True), layer(G, K, N, bias=False)
    with torch.inference_mode():
        grad = dy().clone()
    for m in (module, want):
        m(rows().detach(), COUNTS).backward(grad)
    module.backward_dw()
    assert_same_bits(gradients(module, "weight"), gradients(want, "weight"))


def test_nothing_but_weights():
    module, want = layer(G, K, N, bias=False, delay_wgrad_compute=True), layer(G, K, N, bias=False)
    for m in (module, want):
        m(rows().detach(), COUNTS).backward(dy())
    module.backward_dw()
    assert_same_bits(gradients(module, "weight"), gradients(want, "weight"))


def test_a_frozen_weight_waits_for_nothing():
    module = layer(G, K, N, delay_wgrad_compute=True)
    for p in weights(module):
        p.requires_grad_(False)
    module(rows(), COUNTS).backward(dy())
    assert all(b is not None for b in gradients(module, "bias"))
    with pytest.raises(UnsupportedError):
        module.backward_dw()


def test_a_copy_waits_for_nothing():
    module = layer(G, K, N, delay_wgrad_compute=True)
    module(rows(), COUNTS).backward(dy())
    other = copy.deepcopy(module)
    assert all(p.skip_backward_post_hook for p in weights(other))
    with pytest.raises(UnsupportedError):
        other.backward_dw()
    module.backward_dw()


@pytest.mark.parametrize("delayed", BOTH)
def test_compiled_with_a_break(delayed):
    """Calls that write leave the graph; they do the same."""
    results = []
    for compile_ in BOTH:
        module = with_main_grad(
            layer(G, K, N, accumulate_into_main_grad=True, delay_wgrad_compute=delayed)
        )
        x, out = rows(), torch.zeros(ROWS, N)
        torch._dynamo.reset()
        run = torch.compile(module, backend="aot_eager") if compile_ else module
        run(x * 2, COUNTS, out=out).backward(dy())
        if delayed:
            module.backward_dw()
        results.append([out, x.grad, *main_grads(module), *gradients(module, "bias")])
    assert_same_bits(*results)


# In a Sequential ----------------------------------------------------------------------------------


@pytest.mark.parametrize("delayed", [(), (0,), (1,), (0, 1)])
def test_an_expert_mlp(delayed):
    """Both layers with main_grad, some of them delayed: as each by a loop in float64."""
    how = [
        {"accumulate_into_main_grad": True, "delay_wgrad_compute": i in delayed} for i in range(2)
    ]
    up, down = layer(G, K, 2 * N, **how[0]), layer(G, N, K, scale_bias=True, seed=20, **how[1])
    model, x, scales = (
        Sequential(with_main_grad(up), ScaledSwiGLU(), with_main_grad(down)),
        rows(),
        uniform(ROWS, seed=4).requires_grad_(),
    )
    y = model(x, COUNTS, scales, COUNTS, scales)
    out = uniform(ROWS, K, seed=5)
    y.backward(out)
    for i in delayed:
        (up, down)[i].backward_dw()
    other, factor = wide(x), wide(scales)
    params = [[stacked(module, name) for name in ("weight", "bias")] for module in (up, down)]
    inner = linear(other, *params[0], SIZES)
    gate, linear_ = inner.chunk(2, -1)
    want = linear(
        torch.nn.functional.silu(gate) * linear_ * factor[:, None], *params[1], SIZES, factor
    )
    want.backward(out.double())
    assert_near(y, want, torch.float32)
    assert_near(x.grad, other.grad, torch.float32)
    assert_near(scales.grad, factor.grad, torch.float32, 4)
    for module, (weight, bias) in zip((up, down), params, strict=True):
        assert_near(torch.stack(main_grads(module)), 0.5 + weight.grad, torch.float32)
        assert_near(torch.stack(gradients(module, "bias")), bias.grad, torch.float32)


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
    module = with_main_grad(layer(G, K, K, accumulate_into_main_grad=True), 0.0)
    want = layer(G, K, K)
    Sequential(module, module)(rows(), COUNTS, COUNTS).square().sum().backward()
    want(want(rows(), COUNTS), COUNTS).square().sum().backward()
    for found, expected in zip(main_grads(module), gradients(want, "weight"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_compiled_autograd_does_not_trace_what_writes():
    """It runs the backward between two graphs: only those are traced."""
    from torch._dynamo import compiled_autograd
    from torch._dynamo.utils import counters

    want, _ = plain()
    module, x = layer(G, K, N, delay_wgrad_compute=True), rows()
    counters.clear()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        module(x, COUNTS).backward(dy())
    assert counters["frames"]["total"] < 10
    module.backward_dw()
    for found, p in zip(weights(module), weights(want), strict=True):
        assert_same_bits(found.grad, p.grad)
