"""Experts of which others hold more: `first_expert` of `route`, `fused_experts` and the modules.
Shares add up to the whole.

Slots with the id -1 are of no expert, whoever holds which.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from bad_calls import messages
from cover import few
from experts import experts, float_weights
from torch import Tensor
from ways import HOW, every_way

import fusion_moe
from fusion_moe import ops
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.ir.types import DTYPES
from fusion_moe.nn.frozen.custom import in_steps
from fusion_moe.runtime import memory

E, T, K, H, I = 8, 21, 3, 32, 16
SHARES = ((0, 3), (3, 4), (7, 1))  # first, count
NOWHERE = torch.tensor([-1, E, 2**40])  # ids of no expert


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and w of small integers and powers of two."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (T, H), generator=g).to(dtype)
    ids = torch.rand(T, E, generator=g).topk(K).indices
    ids[4] = NOWHERE
    return x, ids, 2.0 ** -torch.randint(0, 3, (T, K), generator=g).to(dtype)


def parts(count: int) -> list[list[Tensor]]:
    """Those of gate_up and down of experts in NVFP4."""
    made = experts(count, hidden=H, inner=I)
    return [list(made.weight_of(name)) for name in made.projections]


@pytest.mark.slow
@pytest.mark.parametrize("scale_on", ["output", "input"])
@pytest.mark.parametrize("bias", [False, True])
def test_shares_add_up_forward_and_backward(scale_on, bias):
    x, ids, w = (t.requires_grad_() if t.is_floating_point() else t for t in inputs())
    biases = (torch.randn(E, 2 * I), torch.randn(E, H)) if bias else ()
    parameters = [p.double().requires_grad_() for p in (*float_weights(E, H, I), *biases)]

    def partial_sum(first: int, count: int) -> Tensor:
        up, down, *biases = (p[first : first + count] for p in parameters)
        return ops.fused_experts(
            x,
            ids,
            w,
            [up],
            [down],
            *biases,
            weight_format="f64",
            scale_on=scale_on,
            first_expert=first,
        )

    whole, seed = partial_sum(0, E), torch.randn(T, H).double()
    want = torch.autograd.grad(whole, [x, w, *parameters], seed)
    total, got = torch.zeros_like(whole), [torch.zeros_like(t) for t in want]
    for first, count in SHARES:
        y = partial_sum(first, count)
        found = torch.autograd.grad(y, [x, w, *parameters], seed)
        outside = (ids < first) | (ids >= first + count)
        assert not y[outside.all(1)].any()
        assert not found[1][outside].any()
        total, got = total + y, [a + b for a, b in zip(got, found, strict=True)]
    torch.testing.assert_close([total, *got], [whole, *want], rtol=1e-12, atol=1e-12)
    # the same of experts that are all here, but for token 4
    everyone = torch.where(torch.isin(ids, NOWHERE), 0, ids)
    kept = ops.fused_experts(
        x,
        everyone,
        w,
        *([p] for p in parameters[:2]),
        *parameters[2:],
        weight_format="f64",
        scale_on=scale_on,
    )
    kept = kept * (torch.arange(T) != 4)[:, None]
    torch.testing.assert_close(whole, kept, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4(target, dtype):
    """A share's rows are those of the whole with other weights at zero."""
    x, ids, w = inputs(dtype)
    gate_up, down = parts(E)
    ids[4] = 0
    with fusion_moe.options.override(target=target):
        for first, count in SHARES:
            local = [[part[first : first + count] for part in parts] for parts in (gate_up, down)]
            inside = (ids >= first) & (ids < first + count)
            want = ops.fused_experts(
                x, ids, torch.where(inside, w, 0), gate_up, down, weight_format="nvfp4"
            )
            found = ops.fused_experts(x, ids, w, *local, first_expert=first, weight_format="nvfp4")
            torch.testing.assert_close(found, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
            assert found[~inside.any(1)].equal(torch.zeros_like(x[~inside.any(1)]))
        with pytest.raises(GroupsError, match="pass first_expert"):
            ops.fused_experts(x, ids, w, *local, weight_format="nvfp4")


def places_of(here: list[int], experts: int = E) -> Tensor:
    """Experts `here` lie at 0, 1, ..., all others elsewhere."""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(here), dtype=torch.int32)
    return expert_map


def poison() -> None:
    """Makes the memory that a thread keeps for calls hold NaN."""
    held, _ = memory._of_thread.kept
    held.fill_(255)


@pytest.fixture
def poisoned():
    """All memory holds NaN when it is allocated."""
    torch.use_deterministic_algorithms(True)  # which fills it
    yield
    torch.use_deterministic_algorithms(False)


