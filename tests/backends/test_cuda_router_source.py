"""The CUDA sources of routers, compiled with NVRTC: alone, with the routing of few tokens, in front
of experts.
"""

from __future__ import annotations

import pytest
import torch
from test_cuda_source import emitted, launches

from fusion_moe import FusionDefinition
from fusion_moe.arch import H200
from fusion_moe.backends.cuda.launch import build
from fusion_moe.definitions.operations import SPECS, bind, eager_types, fusion_of
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.runtime import nvrtc

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
]
GROUPED = {"scoring": "sigmoid", "n_group": 8, "topk_group": 4, "best_of_group": 2}


def router(
    experts: int = 128,
    k: int = 8,
    dtype: str = "bf16",
    bias: bool = False,
    route: int | None = None,
    **how,
) -> Fusion:
    """Logits to ids and weights of both kinds; route: the first of half of the experts, or -1 for
    all of them.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    logits = fd.define_tensor(shape=[t, experts], dtype=dtype)
    ids = fd.ops.topk_ids(
        logits, fd.define_tensor(shape=[experts], dtype="f32") if bias else 0, k=k, **how
    )
    made = [
        ids,
        *(
            fd.ops.topk_weights(logits, ids, scoring=how.get("scoring", "softmax"), renormalize=r)
            for r in (False, True)
        ),
    ]
    if route is not None:
        local = {} if route < 0 else {"first_expert": route}
        made += fd.ops.route(
            ids, groups=fd.define_groups("g", experts if route < 0 else experts // 2), **local
        )
    for v in made:
        fd.add_output(v)
    return fd.fusion()


def names(fusion: Fusion, tokens: int) -> list[str]:
    """The kernels of a fusion of one segment, compiled."""
    (kernel,) = emitted(fusion)
    assert kernel.backend == "cuda", kernel.why
    found = launches(kernel.launch.source, tokens)
    assert all(build(x, H200).stat().st_size for x in found)
    return [x.name for x in found]


CASES = {
    "qwen3": router(),
    "one expert": router(1, 1),
    "all experts": router(12, 12, "f32", bias=True),
    "gpt-oss": router(32, 4, "f16"),
    "deepseek-v3": router(256, 8, "f32", bias=True, **GROUPED),
    "groups without a bias": router(160, 6, "f32", n_group=8, topk_group=3),
    "as many as there may be": router(512, 32),
}


@pytest.mark.parametrize("case", CASES)
def test_a_choice_and_its_weights_are_one_kernel(case):
    assert names(CASES[case], 3) == ["topk_ids"]


@pytest.mark.parametrize("first", [-1, 32])
def test_few_tokens_are_routed_in_the_same_kernel(first):
    fusion = router(route=first)
    assert [names(fusion, t) for t in (1, 8, 16)] == [["topk_route"]] * 3
    assert names(fusion, 17) == ["topk_ids", "route"]
    assert names(router(512, 32, route=-1), 16) == ["topk_route"]


def test_derivatives():
    fd = FusionDefinition()
    t = fd.define_size("t")
    logits, ids, dw = (
        fd.define_tensor(shape=[t, n], dtype=d) for n, d in ((128, "bf16"), (8, "i64"), (8, "f32"))
    )
    fd.add_output(fd.ops.topk_weights_backward(logits, ids, dw))
    assert names(fd.fusion(), 3) == ["topk_weights_backward"]


@pytest.mark.parametrize("experts", [128, 33])
def test_losses(experts):
    """Forward and backward: nothing is left to the reference."""
    logits, counts = torch.randn(3, experts).bfloat16(), torch.ones(experts, dtype=torch.int64)
    for name, args in {
        "fused_compute_score_for_moe_aux_loss": (logits, 8, "softmax"),
        "fused_moe_aux_loss": (logits, counts, torch.tensor(3), experts, 8, 0.01),
        "moe_z_loss": (logits, 0.001),
    }.items():
        call = bind(SPECS[name], args, {})
        made = differentiate(fusion_of(name, eager_types(call), call.others), (0,))
        for fusion in made.forward, made.backward:
            for kernel in emitted(fusion):
                assert kernel.backend == "cuda", kernel.why
                for x in launches(kernel.launch.source, 9000):
                    assert build(x, H200).stat().st_size


def test_in_front_of_experts():
    """The kernel that routes is the first of the product's segment, which does not look for its
    tiles in ids.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    x, logits = (fd.define_tensor(shape=[t, n], dtype="bf16") for n in (64, 16))
    w = fd.define_tensor(shape=[16, 64, 64], dtype="bf16", role="weight")
    ids = fd.ops.topk_ids(logits, 0, k=2)
    weights = fd.ops.topk_weights(logits, ids, renormalize=True, dtype="bf16")
    ends, row_of, slot_of = fd.ops.route(ids, groups=fd.define_groups("g", 16))
    y = fd.ops.cast(fd.ops.grouped_mm(fd.ops.index_select(x, row_of, dim=0), w, ends), dtype="bf16")
    fd.add_output(fd.ops.cast(fd.ops.combine(y, slot_of, weights), dtype="bf16"))
    (kernel,) = emitted(fd.fusion())
    assert kernel.backend == "cuda", kernel.why
    found = launches(kernel.launch.source, 1)
    assert found[0].name == "topk_route"
    assert "FewIds" not in found[1].text
    assert all(build(x, H200).stat().st_size for x in found)


def test_more_than_a_warp_holds_is_left_to_the_reference():
    kernel = emitted(router(1024))[0]
    assert kernel.backend == "reference"
    expected = "up to 512 experts, 32 a token, 32 groups of experts"
    assert kernel.why == (
        f"in plain torch: topk_ids of 8 of 1024 experts has no kernel here; expected {expected}"
    )
