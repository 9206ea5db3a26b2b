"""Layers by Transformer Engine's recipes: numbers, gradients, what is saved, and recipes that
change from call to call.
"""

from __future__ import annotations

import copy
import threading
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import fp8_block
import mxfp8
import pytest
import torch
from bad_calls import messages
from cover import few
from fusions import assert_same_bits
from layers import layer, one_by_one, uniform
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from ways import compiled

import fusion_moe
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import GroupedLinear, ScaledClampedQGeGLU, ScaledSwiGLU, Sequential
from fusion_moe.recipe import Float8BlockScaling, MXFP8BlockScaling, Recipe, current

pytestmark = pytest.mark.usefixtures("meaning_without_all")

G, K, N = 4, 64, 96
SIZES, ROWS = (5, 0, 33, 31), 72  # three past the last group
COUNTS = torch.tensor(SIZES)
RECIPES = [
    MXFP8BlockScaling(),
    MXFP8BlockScaling(wgrad="bf16"),
    Float8BlockScaling(),
    Float8BlockScaling(wgrad="bf16"),
    Float8BlockScaling(power_2_scale=False),
]
MX, FP8 = RECIPES[0], RECIPES[2]
BF16 = torch.bfloat16


def linear(seed: int = 1, **how: Any) -> GroupedLinear:
    return layer(G, K, N, seed=seed, **{"bias": False, "dtype": BF16, **how})


def mlp(activation: nn.Module | None = None, **how: Any) -> Sequential:
    return Sequential(
        layer(G, K, 2 * N, **{"bias": False, "dtype": BF16, **how}),
        activation or ScaledSwiGLU(),
        layer(G, N, K, seed=9, **{"bias": False, "dtype": BF16, **how}),
    )


def rows(*shape: int, seed: int = 50) -> Tensor:
    """Of bf16, NaN past the last group."""
    x = uniform(*shape, dtype=BF16, seed=seed)
    x[sum(SIZES) :] = float("nan")
    return x


def step(
    f: Any, model: nn.Module, recipe: Recipe | None, *extra: Tensor, width: int = K
) -> list[Tensor]:
    """The result and all gradients; the backward runs without a recipe."""
    model.zero_grad()
    x = rows(ROWS, width).requires_grad_()
    for t in extra:
        t.grad = None
    with fusion_moe.autocast(recipe=recipe):
        y = f(x, *extra)
    y.backward(rows(*y.shape, seed=51))
    return [
        y,
        x.grad,
        *(t.grad for t in extra if t.requires_grad),
        *(p.grad for p in model.parameters()),
    ]


def near(found: Tensor, want: Tensor, roundings: float = 1) -> None:
    """Within roundings to bf16, of elements of their size and of the usual one."""
    atol = (
        roundings * 2**-8 * float(want.double().square().mean().sqrt()) / 16 if want.numel() else 0
    )
    torch.testing.assert_close(found.double(), want.double(), rtol=roundings * 2**-8, atol=atol)


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("recipe", few(RECIPES, 3))
def test_a_layer(recipe):
    """Against loops in float64, NaN past the last group."""
    module = linear()
    weights = torch.stack(list(module.parameters())).detach()
    y, dx, *dw = step(module, module, recipe, COUNTS)
    operands = rows(ROWS, K), weights, rows(ROWS, N, seed=51), SIZES, recipe.wgrad
    want = (
        fp8_block.products(*operands, recipe.power_2_scale)
        if isinstance(recipe, Float8BlockScaling)
        else mxfp8.products(*operands)
    )
    for found, wanted in zip((y, dx, torch.stack(dw)), want, strict=True):
        near(found, wanted)


CHAINS = {
    "clamped": lambda: mlp(ScaledClampedQGeGLU(16)),
    "one parameter each": lambda: mlp(single_grouped_weight=True),
    "biases": lambda: mlp(bias=True, scale_bias=True, single_grouped_bias=True),
}


def extra_of(model: Sequential) -> list[Tensor]:
    scales = [uniform(ROWS, seed=i, low=0.1).requires_grad_() for i in range(3)]
    biased = model[0].use_bias
    return [COUNTS, *scales[: int(biased)], scales[1], COUNTS, *scales[2 : 2 + int(biased)]]


