"""Sequential: results and gradients are those of its modules called one by one; which programs
run.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits
from layers import assert_near, glu, layer, linear, one_by_one, stacked, uniform, wide
from torch import Tensor, nn
from torch.nn.utils import prune
from ways import Called, compiled

from fusion_moe import options
from fusion_moe.nn import GroupedLinear, ScaledClampedQGeGLU, ScaledSwiGLU, Sequential

G, H, I = 3, 24, 16
SIZES = (5, 0, 6)
ROWS = 13
COUNTS, OTHER = torch.tensor(SIZES), torch.tensor([2, 7, 2])


def up(**how: Any) -> GroupedLinear:
    return layer(G, H, 2 * I, **how)


def down(**how: Any) -> GroupedLinear:
    return layer(G, I, H, seed=9, **how)


CHAINS = {
    "an MLP": lambda: [up(), ScaledSwiGLU(), down(scale_bias=True)],
    "interleaved": lambda: [up(), ScaledSwiGLU(8), down()],
    "clamped": lambda: [up(bias=False), ScaledClampedQGeGLU(), down(bias=False)],
    "one parameter each": lambda: [
        up(single_grouped_weight=True),
        ScaledSwiGLU(),
        down(single_grouped_weight=True),
    ],
    "between others": lambda: [nn.Linear(H, H), up(), ScaledSwiGLU(), down(), nn.Tanh()],
    "twice in a row": lambda: [up(), ScaledSwiGLU(), down(), up(seed=20), ScaledSwiGLU(), down()],
    "behind a layer": lambda: [layer(G, H, H, seed=30), up(), ScaledSwiGLU(), down()],
    "a longer chain": lambda: [
        up(),
        ScaledSwiGLU(),
        layer(G, I, 2 * I, seed=40),
        ScaledSwiGLU(),
        down(),
    ],
    "an activation first": lambda: [ScaledSwiGLU(), layer(G, H // 2, H)],
    "others in the middle": lambda: [up(), nn.Tanh(), ScaledSwiGLU(), nn.Identity(), down()],
}


def operands(model: Sequential, splits: tuple[Tensor, ...] = (COUNTS,)) -> list[Tensor]:
    """What the modules take beside x: splits in turns, scales of their own."""
    found: list[Tensor] = []
    layers = 0
    for seed, module in enumerate(model):
        if isinstance(module, GroupedLinear):
            found.append(splits[layers % len(splits)])
            layers += 1
        if isinstance(module, (ScaledSwiGLU, ScaledClampedQGeGLU)) or getattr(
            module, "scale_bias", False
        ):
            found.append(uniform(ROWS, seed=seed, low=0.1).requires_grad_())
    return found


def step(
    f: Any,
    model: Sequential,
    dtype: torch.dtype = torch.float32,
    splits: tuple[Tensor, ...] = (COUNTS,),
) -> list[Tensor]:
    """The result, and all gradients."""
    model.zero_grad()
    x, extra = uniform(ROWS, H, dtype=dtype, seed=50).requires_grad_(), operands(model, splits)
    y = f(x, *extra)
    y.backward(uniform(*y.shape, dtype=dtype, seed=51))
    return [
        y,
        x.grad,
        *(t.grad for t in extra if t.requires_grad),
        *(p.grad for p in model.parameters()),
    ]


@pytest.mark.parametrize(("chain", "splits"), list(product(CHAINS, [(COUNTS,), (COUNTS, OTHER)])))
def test_as_one_by_one(chain, splits):
    """Bit for bit, where no kernel leaves out a rounding: also if each layer divides the rows in
    its own way.
    """
    torch.manual_seed(0)
    model = Sequential(*CHAINS[chain]())
    with options.override(target="reference"):
        found, want = (
            step(model, model, splits=splits),
            step(lambda *t: one_by_one(model, *t), model, splits=splits),
        )
    assert_same_bits(found, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype):
    """Against float64, with kernels."""
    first, second = up(dtype=dtype), down(dtype=dtype, scale_bias=True)
    model = Sequential(first, ScaledSwiGLU(8), second)
    y, *found = step(model, model, dtype)
    x = wide(uniform(ROWS, H, dtype=dtype, seed=50))
    factors = [wide(t) for t in operands(model) if t.requires_grad]
    params = [stacked(m, name) for m in (first, second) for name in ("weight", "bias")]
    inner = glu(linear(x, params[0], params[1], SIZES), factors[0], 8)
    want = linear(inner, params[2], params[3], SIZES, factors[1])
    want.backward(uniform(ROWS, H, dtype=dtype, seed=51).double())
    assert_near(y, want, dtype)
    wanted = [x.grad, *(t.grad for t in factors), *(g for t in params for g in t.grad)]
    for grad, other in zip(found, wanted, strict=True):
        assert_near(grad, other, dtype, 4)


@pytest.mark.parametrize(
    ("chain", "programs"),
    [
        ("an MLP", 1),
        ("between others", 1),
        ("twice in a row", 1),
        ("a longer chain", 1),
        ("others in the middle", 3),
    ],
)
def test_each_run_is_one_program(chain, programs):
    model = Sequential(*CHAINS[chain]())
    with Called() as forward:
        y = model(uniform(ROWS, H).requires_grad_(), *operands(model))
    with Called() as backward:
        y.sum().backward()
    assert len(forward.names) == len(backward.names) == programs


class Doubled(GroupedLinear):
    """A forward of a subclass."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def replace_forward(module: nn.Module) -> None:
    """As accelerate's hooks do."""
    old = module.forward
    module.forward = lambda *args: 2 * old(*args)


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, y: 2 * y),
    "forward with keywords": lambda m: m.register_forward_hook(
        lambda m, args, kwargs, y: 2 * y, with_kwargs=True
    ),
    "before forward": lambda m: m.register_forward_pre_hook(
        lambda m, args: (2 * args[0], *args[1:])
    ),
    "backward": lambda m: m.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0], *dx[1:])),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],)),
    "a forward set on the instance": replace_forward,
}
OF_WEIGHTS = {
    "spectral_norm": lambda m: torch.nn.utils.spectral_norm(m, "weight1"),
    "a parametrization": lambda m: torch.nn.utils.parametrizations.weight_norm(m, "weight1"),
    "pruned": lambda m: prune.l1_unstructured(m, "weight1", 0.5),
}
ADDED = {
    **{name: (add, 2) for name, add in HOOKS.items()},
    **{name: (add, 0) for name, add in OF_WEIGHTS.items()},
}


