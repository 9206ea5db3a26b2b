"""Modules that order their weights by themselves, on a CPU whose kernels read the layout of
CUDA's.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from experts import experts

import fusion_moe
from fusion_moe import backends, options
from fusion_moe.distributed.shares import keep_features
from fusion_moe.layouts import W16x64
from fusion_moe.nn import GroupedSwiGLU, QuantizedLinear
from fusion_moe.nn.frozen import packed
from fusion_moe.nn.frozen.packed import PackedModule, say_once

E, H, I = 3, 64, 96


@pytest.fixture
def pretended(monkeypatch):
    cpu = backends.TARGETS["cpu"]
    other = backends.backend_of(cpu), replace(cpu, weight_layout="w16x64")
    monkeypatch.setitem(backends._registered, "cpu", other)


def call(module) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return module(
        torch.randn(5, H, generator=g).bfloat16(),
        torch.randint(0, E, (5, 2), generator=g),
        torch.ones(5, 2),
    )


def same_bytes(a, b) -> bool:
    return all(
        torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))
        for k in b
    )


def test_the_first_call_orders_and_state_dicts_stay_linear(pretended):
    module = experts(E, H, I)
    before, copies = module.state_dict(), {k: t.clone() for k, t in module.state_dict().items()}
    with options.override(order_weights=False):
        want = call(module)
    assert module.weight_layout == "linear"
    torch.testing.assert_close(call(module), want, rtol=2e-2, atol=2e-2)
    assert module.weight_layout == "w16x64"
    assert same_bytes(before, copies)  # what was read before is as it was
    assert same_bytes(module.state_dict(), copies)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_without_gradients(pretended, mode):
    module = experts(E, H, I)
    with mode():
        call(module)
    assert module.weight_layout == "w16x64"
    call(module)


def test_every_module_with_encoded_weights(pretended):
    layers = GroupedSwiGLU.from_float(*(torch.ones(E, I, H) for _ in range(2)), torch.ones(E, H, I))
    layers(torch.ones(3, H).bfloat16(), torch.tensor([1, 2, 3], dtype=torch.int32))
    assert {m.weight_layout for m in layers.modules() if isinstance(m, PackedModule)} == {"w16x64"}
    one = QuantizedLinear(
        experts(1, H, I).weight_of("down").of(t[0] for t in experts(1, H, I).weight_of("down"))
    )
    one(torch.ones(2, I).bfloat16())
    assert one.weight_layout == "w16x64"


def test_what_moves_orders(pretended):
    with torch.device("meta"):
        module = experts(E, H, I)
    assert module.weight_layout == "linear"
    assert module.to_empty(device="cpu").weight_layout in ("linear", "w16x64")
    real = experts(E, H, I)
    fusion_moe.prepare_(real, "cuda")
    assert real.to("meta").weight_layout == "linear"


def test_tracing_leaves_them(pretended):
    module = experts(E, H, I)
    torch.export.export(
        module,
        (torch.zeros(5, H).bfloat16(), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)),
    )
    assert module.weight_layout == "linear"
    with torch.no_grad():
        fusion_moe.explain(
            module,
            torch.zeros(5, H).bfloat16(),
            torch.zeros(5, 2, dtype=torch.long),
            torch.ones(5, 2),
        )
    assert module.weight_layout == "linear"


def test_on_a_cpu_nothing_happens():
    module = experts(E, H, I)
    call(module)
    assert module.weight_layout == "linear"


def test_what_has_no_order_is_said_once(pretended, monkeypatch, caplog):
    monkeypatch.setattr(W16x64, "why_not", lambda *_: "nvfp4 has no order")
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            call(experts(E, H, I))
    (said,) = (r.getMessage() for r in caplog.records if "linear layout" in r.getMessage())
    assert said.startswith("weights stay in the linear layout: NVFP4Experts: nvfp4 has no order")


def test_shares_of_features_are_cut_from_the_linear_layout(pretended):
    module, ordered = experts(E, H, I), experts(E, H, I)
    fusion_moe.prepare_(ordered, "cuda")
    for m in (module, ordered):
        keep_features(m, 1, 2)
    states = [
        {key: pieces.of_rank for key, pieces in m.state_dict().items()} for m in (ordered, module)
    ]
    assert same_bytes(*states)
    call(ordered)
    assert ordered.weight_layout == "w16x64"


def test_without_memory_they_stay_linear(pretended, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("no memory for the weights")

    module = experts(E, H, I)
    want = module.state_dict()
    monkeypatch.setattr(packed, "_empty", full)
    call(module)
    assert module.weight_layout == "linear"
    assert same_bytes(module.state_dict(), want)
    assert (
        "weights stay in the linear layout: NVFP4Experts: no memory for the weights" in caplog.text
    )


def test_threads_wait_for_the_first_call(pretended):
    want = call(experts(E, H, I))
    module = experts(E, H, I)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, want) for y in pool.map(call, [module] * 8))
