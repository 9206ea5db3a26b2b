"""quantize_ on transformers' own Qwen3-MoE, and the module it puts in."""

import weakref

import pytest
import torch
from bad_calls import messages
from experts import copied, same_state
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_moe
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import NonFiniteError, ShapeError
from fusion_moe.nn import QuantizedLinear
from fusion_moe.nn.conversion import quantize as quantize_module

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


def qwen3_moe(**changes):
    torch.manual_seed(0)
    return (
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL | changes))
        .bfloat16()
        .eval()
    )


def experts_of(model):
    return [layer.mlp.experts for layer in model.model.layers]


@pytest.fixture
def tokens():
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))


# and the rules by which their scales are chosen
FORMATS = {"nvfp4": "mse", "mxfp4": "max", "int4": "mse", "fp8": "max"}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nothing_is_replaced_when_a_weight_is_not_finite(bad):
    model = qwen3_moe()
    experts_of(model)[1].down_proj.data[3, 5, 7] = bad
    with pytest.raises(
        NonFiniteError,
        match=r"of model.layers.1.mlp.experts.down_proj \[4, 64, "
        r"32\], the first at \(3, 5, 7\)",
    ):
        fusion_moe.quantize_(model)
    assert [type(e).__name__ for e in experts_of(model)] == ["Qwen3MoeExperts"] * 2


@pytest.mark.parametrize("without_memory", [lambda: torch.device("meta"), FakeTensorMode])
def test_a_model_without_memory(without_memory):
    with without_memory():
        model = transformers.Qwen3MoeForCausalLM._from_config(
            transformers.Qwen3MoeConfig(**SMALL), dtype=torch.bfloat16
        )
        fusion_moe.quantize_(model)
    assert {type(experts) for experts in experts_of(model)} == {fusion_moe.NVFP4Experts}


def test_only_one_layer_is_in_memory_in_both_forms(monkeypatch):
    model, alive = qwen3_moe(num_hidden_layers=3), []
    floats = [weakref.ref(experts.gate_up_proj) for experts in experts_of(model)]
    converted = quantize_module.converted
    monkeypatch.setattr(
        quantize_module,
        "converted",
        lambda *args: alive.append(sum(r() is not None for r in floats)) or converted(*args),
    )
    fusion_moe.quantize_(model)
    assert alive == [3, 2, 1]
    assert not any(r() for r in floats)


