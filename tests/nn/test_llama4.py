"""Llama-4's layer: transformers' and thunder's converted, against the original module in float64 on
what the bytes mean.
"""

from __future__ import annotations

import copy
from typing import Any

import loops
import pytest
import torch
from bad_calls import messages
from torch import Tensor, nn
from ways import HOW, every_way

import fusion_moe
from fusion_moe.nn import Llama4MoE, NVFP4Experts, convert

transformers = pytest.importorskip("transformers")
ULP = 2.0**-8  # of bf16: what one rounding is off by, relatively
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def llama4(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return (
        transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SMALL | changes))
        .bfloat16()
        .eval()
    )


def layer(**changes: Any) -> nn.Module:
    """transformers' Llama4TextMoe."""
    return llama4(**changes).model.layers[0].feed_forward


def hidden(*lead: int, seed: int = 1) -> Tensor:
    return torch.randn(*lead, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(experts: NVFP4Experts) -> tuple[Tensor, Tensor]:
    """f64[E, 2I, H] and f64[E, H, I]: what the bytes of the experts mean."""
    return tuple(
        loops.decoded(*(part.detach() for part in experts.weight_of(name)))
        for name in experts.projections
    )


class InBf16(nn.Module):
    """A part of a layer that is not quantized: computed in bf16 in the reference too, so that both
    route alike.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        found = self.module(x.bfloat16())
        return tuple(t.double() for t in found) if isinstance(found, tuple) else found.double()


def reference(original: nn.Module, ours: Llama4MoE) -> nn.Module:
    """transformers' own layer in float64, with what the bytes of ours mean as its experts'
    weights.
    """
    other = copy.deepcopy(original).double()
    gate_up, down = weights(ours.experts)
    other.experts.gate_up_proj.data, other.experts.down_proj.data = (
        gate_up.mT.contiguous(),
        down.mT.contiguous(),
    )
    other.router, other.shared_expert = (
        InBf16(copy.deepcopy(original.router)),
        InBf16(copy.deepcopy(original.shared_expert)),
    )
    return other


# transformers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("call_by_call")
@every_way
def test_transformers_layer(how):
    original = layer(num_experts_per_tok=2)
    ours = convert(copy.deepcopy(original))
    run, other = HOW[how](ours), reference(original, ours)
    for lead in ((2, 5), (17,), *([(0,)] if how == "eager" else [])):
        x = hidden(*lead)
        flat = x.view(-1, 64)
        with torch.no_grad():
            (found, logits), (want, _) = run(x), other(flat.double())
            assert logits.shape == (*lead, 4)
            assert logits.view(-1, 4).equal(original.router(flat)[1])  # routing is exact
        assert found.shape == x.shape
        assert (found.double().view(want.shape) - want).norm() <= 2 * ULP * want.norm()


def test_transformers_still_sees_its_router():
    """Since 5.23."""
    tokens = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    models = llama4(), llama4()
    fusion_moe.quantize_(models[0])
    with torch.no_grad():
        seen = [m(tokens, output_router_logits=True).get("router_logits", ()) for m in models]
    assert [t.shape for t in seen[0]] == [t.shape for t in seen[1]]
    assert all(a.equal(b) for a, b in zip(*(logits[:1] for logits in seen), strict=True))


def test_the_layer_is_replaced_as_a_whole_and_keeps_its_other_parts():
    model = llama4()
    before = [(m.feed_forward.router, m.feed_forward.shared_expert) for m in model.model.layers]
    fusion_moe.quantize_(model)
    layers = [m.feed_forward for m in model.model.layers]
    assert all(type(m) is Llama4MoE and not m.training for m in layers)
    assert all((m.router, m.shared_expert) == kept for m, kept in zip(layers, before, strict=True))
    fusion_moe.quantize_(model)
    assert [m.feed_forward for m in model.model.layers] == layers


def test_gradients_reach_the_router_and_the_shared_expert():
    ours = convert(layer()).float()
    x = hidden(5).float().requires_grad_()
    ours(x)[0].sum().backward()
    assert all(
        t.grad is not None and t.grad.any()
        for t in (x, ours.router.weight, ours.shared_expert.up_proj.weight)
    )


def test_what_is_refused(golden):
    model = llama4()
    model.model.layers[1].feed_forward.experts.down_proj.data[3, 5, 7] = float("nan")
    golden(
        messages(
            {
                "GELU": lambda: fusion_moe.quantize_(llama4(hidden_act="gelu")),
                "K": lambda: fusion_moe.quantize_(llama4(intermediate_size=24)),
                "NaN": lambda: fusion_moe.quantize_(model),
            }
        )
    )
    assert type(model.model.layers[0].feed_forward).__name__ == "Llama4TextMoe"


# thunder ------------------------------------------------------------------------------------------


class Config:
    hidden_size, intermediate_size, num_routed_experts, num_shared_experts, dtype, device = (
        64,
        32,
        4,
        2,
        torch.bfloat16,
        "cpu",
    )


@pytest.mark.thunder
def test_thunders_layer():
    # thunder's module imports a part of torch.testing that needs it
    pytest.importorskip("expecttest")
    layers = pytest.importorskip("thunder.benchmarks.layers_for_inference_benchmark")
    torch.manual_seed(0)
    model = nn.ModuleDict({"moe": layers.Llama4MoE(Config)}).eval()
    original = copy.deepcopy(model["moe"])
    fusion_moe.quantize_(model)
    ours, x = model["moe"], hidden(2, 5)
    assert type(ours) is Llama4MoE
    gate_up, down = weights(ours.experts)
    flat, shared = x.view(-1, 64), original.shared_experts(x).double().view(-1, 64)
    want, scores = torch.zeros_like(shared), original.gate(flat)
    for token, (score, expert) in enumerate(zip(*scores.max(-1), strict=True)):
        scaled = flat[token].double() * score.sigmoid().double()
        want[token] = shared[token] + down[expert] @ loops.swiglu(gate_up[expert] @ scaled)
    with torch.no_grad():
        found, logits = ours(x)
    assert logits.view(-1, 4).equal(scores)
    assert (found.double().view(-1, 64) - want).norm() <= 2 * ULP * want.norm()
