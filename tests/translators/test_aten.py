"""Translators of aten's operations: what a traced graph computes, bit for bit, and the calls that
they refuse.
"""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits, evaluate
from hypothesis import given, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

from fusion_moe.definitions import translate
from fusion_moe.definitions.traced import Sizes, plain_argument, tensor_type
from fusion_moe.errors import Untranslatable
from fusion_moe.ir.builder import FusionDefinition

USED: set[str] = set()  # the translators that a test below went through


def translated(function, *args, symbolic=False):
    """The Fusion of a function's graph, every call of it by its translator; a refusal is raised."""
    graph = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*args).graph
    fd, sizes, values, outputs = FusionDefinition(), Sizes(), {}, []

    def argument(a):
        if isinstance(a, (list, tuple)):
            return tuple(map(argument, a))
        return values[a] if isinstance(a, torch.fx.Node) else plain_argument(a, sizes)

    for n in graph.nodes:
        val = n.meta.get("val")
        if n.op == "placeholder":
            values[n] = fd.define_tensor(shape=sizes.shape(val.shape), dtype=val.dtype)
        elif n.op == "output":
            outputs = n.args[0]
        elif n.target is operator.getitem:
            values[n] = values[n.args[0]][n.args[1]]
        elif isinstance(val, (torch.SymInt, int)):
            values[n] = plain_argument(val, sizes)
        else:
            translator = translate.find(n.target.name())
            assert translator is not None, n.target
            USED.add(translator.op)
            several = isinstance(val, (list, tuple))
            expected = [
                tensor_type(t.dtype, sizes.shape(t.shape)) for t in (val if several else (val,))
            ]
            made = translator(
                fd,
                [argument(a) for a in n.args],
                {k: argument(v) for k, v in n.kwargs.items()},
                expected,
            )
            values[n] = made if several else made[0]
    for n in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        fd.add_output(values[n])
    return fd.fusion()


def check(function, *args, symbolic=False):
    """A function's Fusion gives the bits that eager torch gives."""
    want = function(*args)
    found = evaluate(translated(function, *args, symbolic=symbolic), *args)
    assert_same_bits(found, want if isinstance(want, (tuple, list)) else (want,))


G = torch.Generator().manual_seed(0)
F, B, H, D = (
    torch.randn(5, 6, generator=G).to(t)
    for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
)
I32, I64, MASK = (
    torch.randint(-5, 5, (5, 6), generator=G).int(),
    torch.randint(-5, 5, (5, 6), generator=G),
    torch.rand(5, 6, generator=G) > 0.5,
)
ROW, COLUMN = torch.randn(6, generator=G), torch.randn(5, 1, generator=G)
F8 = F.to(torch.float8_e4m3fn)
aten, prims = torch.ops.aten, torch.ops.prims


def _of(name, prepare=lambda x: x):
    return lambda x: getattr(torch, name)(prepare(x))


POINTWISE = {
    **{
        name: _of(name)
        for name in (
            *("neg", "abs", "exp", "expm1", "tanh", "erf", "relu", "sigmoid", "erfc", "sin", "cos"),
            *("atan", "floor", "round", "isnan", "isfinite"),
        )
    },
    **{
        name: _of(name, lambda x: x.abs() + 0.125)
        for name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal")
    },
    # 16 bits hold what is added: else torch on CPUs rounds it first
    "scalars": lambda x: (x * 2.1 + 0.125 - 3) / 7,
    "scalar overloads": lambda x: aten.add.Scalar(
        aten.mul.Scalar(aten.sub.Scalar(aten.div.Scalar(x, 3), 0.5), 2), 1
    ),
    "pieces of silu": lambda x: x / (torch.exp(-x) + 1),
    "two tensors": lambda x: torch.minimum(x * x, torch.maximum(x, x + 1)),
    "pow": lambda x: x**2 + torch.pow(x.abs(), x),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp crossed": lambda x: x.clamp(0.7, -0.5),
    "clamp one side": lambda x: x.clamp(min=0.1) + x.clamp(max=0.3),
    "clamp_min and max": lambda x: aten.clamp_max(aten.clamp_min(x, -1), 1),
    "compare with numbers": lambda x: (x < 0.1, x <= 0, x > 1, x >= 0.5, x == 0, x != 0),
    "compare": lambda x: (x < -x, x <= x, x > -x, x >= -x, x == x, x != x),
    "where": lambda x: torch.where(x > 0, x, -x),
    "cast": lambda x: (x.float(), x.bfloat16(), x.half(), x.double(), x.to(torch.int32)),
    "convert_element_type": lambda x: prims.convert_element_type(x, torch.float32),
    "masked_fill": lambda x: aten.masked_fill.Scalar(x, x > 0.5, 2.0),
    "threshold": lambda x: aten.threshold(x, 0.25, -2.0),
    "numbers of a power": lambda x: aten.pow.Scalar(1.5, x),
    "fmax and fmin": lambda x: (aten.fmax(x, -x), aten.fmin(x, x / 0)),
    "masks": lambda x: aten.bitwise_not((x > 0) & (x < 1) | (x > 2) ^ (x < -1)),
    "a mask as a factor": lambda x: x * (x > 0),
    "clone, detach, alias": lambda x: aten.alias(x.clone().detach()) + 1,
}


