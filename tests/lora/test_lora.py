"""add_lora_ and merge_lora_: what they change in a model, and what stays."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from bad_calls import messages
from experts import copied, float_weights, routed, same_state
from tiny_qwen3 import qwen3_moe

import fusion_moe
from fusion_moe.encodings import ENCODINGS, NVFP4, Quantized, dequantize, quantize
from fusion_moe.errors import NonFiniteError, UnsupportedError
from fusion_moe.messages import warn
from fusion_moe.nn import Adapter, CustomExperts, Experts, NVFP4Experts, add_lora_, merge_lora_

pytestmark = pytest.mark.usefixtures("meaning")  # but where a test says otherwise
E, H, I = 4, 64, 64
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "head_dim": 32,
    "norm_topk_prob": True,
}
TOKENS = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))


def experts(encoding: str = "nvfp4") -> Experts:
    gate_up, down = (quantize(w, encoding=ENCODINGS[encoding]) for w in float_weights(E, H, I))
    return Experts(gate_up, down)


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


def randomized(module: torch.nn.Module, size: float = 0.05) -> torch.nn.Module:
    """With numbers in its adapters, as if it was trained."""
    g = torch.Generator().manual_seed(3)
    for name, p in module.named_parameters():
        if "_lora." in name:
            p.data.normal_(0, size, generator=g)
    return module


def quantized_model(**changes):
    model = qwen3_moe(**SIZES | changes).bfloat16()
    fusion_moe.quantize_(model)
    return model


def sums(module) -> dict[str, torch.Tensor]:
    """float32 [E, N, K]: weights with what adapters add."""
    weights = {p: dequantize(module.weight_of(p)) for p in module.projections}
    return {
        p: torch.stack([w[e] + getattr(module, f"{p}_lora").delta(e) for e in range(E)])
        for p, w in weights.items()
    }


def bits(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that is no adapter."""
    return {n: t for n, t in copied(module).items() if "_lora." not in n}


def assert_unchanged(module: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert same_state(bits(module), before)


# What is added ------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("gate_up", "down"), ["down"], "gate_up"], ids=str)
def test_only_adapters_train(targets):
    projections = [p for p in ("gate_up", "down") if p in targets]
    model = quantized_model()
    before = bits(model)
    names = [f"model.layers.{i}.mlp.experts.{p}" for i in range(2) for p in projections]
    assert add_lora_(model, 8, 16, targets) == names
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"{n}_lora.{f}" for n in names for f in "AB"
    ]
    assert_unchanged(model, before)


def test_initial_values_are_those_of_a_linear_layer():
    """B is zero, A what PEFT's nn.Linear(K, r * E) starts with, from the same random numbers."""
    module = experts()
    torch.manual_seed(0)
    add_lora_(module, 8, targets=("down",))
    torch.manual_seed(0)
    want = torch.nn.init.kaiming_uniform_(torch.empty(E * 8, I), a=math.sqrt(5))
    assert torch.equal(module.down_lora.A.flatten(0, 1), want)
    assert not module.down_lora.B.any()
    assert module.down_lora.scale == 32 / 8


def test_adapters_of_other_layers_go_on_training():
    model = quantized_model()
    for i in range(2):
        add_lora_(model, filter_fn=lambda module, name, i=i: f".{i}." in name)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        f"model.layers.{i}.mlp.experts.{p}_lora.{f}"
        for i in range(2)
        for p in ("gate_up", "down")
        for f in "AB"
    }


def test_frozen_adapters_in_training_mode_are_a_warning(caplog):
    module = experts()
    add_lora_(module)
    warn._said.clear()
    module.requires_grad_(False)
    with torch.no_grad():
        module(*routed(E, H))
    module.eval()(*routed(E, H))
    assert "frozen" not in caplog.text
    module.train()(*routed(E, H))
    assert (
        "training mode, but the adapters of Experts are frozen: add them after what freezes a "
        "model, and load them to train"
    ) in caplog.text