def test_a_call_that_was_interrupted_is_completed_by_another(monkeypatch, tokens):
    model, whole = qwen3_moe(), qwen3_moe()
    fusion_moe.quantize_(whole)
    converted, calls = quantize_module.converted, iter([False, True])

    def interrupted(*args):
        if next(calls):
            raise KeyboardInterrupt
        return converted(*args)

    monkeypatch.setattr(quantize_module, "converted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fusion_moe.quantize_(model)
    monkeypatch.undo()
    assert [type(e).__name__ for e in experts_of(model)] == ["NVFP4Experts", "Qwen3MoeExperts"]
    fusion_moe.quantize_(model)
    assert same_state(model.state_dict(), whole.state_dict())


def of_this_library(caplog):
    """Messages, without those of packages that a first use of transformers imports."""
    return [record.getMessage() for record in caplog.records if record.name == "fusion_moe"]


def test_filter_chooses_and_must_choose_something(caplog):
    def second(module, name):
        return name == "model.layers.1.mlp.experts"

    model = qwen3_moe()
    fusion_moe.quantize_(model, filter_fn=second)
    assert [type(e).__name__ for e in experts_of(model)] == ["Qwen3MoeExperts", "NVFP4Experts"]
    fusion_moe.quantize_(model, filter_fn=second)
    (said,) = of_this_library(caplog)
    assert "are in nvfp4 already, and filter_fn or skip leaves the others out; for " in said


def test_a_quantized_model_stays_as_it_is(caplog):
    model = qwen3_moe()
    fusion_moe.quantize_(model)
    before = experts_of(model)
    assert not of_this_library(caplog)
    fusion_moe.quantize_(model, "int4")
    assert all(a is b for a, b in zip(before, experts_of(model), strict=True))
    assert of_this_library(caplog) == [
        "quantize_ changes nothing: experts of this Qwen3MoeForCausalLM are in nvfp4 already; "
        "for another format load the model in floating point"
    ]


def test_a_module_of_two_names_is_replaced_under_both():
    model = qwen3_moe()
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    fusion_moe.quantize_(model)
    first, second = (layer.mlp.experts for layer in model.model.layers[:2])
    assert first is second
    assert isinstance(first, fusion_moe.NVFP4Experts)


class Layer(torch.nn.Module):
    """No experts, though its weight is one of 3-D."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 16, 16))


def test_refusals(golden):
    model, trained = qwen3_moe(), qwen3_moe()
    fusion_moe.qat_(trained)
    quantize_ = fusion_moe.quantize_
    cases = {
        "no experts": lambda: quantize_(torch.nn.Linear(16, 16)),
        "a weight of experts": lambda: quantize_(torch.nn.Sequential(Layer())),
        "no model": lambda: quantize_(experts_of(model)[0]),
        "K": lambda: quantize_(qwen3_moe(moe_intermediate_size=24)),
        "an activation format": lambda: fusion_moe.NVFP4Config("nvfp44"),
        "a rule": lambda: fusion_moe.NVFP4Config(scales="mes"),
        "a rule of another format": lambda: fusion_moe.MXFP4Config(scales="four_over_six"),
        "a format": lambda: quantize_(model, "nvfp5"),
        "an encoding without a configuration": lambda: quantize_(model, "nf4"),
        "a number": lambda: quantize_(model, 4),
        "another format than trained for": lambda: quantize_(trained, "int4"),
        "no experts left": lambda: quantize_(model, filter_fn=lambda module, name: False),
        "all skipped": lambda: quantize_(model, skip=["model"]),
        "a name of nothing": lambda: quantize_(model, skip=["*.layer.0.*"]),
        "a name in place of a list": lambda: quantize_(model, skip="*.layers.0.*"),
    }
    golden(messages(cases))


def test_weights_are_frozen_and_small():
    gate_up, down = torch.randn(4, 64, 128), torch.randn(4, 128, 32)
    experts = fusion_moe.NVFP4Experts.from_float(gate_up, down)
    assert not any(p.requires_grad for p in experts.parameters())
    assert experts.nbytes == (gate_up.numel() + down.numel()) * 9 // 16 + 4 * 3 * 4
    assert "experts=4, hidden=128, intermediate=32" in repr(experts)


def test_progress_is_told_after_two_seconds(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 3.5, 4.0, 4.5])
    monkeypatch.setattr("fusion_moe.messages.progress.time.monotonic", lambda: next(clock))
    assert list(quantize_module.progress("abc", "quantizing", 3)) == ["a", "b", "c"]
    assert capsys.readouterr().err.splitlines() == [
        "quantizing: 1 of 3, 4 s, about 7 s left",
        "quantizing: 3 of 3, 4 s",
    ]


def test_only_the_first_rank_shows_progress(capsys, monkeypatch):
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        assert list(quantize_module.progress("ab", "quantizing", 2, [10**9] * 2)) == ["a", "b"]
        assert ("quantizing" in capsys.readouterr().err) == (rank == "0")


def test_much_is_told_at_once_with_its_speed(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 5.0, 10.0])
    monkeypatch.setattr("fusion_moe.messages.progress.time.monotonic", lambda: next(clock))
    told = quantize_module.progress("ab", "quantizing", 2, [10**9, 3 * 10**9])
    assert next(told) == "a"
    assert capsys.readouterr().err == "quantizing: 2, 4 GB\n"
    assert list(told) == ["b"]
    assert capsys.readouterr().err.splitlines() == [
        "quantizing: 1 of 2, 5 s, 200 MB/s, about 15 s left",
        "quantizing: 2 of 2, 10 s, 400 MB/s",
    ]


def test_weights_are_requantized_if_the_config_says_so(tokens):
    model = qwen3_moe(moe_intermediate_size=48)
    fusion_moe.quantize_(model, fusion_moe.NVFP4Config("fp8", weights="fp8"))
    assert [(e.weights, e.activation_format) for e in experts_of(model)] == [("fp8", "fp8")] * 2
    with fusion_moe.options.override(target="reference"):
        assert model(tokens).logits.isfinite().all()


@pytest.mark.parametrize("rule", ["four_over_six", "mse"])
def test_rules_for_scales_of_blocks(rule):
    model, config = qwen3_moe(), fusion_moe.NVFP4Config(scales=rule)
    floats = {key: t.clone() for key, t in experts_of(model)[0].named_parameters()}
    fusion_moe.quantize_(model, config)
    module = experts_of(model)[0]
    want = quantize(floats["down_proj"], NVFP4, scales=rule)
    assert module.scales == rule
    assert torch.equal(module.state_dict()["down_proj"], want.codes)
    assert torch.equal(module.state_dict()["down_proj_scale"].float(), want.block_scale.float())
    gate, _ = floats["gate_up_proj"].chunk(2, 1)
    assert torch.equal(
        module.state_dict()["gate_up_proj"][:, :32], quantize(gate, NVFP4, scales=rule).codes
    )
    before = copied(module)
    fusion_moe.update_weights_(module, floats)  # by the module's own rule
    assert same_state(module.state_dict(), before)
    other = type(module).from_float(floats["gate_up_proj"], floats["down_proj"], scales=rule)
    assert torch.equal(other.state_dict()["down_proj"], want.codes)


@pytest.mark.parametrize(("name", "rule"), FORMATS.items())
def test_formats(name, rule, tokens):
    """The bytes of `quantize`, gate and up each by itself; new weights go by the same rule."""
    model = qwen3_moe(moe_intermediate_size=160)  # no whole blocks of FP8
    floats = {key: t.clone() for key, t in experts_of(model)[0].named_parameters()}
    want = model(tokens).logits
    fusion_moe.quantize_(model, name)
    module = experts_of(model)[0]
    assert (module.encoding.name, module.scales) == (name, rule)
    state = module.state_dict()
    down, gate, up = (
        quantize(t, module.encoding, scales=rule)
        for t in (floats["down_proj"], *floats["gate_up_proj"].chunk(2, 1))
    )
    for key, part in zip(module.part_names["down"], down, strict=True):
        assert torch.equal(state[key].float(), part.float())
    for key, *halves in zip(module.part_names["gate_up"], gate, up, strict=True):
        found = state[key].float()
        assert torch.equal(
            found, torch.cat([t.float().view(4, -1, *found.shape[2:]) for t in halves], 1)
        )
    fusion_moe.update_weights_(module, floats)
    assert all(torch.equal(t.float(), state[key].float()) for key, t in module.state_dict().items())
    with fusion_moe.options.override(target="reference"), torch.no_grad():
        off = (model(tokens).logits - want).norm() / want.norm()
    assert off < (0.1 if name == "fp8" else 0.4)


def test_modules_are_skipped_by_name():
    model = qwen3_moe()
    odd = torch.nn.Parameter(torch.randn(4, 64, 24))
    experts_of(model)[0].down_proj = odd
    experts_of(model)[0].gate_up_proj = torch.nn.Parameter(torch.randn(4, 48, 64))
    with pytest.raises(ShapeError, match=r"K = 24.* or skip=\['model.layers.0.mlp.experts'\] leav"):
        fusion_moe.quantize_(model)
    fusion_moe.quantize_(model, skip=["*.layers.0.*"])
    assert [type(e).__name__ for e in experts_of(model)] == ["Qwen3MoeExperts", "NVFP4Experts"]


@pytest.mark.parametrize("name", ["nvfp4", "int4"])
def test_linear_layers_too(name, tokens):
    """All but the head, whose name is among those that stay."""
    model = qwen3_moe(tie_word_embeddings=False)
    weight = model.model.layers[1].self_attn.o_proj.weight.clone()
    want = model(tokens).logits
    fusion_moe.quantize_(model, name, linear=True, skip=["model.layers.0.self_attn"])
    found = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert found == {f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"}
    made = model.model.layers[1].self_attn.o_proj
    of = quantize(weight, made.encoding, scales="mse")
    assert made.scales == "mse"
    assert all(
        map(torch.equal, [t.float() for t in made.weight_of("weight")], [t.float() for t in of])
    )
    with fusion_moe.options.override(target="reference"), torch.no_grad():
        assert ((model(tokens).logits - want).norm() / want.norm()) < 0.4


def test_a_model_of_linear_layers_alone(caplog):
    """Those that have no whole blocks stay in floats, unless there are no others."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with pytest.raises(ShapeError, match=r"2: .*K = 8.*skip=\['2'\] leaves it as it is"):
        fusion_moe.quantize_(model, filter_fn=lambda _, name: name == "2", linear=True)
    kept = model[2].weight.clone()
    fusion_moe.quantize_(model, linear=True)
    assert [type(m).__name__ for m in model] == ["QuantizedLinear", "ReLU", "Linear"]
    assert torch.equal(model[2].weight, kept)
    assert "whose K is no whole blocks of nvfp4: 2 (K = 8)" in caplog.text