@pytest.mark.parametrize("x", [F, B, H, D], ids=["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name, x):
    check(POINTWISE[name], x)


IN_PRIMS = {
    1: (
        *("neg", "abs", "exp", "expm1", "log1p", "tanh", "erf", "erfc", "sin", "cos", "atan"),
        *("floor", "round", "log", "sqrt", "rsqrt", "reciprocal"),
    ),
    2: (
        *("add", "sub", "mul", "div", "minimum", "maximum", "pow", "fmax", "fmin"),
        *("lt", "le", "gt", "ge", "eq", "ne"),
    ),
}


@pytest.mark.parametrize("count", IN_PRIMS)
def test_operations_of_prims(count):
    """In graphs of which the rest was decomposed."""
    x = F.abs() + 0.125
    for name in IN_PRIMS[count]:
        check(getattr(prims, name), *(x, x.flip(0))[:count])
    for name in "and", "or", "xor":
        check(getattr(prims, f"bitwise_{name}"), MASK, MASK.flip(0))
    check(prims.bitwise_not, MASK)
    check(prims.where, MASK, F, -F)


COMPOSED = (
    *("exp2", "log2", "log10", "tan", "sinh", "cosh", "asinh", "atanh", "asin", "acos", "sign"),
    *("ceil", "trunc", "frac", "sinc"),
)


@pytest.mark.parametrize("x", [F, B, D], ids=["f32", "bf16", "f64"])
@pytest.mark.parametrize("name", COMPOSED)
def test_composed_functions_are_near(name, x):
    x = x.abs() + 0.1 if name.startswith("log") else x.tanh() * 0.9
    for of in (aten, prims) if name not in ("frac", "sinc") else (aten,):
        (found,) = evaluate(translated(getattr(of, name), x), x)
        near = {} if x.dtype == torch.bfloat16 else {"rtol": 2e-6, "atol": 3e-7}
        torch.testing.assert_close(found, getattr(torch, name)(x), **near)


@pytest.mark.parametrize("x", [F, B], ids=["f32", "bf16"])
def test_functions_of_several_operations_are_near(x):
    for function in (
        lambda x: aten.log_sigmoid_forward(x)[0],
        lambda x: aten.lerp.Scalar(x, -x, 0.3),
        lambda x: aten.lerp.Scalar(x, -x, 0.7),
    ):
        (found,) = evaluate(translated(function, x), x)
        torch.testing.assert_close(found, function(x))


def test_silu_is_near():
    """torch's own silu has another exp: near to a rounding, not bit for bit."""
    (found,) = evaluate(translated(lambda x: aten.silu(x), F), F)
    torch.testing.assert_close(found, torch.nn.functional.silu(F), rtol=1e-6, atol=1e-7)


def test_integers_and_booleans():
    check(
        lambda x: (x + 2, x * x - 1, -x, x.abs(), x < 0, torch.minimum(x, -x), x.clamp(-2, 2)), I64
    )
    check(lambda x, y: x + y, I32, I64)
    check(
        lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_not(x)),
        MASK,
        MASK.flip(0),
    )
    check(lambda x: (x.to(torch.float32), x.to(torch.bool), x.to(torch.int64)), I32)


def test_promotion_and_broadcast():
    """As torch promotes floats: to the wider one, bf16 with f16 to float32; sizes of 1 and missing
    dimensions are repeated.
    """
    for a, b in ((B, F), (F, B), (B, H), (H, D), (F, D)):
        check(lambda x, y: (x + y, x * y, x < y, torch.maximum(x, y)), a, b)
        check(lambda c, x, y: torch.where(c, x, y), MASK, a, b)
    for b in (ROW, COLUMN, F[None, :1], torch.tensor(2.0)):
        check(lambda x, y: (x * y, y - x), F, b)
    check(lambda c, x: torch.where(c, x, x[0]), MASK[:, :1], F)


SHAPES = {
    "view": lambda x: x.view(3, 10),
    "view with -1": lambda x: (x.view(-1), x.view(2, -1), x.view(5, 2, -1)),
    "_unsafe_view": lambda x: aten._unsafe_view(x, (10, 3)),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[:, None]),
    "squeeze": lambda x: (x[:, None].squeeze(1), x.squeeze(0), x[None].squeeze(-3)),
    "expand": lambda x: x[:, None].expand(-1, 3, 6),
    "expand in front": lambda x: x.expand(2, 5, 6),
    "permute": lambda x: x[None].permute(2, -2, 0),
    "t": lambda x: (x.t(), aten.t(x)),
    "slice": lambda x: (x[1:3], x[:, 2:], x[:, -2:], x[:-1], x[2:100], x[4:2]),
    "select": lambda x: (x[2], x[-1], x.select(-1, 0)),
    "split": lambda x: torch.split(x, 4, -1),
    "split_with_sizes": lambda x: torch.split(x, [1, 2, 2], 0),
    "chunk": lambda x: x.chunk(3, -1),
    "cat": lambda x: (torch.cat([x, x + 1]), torch.cat([x, x[:, :2], x], -1)),
    "full": lambda x: x + aten.full([5, 6], 2, dtype=x.dtype),
    "full of integers": lambda x: (
        aten.full([3], 2, dtype=torch.int64),
        aten.full([], True, dtype=torch.bool),
    ),
    "sum": lambda x: (
        x.sum(1),
        x.sum(-1, keepdim=True),
        x.sum((0, 1)),
        aten.sum.dim_IntList(x, []),
    ),
    "sum in float32": lambda x: aten.sum.dim_IntList(x, [1], dtype=torch.float32),
}


