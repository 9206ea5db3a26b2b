"""What autograd calls and keeps of the operations: which programs run, which tensors live until the
backward.
"""

from __future__ import annotations

import gc
import weakref
from itertools import combinations

import pytest
import torch
from fusions import assert_same_bits
from test_ops import OPS, count_flops, decoded, experts, mlp, random
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from ways import Called

import fusion_moe
from fusion_moe.errors import UnsupportedError

GROUPS, TOKENS, SLOTS, HIDDEN, INNER = 3, 5, 2, 32, 16
ROWS = TOKENS * SLOTS
FORWARD = 2 * ROWS * (HIDDEN * 2 * INNER + INNER * HIDDEN)  # flops of its two products


def arguments(dtype: torch.dtype = torch.bfloat16, biases: bool = False) -> dict[str, Tensor]:
    gate_up, down = experts(GROUPS, HIDDEN, INNER)
    ids = torch.randint(0, GROUPS, (TOKENS, SLOTS), generator=torch.Generator().manual_seed(3))
    names = [
        f"{name}_{part}"
        for name in ("gate_up", "down")
        for part in ("codes", "block_scale", "decode_scale")
    ]
    found = {
        "x": random(TOKENS, HIDDEN, dtype=dtype),
        "ids": ids,
        "w": random(TOKENS, SLOTS, seed=2).sigmoid(),
    }
    found |= dict(zip(names, (*gate_up, *down), strict=True))
    shapes = {"gate_up_bias": 2 * INNER, "down_bias": HIDDEN} if biases else {}
    return found | {name: random(GROUPS, n, dtype=dtype, seed=7) for name, n in shapes.items()}


def call(given: dict[str, Tensor], *wanted: str) -> Tensor:
    return OPS.expert_mlp(**{n: t.requires_grad_() if n in wanted else t for n, t in given.items()})


def called(function) -> list[str]:
    with Called() as seen:
        function()
    return seen.names


def test_without_gradients_the_operation_runs():
    given = arguments()
    assert called(lambda: call(given)) == ["expert_mlp"]
    with torch.no_grad():
        assert called(lambda: call(given, "x", "w")) == ["expert_mlp"]
    with torch.inference_mode():
        assert called(lambda: OPS.expert_mlp(**arguments())) == ["expert_mlp"]


def test_forward_mode_is_refused():
    """Tangents are not lost: torch would take a result without one for a constant."""
    given = arguments()
    x, rest = given.pop("x"), given
    refused = pytest.raises(
        UnsupportedError, match="expert_mlp: an argument with a tangent; expected none"
    )
    with refused:
        torch.func.jvp(lambda x: OPS.expert_mlp(x=x, **rest), (x,), (torch.ones_like(x),))
    for mode in torch.no_grad, torch.enable_grad:
        with mode(), forward_ad.dual_level(), refused:
            OPS.expert_mlp(x=forward_ad.make_dual(x, torch.ones_like(x)), **rest)
    with forward_ad.dual_level():
        assert OPS.expert_mlp(x=x, **rest).equal(OPS.expert_mlp(x=x, **rest))


def test_what_saves_inputs_alone_runs_itself():
    gate_up, _ = experts(GROUPS)
    a, ends = random(5, 32).requires_grad_(), torch.tensor([1, 1, 5], dtype=torch.int32)
    bias = random(GROUPS, 32).requires_grad_()
    slots, w = torch.arange(5, dtype=torch.int32)[:, None], random(5, 1).requires_grad_()
    for name, args in {
        "nvfp4_grouped_mm": (a, *gate_up, ends),
        "scaled_swiglu": (a,),
        "combine": (a, slots, w),
        "group_add": (a, bias, ends),
    }.items():
        assert called(lambda name=name, args=args: getattr(OPS, name)(*args).sum().backward()) == [
            name,
            "run",
        ]
    assert called(lambda: call(arguments(), "x").sum().backward()) == ["run", "run"]