LORA = {
    "gate_up_lora_a": (4, H),
    "gate_up_lora_b": (2 * I, 4),
    "down_lora_a": (4, I),
    "down_lora_b": (H, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["free", "row"])
@pytest.mark.parametrize(
    "more",
    few(
        [
            {"weight_format": "nvfp4"},
            {"weight_format": "nvfp4", "lora": True, "bias": True},
            {"weight_format": "nvfp4", "scale_on": "input"},
            {"weight_format": "nvfp4", "activation_format": "int8"},
            {"weight_format": "bf16"},
            {"weight_format": "f32", "bias": True},
        ],
        3,
    ),
    ids=str,
)
def test_no_memory_is_read_for_experts_elsewhere(more, order, poisoned):
    """Forward and backward, in memory of NaN: what the reference computes of zeros."""
    more, g = dict(more), torch.Generator().manual_seed(1)
    dtype = DTYPES.get(more["weight_format"], torch.bfloat16)
    encoding = ENCODINGS[more["weight_format"]]
    weights = [
        [*quantize(w[3:6], encoding)] if encoding.scales else [w[3:6].to(dtype).requires_grad_()]
        for w in float_weights(E, H, I)
    ]
    shapes = dict(LORA) if more.pop("lora", False) else {}
    shapes |= {"gate_up_bias": (2 * I,), "down_bias": (H,)} if more.pop("bias", False) else {}
    more |= {
        name: torch.randn(3, *shape, generator=g).to(dtype).requires_grad_("lora" in name)
        for name, shape in shapes.items()
    }
    x, ids, w = inputs(dtype)
    given = [t.requires_grad_() for t in (x, w)]
    given += [t for t in (*chain(*weights), *more.values()) if getattr(t, "requires_grad", False)]
    # no derivative has activations in 8 bits
    trains = "activation_format" not in more

    def step() -> list[Tensor]:
        poison()
        y = ops.fused_experts(x, ids, w, *weights, first_expert=3, **more)
        poison()
        return [y, *torch.autograd.grad(y, given, torch.ones_like(y))] if trains else [y]

    with fusion_moe.options.override(target="reference"), torch.set_grad_enabled(trains):
        want = step()
    with fusion_moe.options.override(target="cpu", order=order), torch.set_grad_enabled(trains):
        found = step()
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("here", [[5, 0, 6], [2], list(range(E))[::-1]], ids=str)
def test_experts_in_any_places(target, here):
    """A table says which expert each weight is: slots of all others add nothing."""
    x, ids, w = inputs(torch.bfloat16)
    ids[4], ids[7, 1] = 0, -1
    weights = parts(E)
    picked = [[part[here] for part in parts] for parts in weights]
    with fusion_moe.options.override(target=target):
        kept = torch.where(torch.isin(ids, torch.tensor(here)), ids, -1)
        want = ops.fused_experts(x, kept, w, *weights, weight_format="nvfp4")
        found = ops.fused_experts(
            x, ids, w, *picked, weight_format="nvfp4", expert_map=places_of(here)
        )
        assert found.any()
        assert found.equal(want)
        nowhere = torch.full_like(places_of(here), -1)
        nothing = ops.fused_experts(x, ids, w, *picked, weight_format="nvfp4", expert_map=nowhere)
        assert not nothing.any()
        ids[0, 0] = E
        with pytest.raises(GroupsError, match=f"ids\\[0, 0\\] = {E} is out of range"):
            ops.fused_experts(x, ids, w, *picked, weight_format="nvfp4", expert_map=places_of(here))


def test_bad_places(golden):
    x, ids, w = inputs(torch.bfloat16)
    ids[4] = 0
    call = partial(ops.fused_experts, x, ids, w, *parts(1), weight_format="nvfp4")
    cases = {
        "a dtype": lambda: call(expert_map=places_of([0]).long()),
        "a shape": lambda: call(expert_map=places_of([0])[None]),
        "two ways": lambda: call(expert_map=places_of([0]), first_expert=0),
        "a place": lambda: call(expert_map=places_of([0, 5])),
    }
    golden(messages(cases))


@every_way
def test_places_in_every_way(how):
    x, ids, w = inputs(torch.bfloat16)
    ids[4] = 0
    args = x, ids, w, places_of([6, 1]), *(part for one in parts(2) for part in one)

    def call(x: Tensor, ids: Tensor, w: Tensor, expert_map: Tensor, *weights: Tensor) -> Tensor:
        up, down = weights[:3], weights[3:]
        return ops.fused_experts(x, ids, w, up, down, weight_format="nvfp4", expert_map=expert_map)

    want = call(*args)
    found = HOW[how](call)(*args)
    assert want.any()
    assert found.equal(want)


@every_way
@pytest.mark.parametrize("first", [3, None])
def test_every_way(how, first):
    x, ids, w = inputs(torch.bfloat16)
    args = (
        x,
        ids if first else ids.clamp(-1, 1),
        w,
        *(part for parts_of_one in parts(2) for part in parts_of_one),
    )
    want = ops.expert_mlp(*args, first_expert=first)
    found = HOW[how](lambda *args: ops.expert_mlp(*args, first_expert=first))(*args)
    assert want.any()
    assert found.equal(want)


def padded(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The same inputs, with single slots and whole tokens of no expert; what the last token, which
    is of none, has is NaN.
    """
    x, ids, w = inputs(dtype)
    ids[4], ids[7, 1], ids[12:14, 2], ids[-1], x[-1] = -1, -1, -1, -1, torch.nan
    return x, ids, w


@pytest.mark.slow
@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize(
    "more", [{}, {"scale_on": "input"}, {"activation_format": "int8"}, {"bias": True}], ids=str
)
def test_slots_of_no_expert(target, more):
    """They add nothing: each token has the sum of its other slots."""
    x, ids, w = padded(torch.bfloat16)
    biases = (
        (torch.randn(E, 2 * I).bfloat16(), torch.randn(E, H).bfloat16()) if more.get("bias") else ()
    )
    weights, more = (
        [*parts(E), *biases],
        {"weight_format": "nvfp4"}
        | {name: value for name, value in more.items() if name != "bias"},
    )
    with fusion_moe.options.override(target=target):
        found = ops.fused_experts(x, ids, w, *weights, **more)
        assert found.equal(ops.fused_experts(x, ids, w, *weights, first_expert=0, **more))
        for token, slots in enumerate(ids):
            kept = slots >= 0
            want = ops.fused_experts(
                x[[token]], slots[None, kept], w[token, None, kept], *weights, **more
            )
            torch.testing.assert_close(found[[token]], want, rtol=2**-7, atol=1e-4)
        ids[0, 0] = -2
        with pytest.raises(
            GroupsError,
            match=r"ids\[0, 0\] = -2 is out of range .*, or -1 for "
            r"no expert",
        ):
            ops.fused_experts(x, ids, w, *weights, **more)


@pytest.mark.parametrize("scale_on", ["output", "input"])
def test_gradients_of_slots_of_no_expert(scale_on):
    """Those of their weights are zero, and they have no part in others, as with weights of zero."""
    x, ids, w = padded(torch.float64)
    # an expert of zeros has its biases
    biases = (torch.randn(E, 2 * I), torch.randn(E, H)) if scale_on == "output" else ()
    parameters = [p.double().requires_grad_() for p in (*float_weights(E, H, I), *biases)]
    none, seed = ids == -1, torch.randn(T, H).double()

    def gradients(ids: Tensor, w: Tensor) -> list[Tensor]:
        at = [t.detach().clone().requires_grad_() for t in (x[:-1], w[:-1])]
        up, down, *more = parameters
        y = ops.fused_experts(
            at[0], ids[:-1], at[1], [up], [down], *more, weight_format="f64", scale_on=scale_on
        )
        return list(torch.autograd.grad(y, [*at, *parameters], seed[:-1]))

    found, want = gradients(ids, w), gradients(ids.clamp(0), w.masked_fill(none, 0))
    assert not found[1][none[:-1]].any()
    want[1].masked_fill_(none[:-1], 0)  # there it says how much a first expert would count
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_module_of_local_experts():
    x, ids, w = inputs(torch.bfloat16)
    module, whole = experts(E, hidden=H, inner=I), experts(E, hidden=H, inner=I)
    module.first_expert = 1
    assert "experts=8 from 1" in repr(module)
    inside = (ids >= 1) & (ids <= E)  # NOWHERE has E too, the last one here
    want = whole(x, torch.where(inside, ids - 1, 0), torch.where(inside, w, 0))
    torch.testing.assert_close(module(x, ids, w), want)


def test_a_norm_after_no_expert_adds_nothing():
    x, ids, w = padded(torch.float64)
    up, down = (torch.randn(E, *shape).double() for shape in ((I, H), (H, I)))
    products = (
        lambda rows, ends, weight=weight: ops.grouped_mm(rows, [weight], ends, weight_format="f64")
        for weight in (up, down)
    )
    function = SimpleNamespace(
        has_gate=False,
        act_fn=torch.relu,
        has_post_expert_norm=True,
        post_expert_norm=lambda y: y + 1,
    )
    found = in_steps(function, x, ids, w, E, *products)
    for token, slots in enumerate(ids):
        each = [
            w[token, k] * (torch.relu(x[token] @ up[e].T) @ down[e].T + 1)
            for k, e in enumerate(slots.tolist())
            if e >= 0
        ]
        torch.testing.assert_close(found[token], sum(each, torch.zeros(H).double()))
