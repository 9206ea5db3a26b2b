"""Modules inside a Sequential against formulas in float64: activations, steps and layers of torch
in the shapes and dtypes that Transformer Engine tests its operations in, alone and one after
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from layers import BOTH, NEAR, assert_near, uniform
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_moe import nn as ours, options

pytestmark = pytest.mark.once
KEEP, ADD, SCALE = ours.MakeExtraOutput, ours.AddExtraInput, ours.ConstantScale


class Row(NamedTuple):
    """meant(x, *extra, *parameters) in float64 -> what the modules return; extra: the shapes of
    what they take beside x; scale: by how much elements are larger than one.
    """

    make: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    meant: Callable[..., Any]
    extra: tuple[tuple[int, ...], ...] = ()
    scale: float = 1


def norm(x: Tensor, dims: int) -> Tensor:
    return x * (x.square().mean(tuple(range(-dims, 0)), keepdim=True) + 1e-6).rsqrt()


def own(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    text = ours.activation(function, parts=1)
    return lambda: ours.Activation(text)


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def squared(x: Tensor) -> Tensor:
    return x.relu().square()


def situ(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    gate, up = x.chunk(2, -1)
    return beta1 * (gate / beta1).tanh() * gate.sigmoid() * beta2 * (up / beta2).tanh()


def clamped(x: Tensor, offset: float) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return quick(gate) * (up + offset)


ACTIVATIONS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor], int]] = {
    "ReLU": (own(torch.relu), torch.relu, 1),
    "GELU": (own(tanh_gelu), tanh_gelu, 1),
    "QGELU": (ours.QGELU, quick, 1),
    "SiLU": (own(F.silu), F.silu, 1),
    "SReLU": (ours.SReLU, squared, 1),
    "GLU": (ours.GLU, gated(torch.sigmoid), 2),
    "SwiGLU": (ours.SwiGLU, gated(F.silu), 2),
    "GEGLU": (ours.GEGLU, gated(tanh_gelu), 2),
    "QGEGLU": (ours.QGEGLU, gated(quick), 2),
    "ReGLU": (ours.ReGLU, gated(torch.relu), 2),
    "SReGLU": (ours.SReGLU, gated(squared), 2),
    "SiTUGLU": (ours.SiTUGLU, situ, 2),
    "ClampedSwiGLU": (
        lambda size=None: ours.ClampedSwiGLU(size, limit=1.5),
        lambda x: clamped(x, 1.0),
        2,
    ),
}
SCALED: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor]]] = {
    "ScaledSwiGLU": (ours.ScaledSwiGLU, gated(F.silu)),
    "ScaledSiTUGLU": (ours.ScaledSiTUGLU, situ),
    "ScaledSiTUGLU 3 12": (
        lambda size: ours.ScaledSiTUGLU(size, 3.0, 12.0),
        lambda x: situ(x, 3.0, 12.0),
    ),
    "ScaledClampedQGeGLU": (
        lambda size: ours.ScaledClampedQGeGLU(size, limit=1.5),
        lambda x: clamped(x, 1.0),
    ),
    "ScaledClampedQGeGLU, offset 0": (
        lambda size: ours.ScaledClampedQGeGLU(size, limit=1.5, offset=0.0),
        lambda x: clamped(x, 0.0),
    ),
}


def rows() -> dict[str, Row]:
    made: dict[str, Row] = {"Identity": Row(lambda: [nn.Identity()], (32, 32), lambda x: x)}
    for shape, new in (
        ((1, 2, 3, 4), (2, 12)),
        ((5, 4, 3, 2), (-1, 6)),
        ((30,), (2, 3, -1)),
        ((6, 7), (3, -1, 7)),
    ):
        made[f"Reshape {shape} {new}"] = Row(
            lambda new=new: [ours.Reshape(*new)], shape, lambda x, new=new: x.reshape(new)
        )
    for size, lead in product((1, 7, 32), ((), (1, 3), (4, 3, 8))):
        made[f"Bias {size} {lead}"] = Row(
            lambda size=size: [ours.Bias(size)], (*lead, size), torch.add
        )
    for (n, k), lead, bias in product(
        ((64, 32), (3, 5), (128, 128)), ((), (5, 1), (4, 2, 4), (128,)), BOTH
    ):
        made[f"Linear {n} {k} {lead} {bias}"] = Row(
            lambda n=n, k=k, bias=bias: [nn.Linear(k, n, bias)], (*lead, k), F.linear
        )
    for size, lead in product(((7, 2), (32,)), ((), (6, 16))):
        made[f"LayerNorm {size} {lead}"] = Row(
            lambda size=size: [nn.LayerNorm(size)],
            (*lead, *size),
            lambda x, w, b, size=size: F.layer_norm(x, size, w, b),
            scale=2,  # torch sums gradients of weights in 16 bits
        )
    for size, lead in product((19, 64), ((), (6, 16))):
        made[f"RMSNorm {size} {lead}"] = Row(
            lambda size=size: [nn.RMSNorm(size, eps=1e-6)],
            (*lead, size),
            lambda x, w: norm(x, 1) * w,
        )
    for number, shape in product((1, 0, -2.5, 3.5), ((), (1, 13), (4, 4, 2))):
        made[f"ConstantScale {number} {shape}"] = Row(
            lambda s=number: [SCALE(s)], shape, lambda x, s=number: s * x
        )
    made["AddExtraInput"] = Row(lambda: [ADD()], (32, 32), torch.add, ((32, 32),))
    made["MakeExtraOutput"] = Row(lambda: [KEEP(), nn.Tanh()], (32, 32), lambda x: (x.tanh(), x))
    for name, (activation, meant, parts) in ACTIVATIONS.items():
        for *lead, width in ((37,), (2, 13), (32, 1, 32)):
            shape = (*lead, parts * width)
            made[f"{name} {shape}"] = Row(lambda a=activation: [a()], shape, meant)
        if parts == 2:
            made[f"{name} of blocks"] = Row(
                lambda a=activation: [a(8)],
                (2, 13, 64),
                lambda x, f=meant: f(ours.deinterleave(x, 8, -1)),
            )
    for shape in (71, 192), (5, 7, 128):
        scales = (shape[:-1],)
        for (name, (scaled, meant)), size in product(SCALED.items(), (None, 32)):
            made[f"{name} {shape} {size}"] = Row(
                lambda s=scaled, size=size: [s(size)],
                shape,
                lambda x, s, size=size, f=meant: (
                    f(ours.deinterleave(x, size, -1) if size else x) * s[..., None]
                ),
                scales,
            )
        made[f"ScaledSReLU {shape}"] = Row(
            lambda: [ours.ScaledSReLU()], shape, lambda x, s: squared(x) * s[..., None], scales
        )
    return made | together()


def together() -> dict[str, Row]:
    """What Transformer Engine fuses: the same modules one after another."""
    made: dict[str, Row] = {}
    for lead, function in product(((), (1, 7), (8, 2, 10)), (nn.ReLU(), nn.GELU())):
        made[f"Linear, Bias, {function} {lead}"] = Row(
            lambda f=function: [nn.Linear(64, 32, False), ours.Bias(32), f],
            (*lead, 64),
            lambda x, w, b, f=function: f(F.linear(x, w, b)),
        )
    for bias in BOTH:
        made[f"Linear, AddExtraInput {bias}"] = Row(
            lambda bias=bias: [nn.Linear(32, 32, bias), ADD()],
            (32, 32),
            lambda x, extra, *p: F.linear(x, *p) + extra,
            ((32, 32),),
        )
    for s in (1, 0, -2.5, 3.5):
        made[f"Linear, ConstantScale {s}, AddExtraInput"] = Row(
            lambda s=s: [nn.Linear(32, 32, False), SCALE(s), ADD()],
            (32, 32),
            lambda x, extra, w, s=s: s * F.linear(x, w) + extra,
            ((32, 32),),
            scale=12,  # a product of torch is rounded before it is scaled
        )
    made["MakeExtraOutput, RMSNorm"] = Row(
        lambda: [KEEP(), nn.RMSNorm(64, eps=1e-6)],
        (6, 16, 64),
        lambda x, w: (norm(x, 1) * w, x),
    )
    made["MakeExtraOutput, Linear"] = Row(
        lambda: [KEEP(), nn.Linear(32, 32)], (32, 32), lambda x, w, b: (F.linear(x, w, b), x)
    )
    for bias in BOTH:
        made[f"an MLP {bias}"] = Row(
            lambda bias=bias: [
                nn.LayerNorm(32),
                nn.Linear(32, 64, bias),
                ours.GEGLU(),
                nn.Linear(32, 32, bias),
            ],
            (32, 32),
            lambda x, w, b, *p: _mlp(F.layer_norm(x, (32,), w, b), p),
        )
    made["a residual"] = Row(
        lambda: [KEEP("a"), ours.Bias(16), ADD("a")], (16,), lambda x, b: 2 * x + b
    )
    made["a channel that nobody reads"] = Row(
        lambda: [KEEP("a"), ours.Bias(16)], (16,), lambda x, b: x + b
    )
    made["a channel that two read"] = Row(
        lambda: [KEEP("a"), SCALE(2), ADD("a"), SCALE(3), ADD("a")], (16,), lambda x: 10 * x
    )
    made["channels and others"] = Row(
        lambda: [KEEP("a"), KEEP(), ours.Bias(16), ADD(), KEEP("b"), ADD("a"), KEEP(), ADD("b")],
        (16,),
        lambda x, extra, b: (3 * x + 2 * b + 2 * extra, x, 2 * x + b + extra),
        ((16,),),
    )
    return made


def _mlp(x: Tensor, p: Sequence[Tensor]) -> Tensor:
    first, second = p[: len(p) // 2], p[len(p) // 2 :]
    return F.linear(gated(tanh_gelu)(F.linear(x, *first)), *second)


ROWS = rows()
# of each kind the last, for GPUs
LAST = list({name.split(" ")[0].rstrip(","): name for name in ROWS}.values())


def compare(row: Row, dtype: torch.dtype, device: str, wanted: Sequence[bool] = ()) -> None:
    """Results and gradients; wanted: of x and of what stands beside it, all by default."""
    scale = row.scale * (1 if device == "cpu" else 4)  # torch's sums there have other orders
    model = ours.Sequential(*row.make()).to(device, dtype)
    given = [
        uniform(*shape, dtype=dtype if i == 0 else torch.float32, seed=i, low=-2, high=2)
        for i, shape in enumerate((row.shape, *row.extra))
    ]
    given = [t.to(device, dtype) if t.shape == row.shape else t.to(device) for t in given]
    for i, p in enumerate(model.parameters()):
        with torch.no_grad():
            p.copy_(uniform(*p.shape, seed=10 + i))
    for t, of_t in zip(given, wanted or [True] * len(given), strict=True):
        t.requires_grad_(of_t)
    leaves = [*given, *model.parameters()]
    others = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in leaves]
    found, want = (y if isinstance(y, tuple) else (y,) for y in (model(*given), row.meant(*others)))
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.dtype == dtype
        assert_near(a.cpu(), b, dtype, scale)
        if b.requires_grad:
            dy = uniform(*a.shape, dtype=dtype, seed=20 + i)
            a.backward(dy.to(device), retain_graph=True)
            b.backward(dy.double(), retain_graph=True)
    for a, b in zip(leaves, others, strict=True):
        factor = max(1.0, float(b.grad.abs().max())) if b.grad is not None and b.numel() else 1.0
        assert_near(a.grad if a.grad is None else a.grad.cpu(), b.grad, dtype, scale * factor)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_against_float64(name, dtype):
    with options.override(target="reference"):
        compare(ROWS[name], dtype, "cpu")


@pytest.mark.parametrize("name", [n for n in ROWS if n.startswith("Scaled")])
def test_gradients_of_some(name):
    """Only of x, only of scales, of none."""
    with options.override(target="reference"):
        for wanted in (True, False), (False, True), (False, False):
            compare(ROWS[name], torch.float32, "cpu", wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAST)
def test_on_a_gpu(name, dtype):
    compare(ROWS[name], dtype, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("training", BOTH)
@pytest.mark.parametrize("shape", [(101,), (2, 4, 16), (128, 128)], ids=str)
@pytest.mark.parametrize("p", [0.0625, 0.5, 0.75])
def test_dropout(p, shape, training, device):
    """A share of the elements is 0, gradients as results; the others are scaled."""
    model = ours.Sequential(ours.Bias(shape[-1]), nn.Dropout(p)).to(device).train(training)
    x = uniform(*shape, low=0.5, high=1.0).to(device).requires_grad_()
    y = model(x)
    y.sum().backward()
    kept = y != 0
    assert y[kept].allclose(x[kept] / (1 - p if training else 1))
    assert x.grad.equal(kept / (1 - p) if training else torch.ones_like(x))
    share = (~kept).double().mean().item()
    assert abs(share - p * training) <= 5 * (p * (1 - p) / x.numel()) ** 0.5


def test_a_list_of_modules():
    """Slices, sums and products of a Sequential are such, with extra inputs."""
    a, b = ours.Sequential(SCALE(2), ADD()), ours.Sequential(ours.Bias(4), ADD())
    a.insert(1, nn.Identity())
    a.append(nn.Tanh())
    assert isinstance(a.pop(3), nn.Tanh)
    x, one, two = (uniform(3, 4, seed=s) for s in range(3))
    both = a + b
    for made in both, both[1:], a * 2, both[:2] + b:
        assert type(made) is ours.Sequential
    assert both(x, one, two).equal(2 * x + one + two)
    assert (a * 2)(x, one, two).equal(2 * (2 * x + one) + two)
    assert list(both) == [*a, *b]