@pytest.mark.parametrize("x", [F, B], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, x):
    check(SHAPES[name], x)


def test_no_rows():
    empty = F[:0]
    check(lambda x: (torch.cat([x, x]), x.sum(0), x[0:3], x * 2), empty)
    if TorchVersion(torch.__version__) >= "2.12":  # torch 2.11's own decomposition of this fails
        check(lambda x: torch.split(x, 2, 0), empty)


AT = torch.tensor([3, 0, 0, 4])
NEGATIVE = torch.tensor([-1, 0, -5, 4])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_gathers(dtype):
    check(lambda x, i: x.index_select(0, i), F, AT.to(dtype))
    check(lambda x, i: (x.index_select(1, i), x.index_select(-1, i)), B, AT.to(dtype))
    check(lambda x, i: (x[i], x[:, i]), F, NEGATIVE.to(dtype))
    check(lambda x, i: aten.index.Tensor(x, [i]), F, AT[:0].to(dtype))


@pytest.mark.parametrize("x", [F, B, I64], ids=["f32", "bf16", "i64"])
@given(at=st.lists(st.integers(-5, 4), max_size=9))
def test_scatters(x, at):
    """Rows added one after the other, twice at one place too."""
    index = torch.tensor(at, dtype=torch.int64)
    rows = x.repeat(2, 1)[: len(at)] * 3
    if x is not B:
        check(lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True), x, index, rows)
    check(lambda x, i, v: x.index_add(0, i, v), x, index % 5, rows)


def test_symbolic_sizes():
    """Sizes that are no numbers yet: one Fusion for all of them."""

    def function(x):
        m = x.shape[0]
        y = x.view(m * 2, 3).view(-1, 6)
        z = torch.cat([y, x], 0).sum(1, keepdim=True)
        return y.expand(2, -1, -1), z, x[:, 1:4], x.t()

    fusion = translated(function, F, symbolic=True)
    assert len(fusion.symbols) == 1
    for n in (2, 5, 9):
        x = torch.randn(n, 6)
        assert_same_bits(evaluate(fusion, x), function(x))


def test_numbers_without_dimensions():
    """0-d tensors have a dimension 0 to be squeezed, selected from and added to"""
    number, first = torch.tensor(2.5), torch.tensor([0])
    check(lambda x: aten.squeeze.dim(x, 0) + 1, number)
    check(lambda x: aten.squeeze.dim(x, -1) * 2, number)
    for function in (
        lambda x, i, v: aten.index_select(x, 0, i),
        lambda x, i, v: aten.index_add(x, 0, i, v),
    ):
        with pytest.raises(Untranslatable):
            translated(function, number, first, torch.ones(1))


