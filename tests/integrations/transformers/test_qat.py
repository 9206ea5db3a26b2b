"""qat_: the forward is that of the quantized model bit for bit, the backward straight-through."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from bad_calls import messages
from cover import few
from experts import float_weights
from tiny_qwen3 import qwen3_moe
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe
from fusion_moe.encodings import dequantize
from fusion_moe.nn import contract_of, qat_
from fusion_moe.nn.config import CONFIGS

pytestmark = pytest.mark.usefixtures("meaning_without_all")

E, H, I, T, K = 4, 64, 96, 11, 2
SIZES = {"hidden_size": H, "moe_intermediate_size": I, "intermediate_size": I}
COUNTS = {"num_experts": E, "num_local_experts": E, "n_routed_experts": E, "num_experts_per_tok": K}
# gate above up; transposed, in turns, with biases and a clamp; no gate, squared ReLU
KINDS: dict[str, Any] = {
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig),
    "gpt_oss": (GptOssExperts, GptOssConfig),
    "nemotron_h": (NemotronHExperts, NemotronHConfig),
}
RULES = [("nvfp4", rule) for rule in ("max", "four_over_six", "mse")]
RULES += [("mxfp4", rule) for rule in ("max", "mse")]


def floats(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A model of one module of experts."""
    cls, config = KINDS[kind]
    module = cls(config(**SIZES, **COUNTS)).to(dtype)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / 8)
    return nn.Sequential(module)


def inputs(dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, H, generator=g).to(dtype), torch.rand(T, K, generator=g)
    return [x.requires_grad_(), torch.randint(E, (T, K), generator=g), w.requires_grad_()]


def trained(model: nn.Sequential) -> list[Tensor]:
    return list(model.parameters())


def straight_through(model: nn.Sequential, rows: list[Tensor], seed: Tensor) -> list[Tensor]:
    """The gradients of x, w and the parameters by the module's own forward in float64, as if the
    decoded weights were parameters.
    """
    module = copy.deepcopy(model)
    fusion_moe.quantize_(module)
    frozen, own = module[0], floats_of(model)
    contract = contract_of(own)
    assert contract is not None
    for name in frozen.projections:
        decoded = dequantize(frozen.weight_of(name)).double()
        if name == "gate_up" and not contract.concatenated:
            decoded = torch.stack(decoded.chunk(2, 1), 2).flatten(1, 2)
        p = own.get_parameter(f"{name}_proj")
        p.data = (decoded.mT if contract.transposed else decoded).contiguous()
    x, ids, w = (t.detach().double() if t.is_floating_point() else t for t in rows)
    x, w = x.requires_grad_(), w.requires_grad_()
    own.config._experts_implementation = "eager"
    y = own(x, ids, w)
    return list(torch.autograd.grad(y, [x, w, *own.parameters()], seed.double()))


def floats_of(model: nn.Sequential) -> Any:
    """The module with the class that it had, in float64."""
    module = copy.deepcopy(model[0])
    module.__class__ = type(module).__mro__[2]
    return nn.Module.double(module)