REFUSED = {
    "no experts": lambda: add_lora_(torch.nn.Linear(4, 4)),
    "no module": lambda: add_lora_(torch.zeros(1)),
    "none chosen": lambda: add_lora_(experts(), filter_fn=lambda *_: False),
    "rank 0": lambda: add_lora_(experts(), 0),
    "half a rank": lambda: add_lora_(experts(), 0.5),
    "alpha": lambda: add_lora_(experts(), alpha=math.nan),
    "large alpha": lambda: add_lora_(experts(), alpha=1e308),
    "another target": lambda: add_lora_(experts(), targets=("up",)),
    "no target": lambda: add_lora_(experts(), targets=()),
    "integers": lambda: add_lora_(experts(), dtype=torch.int8),
}


def test_refused(golden):
    golden(messages(REFUSED))


def test_not_twice():
    model = quantized_model()
    add_lora_(model, filter_fn=lambda module, name: "1" in name)
    kept = experts_of(model)[1].down_lora
    with pytest.raises(
        UnsupportedError,
        match="add_lora_: model.layers.1.mlp.experts has adapters already; train these",
    ):
        add_lora_(model)
    assert experts_of(model)[0].adapter("down") is None
    assert experts_of(model)[1].down_lora is kept


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "int4", "bf16"])
def test_adapters_move_and_weights_do_not(encoding):
    module = randomized(experts(encoding))
    add_lora_(module, 4)
    before, adapters = (
        bits(module),
        {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad},
    )
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # A moves once B is not zero
        module(*routed(E, H)).float().square().sum().backward()
        optimizer.step()
    assert all((p != adapters[n]).any() for n, p in module.named_parameters() if p.requires_grad)
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
    assert_unchanged(module, before)


@pytest.mark.slow
def test_a_model_learns():
    """Tokens that it has seen, with the router's and the attention's gradients on the way through
    its layers.
    """
    model = quantized_model().float()
    add_lora_(model, 8, 16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16), fusion_moe.options.override(target="auto"):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def _adapted(model):
    add_lora_(model, 4)
    return model


class Gate(torch.nn.Module):
    """What is between two products without a gate."""

    has_gate, is_concatenated = False, True

    def act_fn(self, y):
        return y.relu().square()


def test_custom_experts():
    """The first projection is `up`; against whole weights."""
    up, down = torch.randn(E, I, H) / 8, torch.randn(E, H, I) / 8
    module = CustomExperts(quantize(up, NVFP4), quantize(down, NVFP4), Gate())
    assert add_lora_(module, 4) == ["up", "down"]
    randomized(module, 0.2)
    x, ids, w = routed(E, H)
    whole = sums(module)
    y = torch.einsum(
        "ehi,tei->teh",
        whole["down"],
        torch.einsum("eih,th->tei", whole["up"], x.float()).relu().square(),
    )
    want = (y.gather(1, ids[..., None].expand(-1, -1, H)) * w[..., None]).sum(1)
    assert (module(x, ids, w) - want).norm() < 1e-2 * want.norm()


# Everything else a model does ---------------------------------------------------------------------


def test_copies_casts_and_state_dicts():
    module, other = randomized(_adapted(experts())), _adapted(experts())
    copied = copy.deepcopy(module)
    assert copied.down_lora.A is not module.down_lora.A
    assert copied.down_lora.scale == module.down_lora.scale
    other.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(other(*routed(E, H)), module(*routed(E, H)))
        assert torch.equal(copied(*routed(E, H)), module(*routed(E, H)))
    cast = copy.deepcopy(module).bfloat16()
    assert (cast.down_lora.A.dtype, cast.down_proj_scale.dtype) == (
        torch.bfloat16,
        torch.float8_e4m3fn,
    )
    assert copy.deepcopy(module).to("meta").down_lora.A.is_meta