@pytest.mark.parametrize(
    ("wanted", "backward"),
    [(("x",), FORWARD), (("w",), 0), (("x", "w"), FORWARD), (("down_bias",), 0)],
)
def test_no_product_runs_twice(wanted, backward):
    """The flops of all products that run: those of the forward once, of the backward those of the
    gradients.
    """
    given = arguments(biases="down_bias" in wanted)
    assert count_flops(lambda: call(given, *wanted)) == FORWARD
    assert count_flops(lambda: call(given, *wanted).sum().backward()) == FORWARD + backward


def kept_by(function, named: dict[str, Tensor]) -> list:
    """What autograd keeps: the name of an input, or the dtype and shape of a value."""
    found = []
    names = {t.data_ptr(): name for name, t in named.items()}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.append(names.get(t.data_ptr(), (str(t.dtype).partition(".")[2], *t.shape))),
        lambda t: t,
    ):
        function()
    return found


def kept(given: dict[str, Tensor], *wanted: str) -> list:
    return kept_by(lambda: call(given, *wanted), given)


WEIGHTS = [n for n in arguments() if n.startswith(("gate_up", "down"))]
INDICES = [("int32", GROUPS), ("int32", ROWS), ("int32", TOKENS, SLOTS)]
PRE_ACTIVATION, RESULT = ("bfloat16", ROWS, 2 * INNER), ("bfloat16", ROWS, HIDDEN)


def test_what_is_kept_for_the_backward():
    """FC1's result, in 16 bits, or FC2's if w alone is wanted; the order of rows in 8 bytes each;
    nothing for what is frozen.
    """
    given = arguments(biases=True)
    assert kept(given) == []
    assert kept(given, "x") == ["w", *WEIGHTS, *INDICES, PRE_ACTIVATION]
    given = arguments(biases=True)
    assert kept(given, "w") == [*INDICES, RESULT]
    assert kept(given, "x", "w") == ["w", *WEIGHTS, "down_bias", *INDICES, PRE_ACTIVATION]
    with fusion_moe.options.override(router_gradient=False):
        assert kept(given, "x", "w") == ["w", *WEIGHTS, *INDICES, PRE_ACTIVATION, RESULT]
    given = arguments(biases=True)
    assert kept(given, "down_bias") == ["w", *INDICES]


def test_nothing_else_lives_until_the_backward():
    given = arguments()
    x = weakref.ref(given["x"])
    y = call(given, "w")
    del given["x"]
    gc.collect()
    assert x() is None
    y.sum().backward()
    assert given["w"].grad.any()


def test_each_gradient_is_the_same_whatever_else_is_wanted():
    """And near those of a loop in float64. That of w has two ways: FC2's result, and its dgrad
    where that is done anyway.
    """
    names = ("x", "w", "gate_up_bias", "down_bias")
    given = arguments(torch.float32, biases=True)
    wide = {n: t.double().requires_grad_() for n, t in given.items() if n in names}
    gate_up, down = (
        decoded(*(given[f"{n}_{p}"] for p in ("codes", "block_scale", "decode_scale")))
        for n in ("gate_up", "down")
    )
    want = mlp(
        wide["x"], given["ids"], wide["w"], gate_up, down, wide["gate_up_bias"], wide["down_bias"]
    )
    dy = random(TOKENS, HIDDEN, seed=9)
    expected = dict(
        zip(names, torch.autograd.grad(want, [wide[n] for n in names], dy.double()), strict=True)
    )
    first: dict[tuple[str, bool], Tensor] = {}
    for wanted in (*((name,) for name in names), *combinations(names, 2), names):
        given = arguments(torch.float32, biases=True)
        call(given, *wanted).backward(dy)
        assert {n for n in names if given[n].grad is not None} == set(wanted)
        for n in wanted:
            way = n, n == "w" and not {"x", "gate_up_bias"}.isdisjoint(wanted)
            assert_same_bits([given[n].grad], [first.setdefault(way, given[n].grad)])
            torch.testing.assert_close(
                given[n].grad.double(),
                expected[n],
                rtol=1e-4,
                atol=1e-4 * expected[n].abs().max().item(),
            )


