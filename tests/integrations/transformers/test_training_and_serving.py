"""What trains and what serves it in order="row": the same bits for the same tokens wherever both
have one format, whatever the batch; otherwise the weights were rounded once. docs/guides/rl.md has
this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from row_order import Rows, tokens
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe
import fusion_moe.transformers
from fusion_moe import options
from fusion_moe.encodings import ENCODINGS, quantize
from fusion_moe.integrations.serving import invariant, serve_
from fusion_moe.nn import Experts, add_lora_, qat_, quantize_

E, K, H, I, T = 4, 2, 384, 128, 21
CONFIGS = {
    "fp8": fusion_moe.FP8Config,
    "nvfp4": fusion_moe.NVFP4Config,
    "mxfp4": fusion_moe.MXFP4Config,
    "int4": fusion_moe.INT4Config,
}
TRAINS: Mapping[str, Callable[[nn.Sequential], Any]] = {
    "bf16 master": lambda model: None,
    "QAT, nvfp4": lambda model: qat_(model, "nvfp4"),
    "QAT, mxfp4": lambda model: qat_(model, "mxfp4"),
    **{f"frozen, {name}": lambda m, name=name: quantize_(m, name) for name in CONFIGS},
}
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)]
pytestmark = pytest.mark.slow


def master() -> nn.Sequential:
    """Experts of transformers in bf16, computed by this library."""
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
    )
    experts = Qwen3MoeExperts(config).bfloat16()
    g = torch.Generator().manual_seed(0)
    for p in experts.parameters():
        p.data = torch.randn(p.shape, generator=g).bfloat16() / 8
    config._experts_implementation = "fusion_moe"
    return nn.Sequential(experts)


def served(encoding: str, dtype: torch.dtype, config: Any = None) -> Experts:
    """As a plug-in makes it of the master's weights, on disk in an encoding."""
    model = master()
    if encoding == "bf16":
        weights = [quantize(p.detach(), ENCODINGS["bf16"]) for p in model[0].parameters()]
    else:
        quantize_(model, config or CONFIGS[encoding]())
        weights = [model[0].weight_of(name) for name in ("gate_up", "down")]
    made = Experts(*weights)
    with invariant(True):
        serve_(made, dtype, K)
    return made


def rollout(experts: Experts, rows: Rows, adapters: Mapping[str, Tensor] | None = None) -> Tensor:
    """Tokens one by one, which give what they give together."""

    def call(some: slice) -> Tensor:
        x, ids, w = (t[some] for t in rows)
        of = {"lora_of": torch.ones(len(x), dtype=torch.int64), **adapters} if adapters else None
        return experts(x, ids.int(), w, of)

    with invariant(True), torch.no_grad():
        alone = torch.cat([call(slice(i, i + 1)) for i in range(T)])
        assert torch.equal(call(slice(None)), alone)
    return alone


def step(model: nn.Sequential, rows: Rows) -> Tensor:
    """The forward of a training step."""
    x, ids, w = rows
    with options.override(order="row"):
        y = model[0](x.clone().requires_grad_(), ids, w.clone().requires_grad_())
    assert y.requires_grad
    return y.detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", ["bf16", *CONFIGS])
def test_every_pair(encoding: str, dtype: torch.dtype) -> None:
    """One format, one number; weights of another format are the master's, rounded once."""
    rows = tokens(T, E, K, H, dtype, 0)
    got, equal = rollout(served(encoding, dtype), rows), []
    for name, change in TRAINS.items():
        model = master()
        if name.startswith("QAT") and encoding in name:  # the rule of the served weights
            qat_(model, encoding, scales=CONFIGS[encoding]().scales)
        else:
            change(model)
        if torch.equal(step(model, rows), got):
            equal.append(name)
    # the master rounds activations to its own dtype
    masters = ["bf16 master"] if (encoding, dtype) == ("bf16", torch.bfloat16) else []
    assert equal == masters + [n for n in TRAINS if n.endswith(f", {encoding}")]


@pytest.mark.parametrize("rule", ["max", "four_over_six", "mse"])
def test_every_rule_for_scales_of_qat(rule: str) -> None:
    rows, model = tokens(T, E, K, H, torch.bfloat16, 0), master()
    qat_(model, "nvfp4", scales=rule)
    experts = served("nvfp4", torch.bfloat16, fusion_moe.NVFP4Config(scales=rule))
    assert torch.equal(step(model, rows), rollout(experts, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", CONFIGS)
def test_adapters(encoding: str, dtype: torch.dtype) -> None:
    """Beside frozen weights: in one of two slots of an engine, with room for a higher rank, whose
    factors have the dtype of activations. In bf16 they are rounded once, here to themselves.
    """
    rows, model, rank, room = tokens(T, E, K, H, dtype, 0), master(), 4, 8
    quantize_(model, encoding)
    add_lora_(model, rank=rank, alpha=2.0 * rank)
    g, slots = torch.Generator().manual_seed(1), {}
    for name in "gate_up", "down":
        adapter = model[0].adapter(name)
        for p in adapter.parameters():
            p.data = (torch.randn(p.shape, generator=g) / 16).bfloat16().float()
        a = torch.zeros(E, 2 * room, adapter.A.shape[2], dtype=dtype)
        b = torch.zeros(E, adapter.B.shape[1], 2 * room, dtype=dtype)
        a[:, room : room + rank], b[..., room : room + rank] = adapter.A, adapter.B * adapter.scale
        of = torch.arange(2).repeat_interleave(room)
        slots |= {f"{name}_lora_a": a, f"{name}_lora_b": b, f"{name}_lora_of": of}
    experts = served(encoding, dtype)
    found = rollout(experts, rows, slots)
    assert torch.equal(step(model, rows), found)
    assert not torch.equal(rollout(experts, rows), found)