@pytest.mark.parametrize(("chain", "recipe"), few([*((c, MX) for c in CHAINS), ("biases", FP8)]))
def test_sequential_is_its_modules_one_by_one(chain, recipe):
    """Up to the roundings that fused kernels leave out; 8-bit copies of what differs by one differ
    by more.
    """
    model = CHAINS[chain]()
    extra = extra_of(model)
    with fusion_moe.options.override(contract_rounding=False):
        found, want = (step(f, model, recipe, *extra) for f in (model, partial(one_by_one, model)))
    for a, b in zip(found, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


@fusion_moe.options.override(target="reference")
def test_recipes_from_call_to_call():
    """Each call is by the recipe in force, eager and traced, and its backward by the recipe of its
    forward.
    """
    model = mlp(single_grouped_weight=True)
    extra, turns = extra_of(model), [None, *RECIPES, None, *reversed(RECIPES)]
    want = {recipe: step(model, model, recipe, *extra) for recipe in (None, *RECIPES)}
    for a, b in ((None, MX), (None, FP8), (FP8, RECIPES[4])):
        assert not torch.equal(want[a][0], want[b][0])
    assert not torch.equal(want[MX][-1], want[RECIPES[1]][-1])
    assert not torch.equal(want[FP8][-1], want[RECIPES[3]][-1])
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for f in (model, traced):
        for recipe in turns:
            assert_same(step(f, model, recipe, *extra), want[recipe])


@pytest.mark.usefixtures("call_by_call")
def test_compiled_by_our_backend():
    model = mlp(single_grouped_weight=True)
    f, extra = compiled(model), extra_of(model)
    for recipe in MX, FP8, None:
        found, want = (step(g, model, recipe, *extra) for g in (f, model))
        for a, b in zip(found, want, strict=True):
            assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


def test_inside_of_what_is_compiled():
    module, x = linear(), rows(ROWS, K)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        with fusion_moe.autocast(FP8):
            y = module(x, COUNTS)
        return y, module(x, COUNTS)

    assert_same(list(torch.compile(both, fullgraph=True, backend="eager")(x)), list(both(x)))
    assert current() is None


def test_nested_and_other_threads():
    seen, again = [], fusion_moe.autocast(RECIPES[1])

    def in_another_thread():
        seen.append(current())
        with fusion_moe.autocast(RECIPES[1]), again:
            entered.set()
            left.wait(300)
        seen.append(current())

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=in_another_thread)
    with fusion_moe.autocast(RECIPES[0]):
        with again, again, fusion_moe.autocast(None):
            assert current() is None
            thread.start()
            entered.wait(300)
        assert current() == RECIPES[0]
    assert current() is None
    left.set()
    thread.join()
    assert seen == [None, None]