def test_checkpoints_run_the_forward_again():
    given, again = arguments(), arguments()
    call(given, "x", "w").sum().backward()
    again = {n: t.requires_grad_() if n in ("x", "w") else t for n, t in again.items()}
    values = list(again.values())
    assert (
        count_flops(
            lambda: checkpoint(OPS.expert_mlp, *values, use_reentrant=False).sum().backward()
        )
        == 3 * FORWARD
    )
    assert_same_bits([again["x"].grad, again["w"].grad], [given["x"].grad, given["w"].grad])


def test_what_was_kept_must_not_be_written():
    given = arguments()
    y = call(given, "x")
    given["w"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, TOKENS, HIDDEN)], ids=["vector", "batch"])
@pytest.mark.parametrize("name", ["expert_mlp", "scaled_swiglu"])
def test_a_result_may_be_written(name, shape):
    """As `y += shared_expert(x)` does. Whatever the number of dimensions."""
    if name == "expert_mlp":
        given = arguments(torch.float32)
        if len(shape) == 1:
            given |= {"ids": given["ids"][:1], "w": given["w"][:1]}
        x, f = (
            given.pop("x")[: given["ids"].shape[0]].reshape(shape),
            lambda x: OPS.expert_mlp(x, **given),
        )
    else:
        x, f = random(*shape), OPS.scaled_swiglu
    want, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    (f(want) * 2 + 1).square().sum().backward()
    written = f(found)
    written.mul_(2).add_(1).square().sum().backward()
    assert_same_bits(found.grad, want.grad)


def test_there_are_no_second_derivatives():
    """The backward reads what the forward made without a graph."""
    given = arguments(torch.float32)
    with pytest.raises(UnsupportedError, match="backward: create_graph=True; expected first deriv"):
        torch.autograd.grad(call(given, "x").sum(), given["x"], create_graph=True)


def test_gradients_of_a_program():
    """`fusion_moe.run` tracks them as the operation `run` does, on every target."""
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[-1, 8], dtype="f32")
    fd.add_output(fd.ops.mul(fd.ops.relu(x), 3.0))
    a = random(4, 8).requires_grad_()
    (y,) = fusion_moe.run(fd.fusion(), [a])
    y.sum().backward()
    assert torch.equal(a.grad, 3.0 * (a > 0))
    with torch.no_grad():
        assert not fusion_moe.run(fd.fusion(), [a])[0].requires_grad


def test_trained_weights_cost_a_product_each():
    """fprop, dgrad and wgrad once. FC2's wgrad alone keeps the activation, half as wide as FC1's
    result; with FC1's that makes it again.
    """
    x, ids, w = (arguments()[name] for name in ("x", "ids", "w"))
    up, down = (
        random(GROUPS, 2 * INNER, HIDDEN, dtype=x.dtype, seed=4),
        random(GROUPS, HIDDEN, INNER, dtype=x.dtype, seed=5),
    )
    first, second = 2 * ROWS * 2 * INNER * HIDDEN, 2 * ROWS * INNER * HIDDEN
    named = {"x": x, "ids": ids, "w": w, "up": up, "down": down}
    for wanted, flops, saved in (
        ((up,), second + first, ["x", "w", "down", *INDICES, PRE_ACTIVATION]),
        ((down,), second, ["w", *INDICES, ("bfloat16", ROWS, INNER)]),
        (
            (x, w, up, down),
            2 * (first + second),
            ["x", "w", "up", "down", *INDICES, PRE_ACTIVATION],
        ),
        ((x, up, down), 2 * (first + second), ["x", "w", "up", "down", *INDICES, PRE_ACTIVATION]),
    ):
        for t in (x, w, up, down):
            t.requires_grad_(any(t is v for v in wanted))
        assert (
            count_flops(
                lambda: (
                    OPS.fused_experts(x, ids, w, [up], [down], weight_format="bf16")
                    .sum()
                    .backward()
                )
            )
            == FORWARD + flops
        )
        assert (
            kept_by(lambda: OPS.fused_experts(x, ids, w, [up], [down], weight_format="bf16"), named)
            == saved
        )
