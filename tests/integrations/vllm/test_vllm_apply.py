"""Layers of experts from vLLM's parameters, without vLLM: what `apply` returns, and that a CUDA
graph captures it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_layers import expected
from stubs import installed

from fusion_moe.encodings import MXFP4, NVFP4, Quantized, quantize

E, H, I, TOKENS, SLOTS = 8, 128, 64, 33, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def plugin() -> Iterator[Callable[[str], Any]]:
    """plugin("modelopt"): a module of the plug-in, beside stubs of vLLM."""
    with installed():
        yield lambda name: importlib.import_module(f"fusion_moe.integrations.vllm.{name}")


def configuration(activation: str, has_bias: bool) -> Any:
    """As vLLM's of a layer."""
    return SimpleNamespace(
        moe_parallel_config=SimpleNamespace(
            use_all2all_kernels=False,
            all2all_backend="",
            dp_size=1,
            is_sequence_parallel=False,
            enable_eplb=False,
        ),
        is_lora_enabled=False,
        moe_backend="auto",
        experts_per_token=SLOTS,
        has_bias=has_bias,
        tp_rank=0,
        w13_num_shards=1 if activation.endswith("_no_mul") else 2,
        swiglu_limit=None,
        activation=SimpleNamespace(value=activation),
        in_dtype=torch.bfloat16,
    )


def empty_layer(
    method: Any,
    experts: int,
    device: str,
    expert_map: torch.Tensor | None = None,
    hidden: int = H,
    inner: int = I,
) -> Any:
    owner = torch.nn.Module()
    owner.layer_name, owner.apply_router_weight_on_input, owner.expert_map = (
        "model.layers.0.mlp.experts",
        False,
        expert_map,
    )
    with torch.device(device):
        method.create_weights(
            owner, experts, hidden, inner, torch.bfloat16, weight_loader=lambda *_: None
        )
    return owner


def load(owner: Any, here: slice = slice(None), **loaded: torch.Tensor) -> None:
    """As vLLM's loader: into what is there."""
    for name, tensor in loaded.items():
        getattr(owner, name).data.copy_(tensor[here])


def _geglu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2)
    return F.gelu(gate, approximate="tanh") * up


FUNCTIONS: dict[str, Any] = {
    "silu": None,
    "gelu_tanh": _geglu,
    "relu2_no_mul": lambda up: up.relu().square(),
}


def modelopt(
    plugin: Any,
    device: str,
    expert_map: torch.Tensor | None = None,
    here: slice = slice(None),
    activation: str = "silu",
) -> tuple[Any, Any, Any]:
    """A method, its layer on a device, and the meaning of both: a function of x, ids and w."""
    moe = configuration(activation, False)
    method = plugin("modelopt").FusionMoeModelOptMethod(SimpleNamespace(), moe)
    g = torch.Generator().manual_seed(0)
    matrices = torch.tensor([1.0, 8.0])[: moe.w13_num_shards]
    up, down = (
        torch.randn(E, len(matrices), I, H, generator=g) * matrices[:, None, None],
        torch.randn(E, H, I, generator=g),
    )
    codes, scale, matrix = quantize(up, NVFP4)
    w13, w2 = (
        Quantized(codes.flatten(1, 2), scale.flatten(1, 2), matrix, encoding=NVFP4),
        quantize(down, NVFP4),
    )
    owner = empty_layer(method, len(range(E)[here]), device, expert_map)
    for name, weight in ("w13", w13), ("w2", w2):
        load(
            owner,
            here,
            **{
                f"{name}_{part}": t
                for part, t in zip(
                    ("weight", "weight_scale", "weight_scale_2"), weight, strict=True
                )
            },
        )
    alone = w13 if len(matrices) > 1 else Quantized(*w13[:2], matrix[:, 0], encoding=NVFP4)
    function = FUNCTIONS[activation]
    return method, owner, lambda x, ids, w: expected(x, ids, w, alone, w2, function=function)


