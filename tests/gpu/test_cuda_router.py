"""Routers on a GPU: the ids of the reference, weights within a few units in the last place, and
rows sorted in the same kernel.
"""

from __future__ import annotations

import pytest
import torch

import fusion_moe
from fusion_moe import FusionDefinition
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate

pytestmark = pytest.mark.gpu
NAN, INF = float("nan"), float("inf")
GROUPED = {"scoring": "sigmoid", "n_group": 8, "topk_group": 4, "best_of_group": 2}
CASES = {
    "qwen3": (128, 8, "bf16", False, {}),
    "mixtral": (8, 2, "f32", False, {}),
    "gpt-oss": (32, 4, "f16", False, {}),
    "deepseek-v3": (256, 8, "f32", True, GROUPED),
    "deepseek-v2": (160, 6, "f32", False, {"n_group": 8, "topk_group": 3}),
    "softmax with a bias": (60, 4, "f32", True, {}),
    "one expert": (1, 1, "f32", False, {}),
    "all experts": (12, 12, "f32", False, {}),
    "as many as there may be": (512, 32, "bf16", False, {"scoring": "sigmoid"}),
}
TOKENS = [0, 1, 3, 8, 16, 17, 65, 300]


def router(
    experts: int, k: int, dtype: str, bias: bool, how: dict, first: int | None = None
) -> Fusion:
    """logits, bias -> ids, weights, renormalized weights, and where rows of groups end, are and
    lie.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    logits = fd.define_tensor(shape=[t, experts], dtype=dtype)
    ids = fd.ops.topk_ids(
        logits, fd.define_tensor(shape=[experts], dtype="f32") if bias else 0, k=k, **how
    )
    scoring = how.get("scoring", "softmax")
    made = [
        ids,
        *(
            fd.ops.topk_weights(
                logits, ids, scoring=scoring, renormalize=r, routed_scaling_factor=2.5
            )
            for r in (False, True)
        ),
    ]
    local = {} if first is None else {"first_expert": first}
    made += fd.ops.route(
        ids,
        groups=fd.define_groups("g", experts if first is None else max(1, experts // 2)),
        **local,
    )
    for v in made:
        fd.add_output(v)
    return fd.fusion()


def inputs(case: str, tokens: int) -> list[torch.Tensor]:
    experts, _, dtype, bias, _ = CASES[case]
    g = torch.Generator().manual_seed(tokens)
    logits = (
        torch.stack([torch.randperm(experts, generator=g) for _ in range(tokens)])
        if tokens
        else torch.empty(0, experts)
    )
    logits = (logits.float() / experts * 8 - 4).to(
        {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[dtype]
    )
    return [logits, torch.randn(experts, generator=g) / 4] if bias else [logits]


def check(fusion: Fusion, given: list[torch.Tensor]) -> None:
    found = fusion_moe.run(fusion, [t.cuda() for t in given])
    fusion_moe.synchronize()
    for a, b in zip(found, fusion.evaluate(*given), strict=True):
        if b.dtype == torch.float32:
            torch.testing.assert_close(a.cpu(), b, rtol=3e-6, atol=1e-30, equal_nan=True)
        else:
            assert a.cpu().equal(b)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("case", CASES)
def test_as_the_reference(case, tokens):
    check(router(*CASES[case]), inputs(case, tokens))


@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("first", [0, 3])
def test_local_experts(first, tokens):
    check(router(*CASES["qwen3"], first=first), inputs("qwen3", tokens))


@pytest.mark.parametrize("case", ["mixtral", "all experts", "qwen3", "deepseek-v2"])
def test_of_equal_numbers_the_first_is_chosen(case):
    """Few different numbers, both zeros, infinities, NaN."""
    experts, _, dtype, *_ = CASES[case]
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
    for most in 3, 4, 6, 7:
        picked = values[
            torch.randint(0, most, (50, experts), generator=torch.Generator().manual_seed(most))
        ]
        picked[0], picked[1], picked[2] = 0.0, -INF, values[most - 1]
        check(
            router(*CASES[case]), [picked.to(torch.bfloat16 if dtype == "bf16" else torch.float32)]
        )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_derivatives(scoring, renormalize):
    fd = FusionDefinition()
    t = fd.define_size("t")
    logits, ids = (
        fd.define_tensor(shape=[t, 128], dtype="f32"),
        fd.define_tensor(shape=[t, 8], dtype="i64"),
    )
    fd.add_output(
        fd.ops.topk_weights(
            logits, ids, scoring=scoring, renormalize=renormalize, routed_scaling_factor=2.5
        )
    )
    made = differentiate(fd.fusion(), (0,))
    x = torch.randn(37, 128)
    given, dw = [x, x.topk(8).indices], torch.randn(37, 8)
    check(made.forward, given)
    read = [*made.read(given, made.forward.evaluate(*given)), dw]
    (want,), (found,) = (
        made.backward.evaluate(*read),
        fusion_moe.run(made.backward, [v.cuda() for v in read]),
    )
    torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-6)


def test_the_operation_and_its_gradient():
    logits = torch.randn(40, 64, device="cuda").bfloat16().requires_grad_()
    weights, ids = fusion_moe.ops.topk_router(logits, 6, renormalize=True)
    plain = logits.detach().float().requires_grad_()
    assert plain.gather(1, ids).equal(plain.topk(6).values)
    want = plain.gather(1, ids).softmax(1)
    torch.testing.assert_close(weights, want, rtol=3e-6, atol=0)
    g = torch.randn_like(weights)
    weights.backward(g)
    want.backward(g)
    torch.testing.assert_close(logits.grad, plain.grad.bfloat16(), rtol=2**-7, atol=1e-5)


def test_wrong_ids_are_reported():
    fd = FusionDefinition()
    logits, ids = (
        fd.define_tensor(shape=[3, 8], dtype="f32"),
        fd.define_tensor(shape=[3, 2], dtype="i64"),
    )
    fd.add_output(fd.ops.topk_weights(logits, ids))
    fusion_moe.run(
        fd.fusion(), [torch.randn(3, 8, device="cuda"), torch.full((3, 2), 8, device="cuda")]
    )
    with pytest.raises(fusion_moe.errors.GroupsError):
        fusion_moe.synchronize()
