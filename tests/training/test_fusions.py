"""Fusions registered for a Sequential: what they are called with, and when they are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layers import assert_near, layer, one_by_one, uniform
from torch import Tensor, nn
from torch.nn import functional as F
from ways import Called, compiled

from fusion_moe import nn as ours
from fusion_moe.errors import OptionError

pytestmark = pytest.mark.usefixtures("meaning_without_all")

G, H, I = 3, 24, 16
SPLITS = torch.tensor([5, 0, 6])
ROWS = 13


@contextmanager
def registered(*kinds: type[nn.Module], function: Callable[..., Any]) -> Any:
    """The calls of a fusion while it is registered."""
    calls: list[tuple[Any, ...]] = []

    def noted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    ours.register_fusion(*kinds)(noted)
    try:
        yield calls
    finally:
        ours.unregister_fusion(noted)


class Axpy(torch.autograd.Function):
    """One operation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return torch.add(extra, x, alpha=scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.scale, dy, None


def gradients(f: Any, model: nn.Module, *given: Tensor) -> list[Tensor]:
    """The result, and the gradients of what is given and of parameters."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in given]
    wanted = [t for t in leaves if t.requires_grad] + list(model.parameters())
    y = f(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


def compare(found: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(found, want, strict=True):
        assert_near(a, b.double(), torch.float32, 10)


WINDOWS: dict[str, Any] = {
    "a scaled sum": (
        (ours.ConstantScale, ours.AddExtraInput),
        lambda scale, add, x, extra: Axpy.apply(x, extra, scale.scale),
        lambda: [ours.ConstantScale(-2.5), ours.AddExtraInput()],
        1,
    ),
    "a product and its bias": (
        (nn.Linear, ours.Bias),
        lambda linear, bias, x: F.linear(x, linear.weight, bias.bias),
        lambda: [nn.Linear(H, H, bias=False), ours.Bias(H)],
        0,
    ),
    "a channel inside": (
        (ours.MakeExtraOutput, ours.Bias, ours.AddExtraInput),
        lambda keep, bias, add, x: torch.add(bias.bias, x, alpha=2),
        lambda: [ours.MakeExtraOutput("a"), ours.Bias(H), ours.AddExtraInput("a")],
        0,
    ),
    "a channel from outside": (
        (ours.Bias, ours.AddExtraInput),
        lambda bias, add, x, extra: x + (bias.bias + extra),
        lambda: [
            ours.MakeExtraOutput("a"),
            nn.Tanh(),
            ours.Bias(H),
            ours.AddExtraInput("a"),
        ],
        0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("in_graph", [False, True])
def test_in_place_of_modules(name, in_graph):
    """Results and gradients are those of the modules; between other ones, and compiled."""
    kinds, function, make, extras = WINDOWS[name]
    torch.manual_seed(0)
    model = ours.Sequential(nn.Sigmoid(), *make(), nn.Tanh())
    given = [uniform(ROWS, H, seed=s) for s in range(1 + extras)]
    want = gradients(model, model, *given)
    with registered(*kinds, function=function) as calls:
        compare(gradients(compiled(model) if in_graph else model, model, *given), want)
    assert len(calls) == 1
    assert tuple(type(m) for m in calls[0][: len(kinds)]) == kinds


def mlp() -> ours.Sequential:
    first, second = layer(G, H, 2 * I), layer(G, I, H, seed=9, scale_bias=True)
    return ours.Sequential(first, ours.ScaledSwiGLU(), second)


def given_to_mlp() -> list[Tensor]:
    scales = [uniform(ROWS, seed=s, low=0.1) for s in (2, 3)]
    return [uniform(ROWS, H), SPLITS, scales[0], SPLITS, scales[1]]


def test_of_layers_with_what_they_take():
    """It comes before programs of the library's own, and the modules beside it are one."""
    model, given = mlp(), given_to_mlp()

    def second_half(act: Any, linear: Any, x: Tensor, scales: Tensor, *of_linear: Tensor) -> Tensor:
        return linear(act(x, scales), *of_linear)

    want = gradients(lambda *t: one_by_one(model, *t), model, *given)
    with registered(ours.ScaledSwiGLU, ours.GroupedLinear, function=second_half) as calls:
        compare(gradients(model, model, *given), want)
    (args,) = calls
    assert args[:2] == (model[1], model[2])
    assert [tuple(t.shape) for t in args[2:]] == [(ROWS, 2 * I), (ROWS,), (G,), (ROWS,)]


def test_not_implemented():
    """The modules run as without it: here as one program."""
    model, given = mlp(), given_to_mlp()
    kinds = (ours.GroupedLinear, ours.ScaledSwiGLU)
    with registered(*kinds, function=lambda *args: NotImplemented) as calls, Called() as programs:
        model(*given)
    assert len(calls) == len(programs.names) == 1
    with (
        registered(*kinds, function=lambda *args: NotImplemented),
        registered(*kinds, function=lambda first, act, x, *rest: act(first(x, rest[0]), rest[1])),
    ):
        compare([model(*given)], [one_by_one(model, *given)])


class Halved(ours.ConstantScale):
    """A forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def hooked() -> nn.Module:
    module = ours.ConstantScale(2.0)
    module.register_forward_hook(lambda m, args, y: y + 1)
    return module


KEEP, ADD = ours.MakeExtraOutput, ours.AddExtraInput


@pytest.mark.parametrize(
    ("kinds", "make"),
    [
        ((ours.ConstantScale, ours.Bias), lambda: [Halved(2.0), ours.Bias(H)]),
        ((ours.ConstantScale, ours.Bias), lambda: [hooked(), ours.Bias(H)]),
        ((ours.Bias, ours.ConstantScale), lambda: [ours.ConstantScale(2.0), ours.Bias(H)]),
        ((KEEP, ours.Bias), lambda: [KEEP("a"), ours.Bias(H), ADD("a")]),
        ((KEEP, ours.Bias), lambda: [KEEP(), ours.Bias(H)]),
    ],
)
def test_what_is_left_out(kinds, make):
    model, x = ours.Sequential(*make()), uniform(ROWS, H)
    want = model(x)
    with registered(*kinds, function=lambda *args: 1 / 0):
        found = model(x)
    for a, b in zip(found, want, strict=True):
        assert a.equal(b)


def test_bad_registrations():
    for kinds in (), (nn.Linear,), (nn.Linear, 3), (nn.Linear, Tensor):
        with pytest.raises(OptionError, match="expected two or more classes that derive from"):
            ours.register_fusion(*kinds)