def gpt_oss(plugin: Any, device: str) -> tuple[Any, Any, Any]:
    """The same, of gpt-oss: biases, gate and up interleaved, clamped."""
    method = plugin("mxfp4").FusionMoeGptOssMethod(configuration("swigluoai", True))
    g = torch.Generator().manual_seed(0)
    w13, w2 = (
        quantize(torch.randn(shape, generator=g), encoding=MXFP4)
        for shape in ((E, 2 * I, H), (E, H, I))
    )
    biases = {
        f"{name}_bias": 4 * torch.randn(E, n, generator=g).bfloat16()
        for name, n in (("w13", 2 * I), ("w2", H))
    }
    owner = empty_layer(method, E, device)
    load(owner, **biases)
    for name, weight in ("w13", w13), ("w2", w2):
        load(
            owner,
            **{
                f"{name}_{part}": t.view(torch.uint8)
                for part, t in zip(("weight", "weight_scale"), weight, strict=True)
            },
        )
    return (
        method,
        owner,
        lambda x, ids, w: expected(
            x, ids, w, w13, w2, **biases, interleave=1, limit=7.0, alpha=1.702, up_offset=1.0
        ),
    )


def routing(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x bf16[T, H], ids int32[T, k] of different experts, w float32[T, k]: what vLLM's routers
    return.
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=g)[:SLOTS] for _ in range(TOKENS)]).int()
    return (
        torch.randn(TOKENS, H, generator=g).bfloat16(),
        ids,
        torch.rand(TOKENS, SLOTS, generator=g),
    )


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Within a few roundings to bfloat16: of the activation between both products, and of the
    result.
    """
    return bool((found.cpu().double() - want).norm() <= 2**-7 * want.norm())


MAKERS = {
    "modelopt": modelopt,
    "gpt_oss": gpt_oss,
    "gelu": partial(modelopt, activation="gelu_tanh"),
    "no gate": partial(modelopt, activation="relu2_no_mul"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("device", DEVICES)
def test_layers(plugin: Any, make: Any, device: str) -> None:
    method, owner, meaning = make(plugin, device)
    method.process_weights_after_loading(owner)
    assert all(name.startswith("fusion_moe.") for name, _ in owner.named_parameters())
    x, ids, w = routing()
    found = method.apply(owner, *(t.to(device) for t in (x, w, ids)))
    assert found.dtype == torch.bfloat16
    assert near(found, meaning(x, ids, w))


def test_weights_are_not_copied(plugin: Any) -> None:
    """Of a size for large pages too."""
    method = plugin("mxfp4").FusionMoeGptOssMethod(configuration("swigluoai", True))
    owner = empty_layer(method, E, "cpu", hidden=1024, inner=512)
    loaded = [owner.w13_weight.data_ptr(), owner.w2_weight.data_ptr()]
    method.process_weights_after_loading(owner)
    assert [
        owner.fusion_moe.gate_up_proj.data_ptr(),
        owner.fusion_moe.down_proj.data_ptr(),
    ] == loaded


@pytest.mark.parametrize("device", DEVICES)
def test_under_batch_invariance_rows_are_alone(
    plugin: Any, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, owner, _ = modelopt(plugin, device)
    monkeypatch.setattr(sys.modules["vllm"].envs, "VLLM_BATCH_INVARIANT", True)
    with caplog.at_level("INFO", "vllm.fusion_moe"):
        method.process_weights_after_loading(owner)
    assert ", in row order" in caplog.text
    x, ids, w = (t.to(device) for t in routing())
    together = method.apply(owner, x, w, ids)
    alone = [method.apply(owner, *(t[i : i + 1] for t in (x, w, ids))) for i in range(TOKENS)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_add_up(plugin: Any, device: str) -> None:
    x, ids, w = routing()
    total = torch.zeros(TOKENS, H, dtype=torch.float64)
    for here in slice(0, 3), slice(3, E):
        expert_map = torch.full((E,), -1)
        expert_map[here] = torch.arange(len(range(E)[here]))
        method, owner, meaning = modelopt(plugin, device, expert_map, here)
        method.process_weights_after_loading(owner)
        total += method.apply(owner, *(t.to(device) for t in (x, w, ids))).cpu().double()
    assert near(total, meaning(x, ids, w))


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_graph_replays_with_other_routings(plugin: Any, make: Any) -> None:
    method, owner, _ = make(plugin, "cuda")
    method.process_weights_after_loading(owner)
    x, ids, w = (t.cuda() for t in routing())
    method.apply(owner, x, w, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = method.apply(owner, x, w, ids)
    for seed in range(2, 5):
        for into, new in zip((x, ids, w), routing(seed), strict=True):
            into.copy_(new)
        graph.replay()
        assert torch.equal(found, method.apply(owner, x, w, ids))