def assert_near(found: list[Tensor], want: list[Tensor], limit: float) -> None:
    for a, b in zip(found, want, strict=True):
        assert (a.double() - b).norm() <= limit * b.norm(), (a.double() - b).norm() / b.norm()


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("encoding", "scales"), RULES)
def test_results_are_those_of_the_quantized_model(kind, encoding, scales):
    """With gradients and without; and gradients are those of the decoded weights."""
    model, rows, quantized = floats(kind), inputs(), floats(kind)
    assert qat_(model, encoding, scales=scales) == ["0"]
    y = model[0](*rows)
    fusion_moe.quantize_(quantized, CONFIGS[encoding](scales=scales))
    with torch.no_grad():
        assert torch.equal(quantized[0](*rows), y)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    found = torch.autograd.grad(y, [rows[0], rows[2], *trained(model)], seed)
    assert [g.dtype for g in found[2:]] == [torch.float32] * len(trained(model))
    assert_near(list(found), straight_through(model, rows, seed), 2e-2)
    with torch.no_grad():
        assert torch.equal(model[0](*rows), y)
        fusion_moe.quantize_(model)
        assert (model[0].encoding.name, model[0].scales) == (encoding, scales)
        assert torch.equal(model[0](*rows), y)
        for name, part in quantized.state_dict().items():
            assert torch.equal(part, model.state_dict()[name]), name


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("how", ["exact", "float", "saved"])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_of_the_backward(how, kind):
    """The gradients of activations by the rounded weights, or by the floats; those of weights are
    made from what the forward computed. What is saved does not change a result.
    """
    model, rows = floats(kind), inputs()
    qat_(model, straight_through=how)
    y = model[0](*rows)
    seed = torch.ones_like(y)
    want = straight_through(model, rows, seed)
    found = torch.autograd.grad(y, [rows[0], model[0].down_proj], seed)
    down = want[2 + [name for name, _ in model.named_parameters()].index("0.down_proj")]
    off = ((found[0].double() - want[0]).norm() / want[0].norm()).item()
    assert off > 0.05 if how == "float" else off < 0.02
    assert_near([found[1]], [down], 2e-2)
    with torch.no_grad():
        assert torch.equal(model[0](*rows), y)


@pytest.mark.parametrize("scales", ["max", "mse"])
def test_clipped_and_tied_weights_pass_their_gradients(scales):
    """With frozen scales a weight may be far above what codes hold; the middle of two codes is
    nothing special.
    """
    model, rows = floats(), inputs(torch.float32)
    qat_(model, scales=scales, frozen=True)
    scale = model[0].down_frozen_scale.clone()
    with torch.no_grad():
        model[0].down_proj[:, :, ::7] = 50.0  # 2688 times the scale is near 0.6
        model[0].down_proj[:, :, 1::7] = 0.0
    y = model[0](*rows)
    found = torch.autograd.grad(y.sum(), trained(model))
    assert_near(list(found), straight_through(model, rows, torch.ones_like(y))[2:], 1e-4)
    assert found[1][:, :, ::7].abs().min() > 0
    assert torch.equal(model[0].down_frozen_scale, scale)
    before = copy.deepcopy(model)
    fusion_moe.quantize_(model)
    assert torch.equal(model[0].down_decode_scale, scale)
    with torch.no_grad():
        assert torch.equal(model[0](*rows), y)
    other = floats()
    qat_(other, scales=scales, frozen=True)
    other.load_state_dict(before.state_dict())  # scales too
    assert torch.equal(other[0](*rows), y)


@pytest.mark.compiler
@pytest.mark.parametrize("scales", ["max", "four_over_six"])
def test_every_change_of_a_weight_is_seen(scales):
    """Steps, writes that no version counts, state dicts, casts and moves."""
    model, rows = floats(), inputs(torch.float32)
    qat_(model, scales=scales)

    def fresh() -> Tensor:
        other = copy.deepcopy(model)
        fusion_moe.quantize_(other)
        return other[0](*rows)

    with torch.no_grad():
        first = model[0](*rows)
        made = model[0].qat.made
        assert torch.equal(model[0](*rows), first)
        assert model[0].qat.made is made
        model[0].down_proj.mul_(1.5)
        assert torch.equal(model[0](*rows), fresh())
    model[0](*rows).sum().backward()
    model[0].gate_up_proj.data.mul_(-1)  # as optimizers of DeepSpeed and Megatron do
    with torch.no_grad():
        assert torch.equal(model[0](*rows), fresh())
        model.load_state_dict(floats().state_dict())
        assert torch.equal(model[0](*rows), fresh())
        assert torch.equal(fresh(), first)
        model.bfloat16()
        assert torch.equal(model[0](*rows), fresh())
        assert not torch.equal(fresh(), first)