@pytest.mark.parametrize("name", ["aten::add.Scalar", "aten::sub.Scalar"])
def test_alpha_by_position(name):
    fd = FusionDefinition()
    x = fd.define_like(tensor_type(F.dtype, F.shape))
    assert [v.type for v in translate.find(name)(fd, (x, 2.0, 1), {}, [x.type])] == [x.type]
    with pytest.raises(Untranslatable, match="alpha = 3"):
        translate.find(name)(fd, (x, 2.0, 3), {}, [x.type])


REFUSED = {
    "exp of integers": (lambda x: torch.exp(x), [I64]),
    "a division of integers": (lambda x: x / x, [I64]),
    "a power of integers": (lambda x: x**3, [I64]),
    "an integer and a float": (lambda x: x + 0.5, [I64]),
    "integers and floats": (lambda x, y: x * y, [I64, F]),
    "logic of floats": (lambda x: torch.logical_and(x, x), [F]),
    "not of floats": (lambda x: torch.logical_not(x), [F]),
    "clamp of integers at a float": (lambda x: x.clamp(-0.5, 1.5), [I64]),
    "alpha": (lambda x: torch.add(x, x, alpha=3), [F]),
    "a 0-d tensor of a wider dtype": (lambda x, y: x * y, [B, torch.tensor(2.5)]),
    "a 0-d tensor of a narrower dtype": (lambda x, y: x * y, [F, torch.tensor(2.5).bfloat16()]),
    "a dtype that the IR lacks": (lambda x: x.to(torch.int8), [F]),
    "a copy to pinned memory": (
        lambda x: aten._to_copy(x, dtype=torch.float64, memory_format=torch.contiguous_format),
        [F],
    ),
    "a sum of integers": (lambda x: x.sum(0), [I64]),
    "steps": (lambda x: x[::2], [F]),
    "cat of several dtypes": (lambda x, y: aten.cat([x, y]), [F, B]),
    "cat with an empty tensor": (lambda x, y: aten.cat([x, y]), [F, torch.empty(0)]),
    "full without a dtype": (lambda x: x + aten.full([5, 6], 2.5), [F]),
    "two indices": (lambda x, i: x[i, i], [F, AT]),
    "a mask as an index": (lambda x, i: x[i], [F, torch.tensor([True, False, True, True, False])]),
    "an index of two dimensions": (lambda x, i: x[i], [F, AT.view(2, 2)]),
    "index_put without accumulate": (lambda x, i, v: torch.index_put(x, (i,), v), [F, AT, F[:4]]),
    "index_put of bf16": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        [B, AT, B[:4]],
    ),
    "index_put of columns": (
        lambda x, i, v: aten.index_put(x, [None, i], v, True),
        [F, AT, F[:, :4]],
    ),
    "index_put of one row to many": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        [F, AT, F[:1]],
    ),
    "index_put of a vector": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        [F, AT, ROW],
    ),
    "index_put of float8": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True),
        [F8, AT, F8[:4]],
    ),
    "index_add along columns": (lambda x, i, v: x.index_add(1, i, v), [F, AT, F[:, :4]]),
    "index_add with alpha": (lambda x, i, v: x.index_add(0, i, v, alpha=2), [F, AT, F[:4]]),
}


def test_reasons(golden):
    calls = {name: partial(translated, f, *args) for name, (f, args) in REFUSED.items()}
    for name, function in (
        ("an index into a size that is not known", lambda x, i: x[i]),
        ("a part of a size that is not known", lambda x, i: x[1:-1]),
        ("an element of a size that is not known", lambda x, i: x[2]),
    ):
        calls[name] = partial(translated, function, F, AT, symbolic=True)
    golden(messages(calls))


@pytest.mark.parametrize(
    ("op", "args", "want"),
    [("aten::reshape", ((-1, 3),), F.reshape(-1, 3)), ("aten::detach", (), F)],
)
def test_what_some_versions_of_torch_decompose(op, args, want):
    """in graphs that keep it"""
    fd = FusionDefinition()
    USED.add(op)
    (y,) = translate.find(op)(
        fd, [fd.from_pytorch(F), *args], {}, [tensor_type(F.dtype, tuple(want.shape))]
    )
    fd.add_output(y)
    assert_same_bits(evaluate(fd.fusion(), F), [want])


def test_every_built_in_translator_was_used(request):
    """Last in this file: a translator that no test above went through fails here."""
    here = {item.name.split("[")[0] for item in request.session.items if item.path == request.path}
    if not {name for name in globals() if name.startswith("test_")} <= here:
        pytest.skip("only in a run of the whole file")
    built_in = {t.op for t in translate.registered() if t.op.startswith(("aten::", "prims::"))}
    # which has tests of its own, test_grouped_mm.py
    assert built_in - USED == {"aten::_grouped_mm"}