def of_transformer_engine(name: str = "Float8BlockScaling", **changed: Any) -> Any:
    """A recipe with Transformer Engine's fields. changed: other values of these, with __ for a
    point.
    """
    operand = {"power_2_scale": True, "amax_epsilon": 0.0, "stochastic_rounding": False}
    fields: dict[str, Any] = {
        f"fp8_quant_{of}": SimpleNamespace(**operand)
        for of in ("fwd_inp", "fwd_weight", "bwd_grad")
    }
    fields |= {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
    fields |= {"fp8_format": Enum("Format", "E4M3 HYBRID").E4M3, "backward_override": None}
    recipe = type(name, (SimpleNamespace,), {})(**fields)
    for path, value in changed.items():
        *of, field = path.split("__")
        setattr(getattr(recipe, of[0]) if of else recipe, field, value)
    return recipe


def test_transformer_engines_recipe_by_its_fields():
    with fusion_moe.autocast(of_transformer_engine()):
        assert current() == FP8
    operands = ("fwd_inp", "fwd_weight", "bwd_grad")
    floats = {f"fp8_quant_{of}__power_2_scale": False for of in operands}
    with fusion_moe.autocast(of_transformer_engine(**floats)):
        assert current() == Float8BlockScaling(power_2_scale=False)


def test_refusals(golden):
    """What is no recipe, or none that is computed here; sizes that its blocks do not divide."""
    changed = (
        {"x_block_scaling_dim": 2},
        {"w_block_scaling_dim": 1},
        {"fp8_format": Enum("Format", "HYBRID").HYBRID},
        {"backward_override": "dequantized"},
        {"fp8_quant_fwd_inp__amax_epsilon": 1e-4},
        {"fp8_quant_fwd_inp__power_2_scale": False},
        {"name": "MXFP4QATFloat8BlockScaling"},
    )
    module = layer(G, 48, 64, bias=False, dtype=BF16)
    module(rows(ROWS, 48), COUNTS)
    cases = {
        "a name": lambda: fusion_moe.autocast("mxfp8"),
        "float32": lambda: MXFP8BlockScaling(wgrad="fp32"),
        "another recipe's": lambda: Float8BlockScaling(wgrad="mxfp8"),
        "K": lambda: step(module, module, MX, COUNTS, width=48),
        **{
            f"theirs, {how}": lambda how=how: fusion_moe.autocast(of_transformer_engine(**how))
            for how in changed
        },
    }
    golden(messages(cases))


def test_scales_by_the_environment(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert not Float8BlockScaling().power_2_scale
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    assert Float8BlockScaling().power_2_scale


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_main_grad_and_delayed(recipe, delayed):
    """main_grad gets the float32 sums of what .grad is the rounding of, at once or later."""
    usual = mlp(single_grouped_weight=True)
    model = mlp(
        single_grouped_weight=True, accumulate_into_main_grad=True, delay_wgrad_compute=delayed
    )
    extra = extra_of(usual)
    for p in model.parameters():
        p.main_grad = torch.full(p.shape, 0.5)
    step(model, model, recipe, *extra)
    if delayed:
        assert all((p.main_grad == 0.5).all() for p in model.parameters())
        model[2].backward_dw()
        model[0].backward_dw()
    want = step(usual, usual, recipe, *extra)[3:]
    for p, grad in zip(model.parameters(), want, strict=True):
        near(p.main_grad - 0.5, grad.float(), 1.5)


@pytest.mark.parametrize(
    ("recipe", "scale", "weights"),
    [
        (MX, "f8e8m0[7, {}]", []),
        (
            FP8,
            "f32[5, {}]",
            [
                f"f8e4m3[{G}, {K}, {2 * N}]",  # transposed
                f"f8e8m0[{G}, {K}, 2]",
                f"f8e4m3[{G}, {K}, {N}]",
                f"f8e8m0[{G}, {K}, 1]",
            ],
        ),
    ],
)
def test_what_is_saved(recipe, scale, weights):
    """8-bit copies of what both products read, and of weights where the backward reads the same
    ones; of bf16 the pre-activation alone, which the derivative of SwiGLU reads.
    """
    model = mlp(single_grouped_weight=True)
    extra = extra_of(model)

    def f(x: Tensor) -> Tensor:
        with fusion_moe.autocast(recipe):
            return model(x, *extra)

    report = fusion_moe.explain(f, rows(ROWS, K).requires_grad_(), backward=True)
    assert sorted(x.type for x in report.saved if x.made_by.startswith("fusion")) == sorted(
        [
            f"bf16[{ROWS}, {2 * N}]",
            f"f8e4m3[{ROWS}, {K}]",
            f"f8e4m3[{ROWS}, {N}]",
            scale.format(K),
            scale.format(N),
            *weights,
        ]
    )
    assert "args[0]" not in [x.name for x in report.saved]
    assert "fidelity, not speed" in " ".join(report.details().split())


@pytest.mark.parametrize("recipe", few(RECIPES, 2))
def test_the_input_itself_is_saved(recipe):
    """In place of copies in 8 bits, from which come the same bits: less is stored, since the input
    and what SwiGLU's derivative reads are there anyway.
    """
    found, types, stored = [], [], []
    for original in (False, True):
        model, kept = mlp(single_grouped_weight=True, save_original_input=original), list[Tensor]()
        extra = extra_of(model)
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            found.append(step(model, model, recipe, *extra))
        types.append({(t.dtype, *t.shape) for t in kept})
        stored.append(sum(t.nbytes for t in kept if t.shape != (ROWS, K) or t.dtype != BF16))
    assert_same_bits(*found)
    copies = {(torch.float8_e4m3fn, ROWS, width) for width in (K, N)}
    if recipe.wgrad == "bf16":
        assert types[0] == types[1]
        return
    assert types[0] >= copies
    assert types[1].isdisjoint(copies)
    assert (BF16, ROWS, K) in types[1] - types[0]
    assert stored[0] - stored[1] > ROWS * (K + N)  # a byte each, and scales


@pytest.mark.judges("torchao")
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_by_torchao(recipe):
    """Its emulated grouped product, whose blocks cross groups unless 32 divides their sizes."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    sizes = torch.tensor([32, 0, 96, 64])
    module, total = linear(), int(sizes.sum())
    x, dy = (uniform(total, n, dtype=BF16, seed=n).requires_grad_() for n in (K, N))
    weights = torch.stack(list(module.parameters())).detach().requires_grad_()
    theirs = _to_mxfp8_then_scaled_grouped_mm(
        x,
        weights.transpose(-2, -1),
        offs=sizes.cumsum(0, dtype=torch.int32),
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=recipe.wgrad == "bf16",
    )
    theirs.backward(dy.detach())
    want = [theirs.detach(), x.grad, weights.grad]
    x.grad = None
    with fusion_moe.autocast(recipe):
        y = module(x, sizes)
    y.backward(dy.detach())
    for found, wanted in zip(
        (y, x.grad, torch.stack([p.grad for p in module.parameters()])), want, strict=True
    ):
        near(found, wanted, 2)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("power_2_scale", [False, True])
def test_weights_that_are_quantized_once(single, power_2_scale):
    """Later calls read the copies of the first one, whose bits are those of a call without them,
    at the same addresses, and still give weights their gradients.
    """
    model = mlp(single_grouped_weight=single)
    extra, recipe = extra_of(model), Float8BlockScaling(power_2_scale=power_2_scale)

    def of(first: bool | None) -> list[Tensor]:
        return step(partial(model, is_first_microbatch=first), model, recipe, *extra)

    want = of(None)
    assert_same(of(True), want)
    addresses = [p.data_ptr() for p in model[0].held._parts]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-2)
    assert_same(of(False), want)
    other = of(True)
    assert_same(other, of(None))
    assert not torch.equal(other[0], want[0])
    assert [p.data_ptr() for p in model[0].held._parts] == addresses


def test_quantized_weights_that_are_not_there():
    module, x = linear(), rows(ROWS, K)
    with fusion_moe.autocast(FP8):
        with pytest.raises(UnsupportedError, match="is_first_microbatch=False; expected quantized"):
            module(x, COUNTS, is_first_microbatch=False)
        y = module(x, COUNTS, is_first_microbatch=True)
        copied = copy.deepcopy(module)
        with pytest.raises(UnsupportedError, match="pass True in the first call"):
            copied(x, COUNTS, is_first_microbatch=False)
        assert not any("held" in key for key in module.state_dict())
        assert torch.equal(module(x, COUNTS, is_first_microbatch=False), y)
    with (
        fusion_moe.autocast(Float8BlockScaling(power_2_scale=False)),
        pytest.raises(UnsupportedError),
    ):
        module(x, COUNTS, is_first_microbatch=False)
    # without the recipe there is nothing to hold
    assert torch.equal(module(x, COUNTS, is_first_microbatch=False), module(x, COUNTS))


def test_main_grad_and_delayed_with_quantized_weights():
    model = mlp(
        single_grouped_weight=True, accumulate_into_main_grad=True, delay_wgrad_compute=True
    )
    extra, grads = extra_of(model), []
    for p in model.parameters():
        p.main_grad = torch.zeros(p.shape)
    for first in (True, False):
        step(partial(model, is_first_microbatch=first), model, FP8, *extra)
        model[2].backward_dw()
        model[0].backward_dw()
        grads.append([p.main_grad.clone() for p in model.parameters()])
    for once, twice in zip(*grads, strict=True):
        torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("use_reentrant", few([False, True]))
def test_checkpoints(use_reentrant):
    """With the recipe inside of what is recomputed. Without a graph kernels leave out a rounding of
    the result.
    """
    model = mlp(single_grouped_weight=True)
    extra = extra_of(model)

    def by_fp8(x: Tensor, *extra: Tensor) -> Tensor:
        with fusion_moe.autocast(FP8):
            return model(x, *extra, is_first_microbatch=True)

    def saved(x: Tensor, *extra: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(by_fp8, x, *extra, use_reentrant=use_reentrant)

    first = int(use_reentrant)
    found, want = (step(f, model, None, *extra)[first:] for f in (saved, by_fp8))
    assert_same(found, want)


@pytest.mark.parametrize("recipe", RECIPES[2:])
def test_what_is_not_finite(recipe):
    """NaN and infinity in a row are NaN in its result, and in the weights' gradients of its group;
    no other row, and no other group, has them.
    """
    module = linear()
    for bad in (float("nan"), float("inf")):
        x = rows(ROWS, K)
        x[6, 3] = bad  # of group 2
        x.requires_grad_()
        with fusion_moe.autocast(recipe=recipe):
            y = module(x, COUNTS)
        y.backward(rows(*y.shape, seed=51))
        assert y[6].isnan().all()
        assert torch.cat([y[:6], y[7:]]).isfinite().all()
        assert x.grad.isfinite().all()
        dw = [p.grad for p in module.parameters()]
        assert not dw[2].isfinite().all()
        assert all(dw[g].isfinite().all() for g in (0, 1, 3))
        module.zero_grad()