@pytest.mark.parametrize("what", ADDED)
def test_what_belongs_to_a_module(what):
    """Hooks, replaced forwards and computed weights have their effect in results and gradients."""
    model, plain = (Sequential(*CHAINS["clamped"]()).eval() for _ in range(2))
    add, place = ADDED[what]
    add(model[place])
    with options.override(target="reference"):
        found, every = (step(m, m, splits=(OTHER,)) for m in (model, plain))
        assert_same_bits(found, step(lambda *t: one_by_one(model, *t), model, splits=(OTHER,)))
    assert what == "a parametrization" or not all(
        a.equal(b) for a, b in zip(found[:2], every[:2], strict=True)
    )
    assert not any(p.grad is None for p in model.parameters())


def test_a_subclass_with_a_forward():
    model = Sequential(Doubled(G, H, 2 * I), ScaledSwiGLU(), down(), Doubled(G, H, H))
    with options.override(target="reference"):
        assert_same_bits(step(model, model), step(lambda *t: one_by_one(model, *t), model))


def test_hooks_of_all_modules():
    model, seen = Sequential(*CHAINS["an MLP"]()), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    try:
        model(uniform(ROWS, H), *operands(model))
    finally:
        hook.remove()
    assert seen == [*model, model]


def test_modules_beside_one_with_a_hook_are_one_program():
    model = Sequential(*CHAINS["behind a layer"]())
    model[0].register_forward_hook(lambda m, args, y: None)
    with Called() as calls:
        model(uniform(ROWS, H), *operands(model))
    assert calls.names == ["run", "run"]


@pytest.mark.parametrize("chain", ["one parameter each", "between others"])
def test_compiled(chain):
    model = Sequential(*CHAINS[chain]())
    for found, want in zip(step(compiled(model), model), step(model, model), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_bad_calls(golden):
    model, x = Sequential(*CHAINS["an MLP"]()), uniform(ROWS, H)
    given = operands(model)
    cases = {
        "too few": lambda: model(x, *given[:-1]),
        "too many": lambda: model(x, *given, COUNTS),
        "x of another width": lambda: model(x[:, 1:], *given),
        "layers that do not fit": lambda: Sequential(up(), down())(x, COUNTS, COUNTS),
        "other counts": lambda: model(x, COUNTS[1:], *given[1:]),
    }
    golden(messages(cases))