# Merging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["bf16", "f32"])
def test_merged_into_floats(encoding):
    """W + alpha / rank * B @ A in float32, rounded once."""
    module = randomized(_adapted(experts(encoding)))
    weight, adapter = module.weight_of("down")[0].detach().clone(), module.down_lora
    assert merge_lora_(module) == ["gate_up", "down"]
    want = torch.stack(
        [w.float() + 8 * (b @ a) for w, a, b in zip(weight, adapter.A, adapter.B, strict=True)]
    )
    assert torch.equal(module.down_proj, want.to(weight.dtype))
    assert module.adapter("down") is None
    assert not any("lora" in name for name in module.state_dict())


def test_merging_into_few_bits_is_asked_for():
    model = randomized(_adapted(quantized_model()))
    before = bits(model)
    says = (
        r"layers.0.mlp.experts: adapters of nvfp4 weights; expected float weights: .*; "
        r"merge_lora_\(model, requantize=True\) does it"
    )
    with pytest.raises(UnsupportedError, match=says):
        merge_lora_(model)
    assert_unchanged(model, before)
    assert experts_of(model)[0].adapter("down") is not None


@pytest.mark.parametrize("encoding", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("layout", ["linear", "w16x64"])
def test_quantized_again(encoding, layout):
    """The bytes that quantizing the sum gives, gate and up with scales of their own, in the layout
    that there was.
    """
    gate_up, down = float_weights(E, H, I)
    module = NVFP4Experts.from_float(gate_up, down) if encoding == "nvfp4" else experts(encoding)
    randomized(_adapted(module))
    added = sums(module)
    module.reform(layout=layout)
    merge_lora_(module, requantize=True)
    assert module.weight_layout == layout
    module.reform(layout="linear")
    if encoding == "nvfp4":
        want: Experts = NVFP4Experts.from_float(added["gate_up"], added["down"])
    else:
        want = Experts(*(quantize(added[p], encoding=module.encoding) for p in ("gate_up", "down")))
    assert_unchanged(module, bits(want))


def test_nothing_is_merged_of_what_is_not_finite():
    module = randomized(_adapted(experts()))
    before = bits(module)
    module.down_lora.B.data[1, 2, 3] = torch.inf
    with pytest.raises(NonFiniteError, match="down"):
        merge_lora_(module, requantize=True)
    assert_unchanged(module, before)
    assert module.adapter("gate_up") is not None


@pytest.mark.parametrize("encoding", ["nvfp4", "bf16"])
def test_removed(encoding):
    """The bits of the results, and of the weights, are those of a module that never had
    adapters.
    """
    module, inputs = experts(encoding), routed(E, H)
    want, before = module(*inputs), bits(module)
    add_lora_(module, rank=4, targets=["down"])
    assert torch.equal(module(*inputs), want)  # at first nothing is added
    assert not torch.equal(randomized(module)(*inputs), want)
    assert fusion_moe.nn.remove_lora_(module) == ["down"]
    assert torch.equal(module(*inputs), want)
    assert_unchanged(module, before)
    assert not [name for name, _ in module.named_parameters() if "_lora" in name]
    for f in fusion_moe.nn.remove_lora_, merge_lora_:
        with pytest.raises(UnsupportedError, match="no adapters; expected a model that add_lora_"):
            f(module)
    assert add_lora_(module, rank=2) == ["gate_up", "down"]


def test_scales_of_rows_in_runs():
    """A decode scale for each of four runs of rows stays one for each of them."""
    gate_up, down = float_weights(E, H, I)
    scale = gate_up.unflatten(1, (4, 2 * I // 4)).abs().amax((-2, -1)) / 2688
    module = randomized(_adapted(Experts(quantize(gate_up, NVFP4, scale), quantize(down, NVFP4))))
    merge_lora_(module, requantize=True)
    assert module.gate_up_decode_scale.shape == (E, 4)
    assert isinstance(module.weight_of("gate_up"), Quantized)
    assert module.encoding == NVFP4


def test_shown():
    assert repr(Adapter((E, 2 * I, H), 8, 16.0, torch.float32, torch.device("meta"))) == (
        "Adapter(experts=4, in_features=64, out_features=128, rank=8, alpha=16.0)"
    )