@pytest.mark.compiler
def test_checkpointing_autocast_and_accumulation():
    model, rows = floats(), inputs(torch.float32)
    qat_(model)

    def gradients(call: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            for scale in 1.0, 2.0:  # two forwards before two backwards
                y = call(*rows)
                (y.sum() * scale).backward()
        found = [p.grad for p in (rows[0], *trained(model))]
        for p in (*rows[:1], rows[2], *trained(model)):
            p.grad = None
        return found

    want = gradients(model[0])
    for reentrant in False, True:
        got = gradients(lambda *a: checkpoint(model[0], *a, use_reentrant=reentrant))  # noqa: B023
        assert all(map(torch.equal, got, want))


@pytest.mark.compiler
@pytest.mark.usefixtures("call_by_call")
@pytest.mark.parametrize(("kind", "scales"), few([("qwen3_moe", "max"), ("gpt_oss", "mse")]))
def test_compiled(kind, scales):
    model, rows = floats(kind), inputs()
    qat_(model, scales=scales)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], backend="fusion_moe", fullgraph=True)
    results = []
    for f in model[0], compiled:
        y = f(*rows)
        results.append([y, *torch.autograd.grad(y.sum(), [rows[0], *trained(model)])])
    assert torch.equal(results[0][0], results[1][0])
    assert_near(results[1], [t.double() for t in results[0]], 1e-2)
    with torch.no_grad():
        model[0].down_proj.mul_(1.5)
        assert torch.equal(compiled(*rows), model[0](*rows))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("encoding", "scales"), [("nvfp4", "max"), ("nvfp4", "mse"), ("mxfp4", "max")]
)
def test_a_model_of_transformers_from_training_to_a_directory(encoding, scales, tmp_path):
    """Floats are saved as the float model's; the end loads again with the same logits, and keeps
    the rule for weights to come.
    """
    from fusion_moe.transformers import from_pretrained

    model = qwen3_moe(**SIZES, num_hidden_layers=2)
    qat_(model, encoding, scales=scales)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16)[None]
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.save_pretrained(tmp_path / "masters")
    resumed = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "masters")
    qat_(resumed, encoding, scales=scales)
    want = model(tokens).logits
    assert torch.equal(resumed(tokens).logits, want)
    fusion_moe.quantize_(model)
    model.eval()
    assert torch.equal(model(tokens).logits, want)
    model.save_pretrained(tmp_path / "quantized")
    served = from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    assert torch.equal(served(tokens).logits, want)
    assert served.model.layers[0].mlp.experts.scales == scales


def test_options(golden):
    wrong = {
        "another encoding": {"encoding": "int4"},
        "another rule": {"scales": "learned"},
        "a rule of NVFP4": {"encoding": "mxfp4", "scales": "four_over_six"},
        "another gradient": {"straight_through": "no"},
        "frozen MXFP4": {"encoding": "mxfp4", "frozen": True},
    }
    golden(messages({what: partial(qat_, floats(), **given) for what, given in wrong.items()}))


def encoded() -> nn.Module:
    return fusion_moe.NVFP4Experts.from_float(*float_weights(E, H, I))


def test_what_stays_is_said(caplog):
    """Beside experts that train, those whose weights are codes."""
    assert qat_(nn.Sequential(floats()[0], encoded())) == ["0"]
    assert "qat_ leaves 1 as they are: their weights are codes" in caplog.text


def test_models_that_cannot(golden):
    model, bad = floats(), floats()
    qat_(model)
    with torch.no_grad():
        bad[0].down_proj[0, 0, 0] = float("nan")
    golden(
        messages(
            {
                "again": lambda: qat_(model),
                "no experts": lambda: qat_(nn.Sequential(nn.Linear(4, 4))),
                "only codes": lambda: qat_(nn.Sequential(encoded())),
                "NaN": lambda: qat_(bad),
            }
        )
    )
    assert type(bad[0]) is Qwen3MoeExperts
