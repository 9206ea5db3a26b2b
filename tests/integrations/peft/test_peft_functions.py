"""PEFT itself on models with encoded experts: its functions and files, against PEFT on the same
model decoded to floats.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import of_text, tiny
from tiny_qwen3 import qwen3_moe
from torch import Tensor

import fusion_moe
from fusion_moe import nn
from fusion_moe.encodings import dequantize
from fusion_moe.errors import NonFiniteError, UnsupportedError
from fusion_moe.integrations.transformers.on_load import layout_of
from fusion_moe.lora.files import load_lora_, save_lora
from fusion_moe.nn.frozen.adaptable import AdaptableModule
from fusion_moe.transformers import from_pretrained

pytestmark = [pytest.mark.usefixtures("meaning"), pytest.mark.judges("peft")]
MADE = Path(__file__).parents[2] / "checkpoints" / "made"
TOKENS = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(1))
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAYER = "base_model.model.model.layers.0"


def config(**how: Any) -> Any:
    from peft import LoraConfig

    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    given = usual | how
    if given["target_parameters"] is not None:
        given["target_parameters"] = list(given["target_parameters"])
    return LoraConfig(task_type="CAUSAL_LM", **given)


def quantized(model: Any = None) -> Any:
    model = qwen3_moe() if model is None else copy.deepcopy(model)
    fusion_moe.quantize_(model)
    return model


def decoded(ours: Any, original: Any = None) -> Any:
    """The original with the numbers that our weights stand for."""
    model = qwen3_moe() if original is None else copy.deepcopy(original)
    for name, module in ours.named_modules():
        if isinstance(module, AdaptableModule):
            experts = model.get_submodule(name)
            contract = layout_of(experts)
            for p in module.projections:
                weight = dequantize(module.weight_of(p)).float()
                rows = (
                    nn.interleave(weight, 1, 1) if module.interleaved and p == "gate_up" else weight
                )
                parameter = experts.get_parameter(f"{p}_proj")
                parameter.data = rows.mT.contiguous() if contract.transposed else rows
    return model


def wrapped(model: Any, seed: int | None = 2, **how: Any) -> Any:
    """The model with PEFT's adapters, random ones for a seed."""
    from peft import get_peft_model

    model = get_peft_model(model, config(**how))
    if seed is not None:
        fill(model, seed)
    return model.eval()


def fill(model: Any, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in trained(model).values():
        p.data.normal_(0, 0.2, generator=g)


def trained(model: Any) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def factors(model: Any) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def assert_near(found: Tensor, want: Tensor, error: float = 1e-5) -> None:
    assert (found - want).norm() <= error * want.norm()


# The same adapters as on floats -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "llama4"])
def test_names_shapes_values_and_gradients_are_those_on_floats(family, tmp_path):
    """Weights stored either way round, which PEFT may not know, gate and up interleaved, no gate.
    Files go both ways, those of `save_lora` too.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    original = of_text(tiny(family))
    name = next(n for n, m in original.named_modules() if layout_of(m))
    targets = [f"{name}.{n}" for n in layout_of(original.get_submodule(name)).names[:2]]
    modules = {"target_modules": [], "target_parameters": targets}
    packed = quantized(original)
    theirs = wrapped(decoded(packed, original), **modules)
    ours = wrapped(packed, seed=None, **modules)
    assert {n: p.shape for n, p in factors(ours).items()} == {
        n: p.shape for n, p in factors(theirs).items()
    }
    theirs.save_pretrained(tmp_path / "theirs")
    ours.load_adapter(tmp_path / "theirs", "default", is_trainable=True)
    tokens = TOKENS % original.config.vocab_size
    losses = [m(input_ids=tokens, labels=tokens).loss for m in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for key, p in trained(ours).items():
        assert_near(p.grad, dict(theirs.named_parameters())[key].grad, 1e-3)
    ours.save_pretrained(tmp_path / "ours")
    saved, again = (
        load_file(tmp_path / of / "adapter_model.safetensors") for of in ("theirs", "ours")
    )
    assert saved.keys() == again.keys()
    assert all(torch.equal(t, again[key]) for key, t in saved.items())
    loaded = PeftModel.from_pretrained(decoded(quantized(original), original), tmp_path / "ours")
    assert_near(logits_of(loaded.eval(), tokens), logits_of(ours, tokens))
    with_own = quantized(original)
    load_lora_(with_own, tmp_path / "ours")
    assert_near(logits_of(with_own, tokens), logits_of(ours, tokens))
    of_own = load_file(save_lora(with_own, tmp_path / "own") / "adapter_model.safetensors")
    assert all(torch.equal(t, of_own[key]) for key, t in saved.items())
    assert not [p for m in ours.modules() if isinstance(m, LoraLayer) for p in m.problems()]


def test_gradients_in_bf16_are_as_near_as_those_on_floats():
    """Of each factor of a bf16 model under autocast, as trainers run it: to those in float32."""
    packed = quantized()
    models = decoded(packed), decoded(packed).bfloat16(), packed.bfloat16()
    found = []
    for model in map(wrapped, models):
        in_bf16 = next(model.parameters()).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found.append({key: p.grad.float() for key, p in trained(model).items()})
    for key, want in found[0].items():
        theirs, ours = ((grads[key] - want).norm() / want.norm() for grads in found[1:])
        assert ours <= 1.5 * theirs + 2e-3, (key, ours, theirs)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_ranks_and_alphas_of_single_weights():
    """Other factors of B @ A for each of the two products of one program."""
    patterns = {"rank_pattern": {r".*\.down_proj": 3}, "alpha_pattern": {r".*\.gate_up_proj": 9}}
    ours = quantized()
    theirs = wrapped(decoded(ours), **patterns, use_rslora=True)
    ours = wrapped(ours, **patterns, use_rslora=True)
    assert_near(logits(ours), logits(theirs))


def test_all_linear_is_what_it_is_on_floats(tmp_path):
    ours = quantized()
    how = {"target_modules": "all-linear", "target_parameters": None}
    theirs = wrapped(decoded(ours), **how)
    ours = wrapped(ours, **how)
    assert {n: p.shape for n, p in factors(ours).items()} == {
        n: p.shape for n, p in factors(theirs).items()
    }
    assert sum("experts" in n for n in trained(ours)) == 4
    assert_near(logits(ours), logits(theirs))


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-qwen3_moe", "gpt_oss"])
def test_all_linear_includes_encoded_layers_and_experts(name):
    """Also in families whose experts were never linear layers, which PEFT leaves out silently."""
    model = (
        quantized(tiny(name))
        if name == "gpt_oss"
        else from_pretrained(MADE / name, dtype=torch.float32)
    )
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.QuantizedLinear)}
    experts = {n for n, m in model.named_modules() if isinstance(m, AdaptableModule)}
    ours = wrapped(model, target_modules="all-linear", target_parameters=None)
    names = {n.removeprefix("base_model.model.").partition(".lora_")[0] for n in trained(ours)}
    assert linears | experts <= {n.removesuffix(".base_layer") for n in names}
    tokens = TOKENS % model.config.vocab_size
    ours(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in trained(ours).values())


# PEFT's functions ---------------------------------------------------------------------------------


def test_scales_that_were_cast_before_are_what_they_were():
    """By what scripts of QLoRA call first."""
    from peft import prepare_model_for_kbit_training

    model = from_pretrained(MADE / "ct-qwen3_moe-int4")
    experts = model.model.layers[0].mlp.experts
    parts = [part.clone() for part in experts.weight_of("down")]
    model = wrapped(prepare_model_for_kbit_training(model), target_modules="all-linear")
    assert all(map(torch.equal, experts.weight_of("down"), parts))
    assert logits(model).isfinite().all()


def test_disabled_and_several_adapters(tmp_path):
    from peft import PeftModel

    plain, one, two = logits(quantized()), wrapped(quantized()), wrapped(quantized(), seed=3)
    with one.disable_adapter():
        assert torch.equal(logits(one), plain)
    for name, model in (("one", one), ("two", two)):
        model.save_pretrained(tmp_path / name)
    both = PeftModel.from_pretrained(quantized(), tmp_path / "one", "one").eval()
    both.load_adapter(tmp_path / "two", "two")
    assert torch.equal(logits(both), logits(one))
    both.set_adapter("two")
    assert torch.equal(logits(both), logits(two))
    both.base_model.set_adapter(["one", "two"])
    theirs = PeftModel.from_pretrained(decoded(quantized()), tmp_path / "one", "one").eval()
    theirs.load_adapter(tmp_path / "two", "two")
    theirs.base_model.set_adapter(["one", "two"])
    assert_near(logits(both), logits(theirs))
    both.delete_adapter("one")
    assert torch.equal(logits(both), logits(two))


def test_merging_rounds_once_and_says_what_it_loses(caplog):
    ours = quantized()
    experts = ours.model.layers[0].mlp.experts
    before = {n: t.clone() for n, t in experts.state_dict().items()}
    weights = {p: dequantize(experts.weight_of(p)) for p in experts.projections}
    ours = wrapped(ours, target_modules=[])
    layers = [ours.get_submodule(f"{LAYER}.mlp.experts{inner}") for inner in (".base_layer", "")]
    want = {
        layer.encoded: weights[layer.encoded] + layer.get_delta_weight("default")
        for layer in layers
    }
    ours.merge_adapter()
    assert "rounding them again changes them by 0." in caplog.text
    merged = logits(ours)
    for p, numbers in want.items():
        exact = nn.NVFP4Experts.from_float(
            want["gate_up"], want["down"], scales=experts.scales
        ).weight_of(p)
        assert all(torch.equal(a, b) for a, b in zip(experts.weight_of(p), exact, strict=True))
        assert_near(dequantize(exact), numbers, 0.15)
    ours.unmerge_adapter()
    assert all(torch.equal(t, before[n]) for n, t in experts.state_dict().items())
    model = ours.merge_and_unload()
    assert torch.equal(logits(model), merged)
    assert model.model.layers[0].mlp.experts is experts
    assert not experts.adapted


def test_what_was_merged_is_taken_out_of_another_layout():
    """That of a target's kernels, which a first call on a GPU chooses too; and back."""
    ours = quantized()
    experts = ours.model.layers[0].mlp.experts
    before = {n: t.clone() for n, t in experts.state_dict().items()}
    ours = wrapped(ours, target_modules=[])
    for target, layout in (("cuda", "w16x64"), ("cpu", "linear")):
        ours.merge_adapter()
        fusion_moe.prepare_(ours, target)
        assert experts.weight_layout == layout
        ours.unmerge_adapter()
        assert all(torch.equal(t, before[n]) for n, t in experts.state_dict().items())


def test_unloading_leaves_the_model(caplog):
    plain = logits(quantized())
    assert torch.equal(logits(wrapped(quantized()).unload()), plain)
    assert not caplog.records


def test_nan_is_not_merged():
    ours = wrapped(quantized())
    experts = ours.model.model.layers[0].mlp.experts.get_base_layer()
    next(p for n, p in trained(ours).items() if "experts" in n).data.fill_(torch.nan)
    before = [t.clone() for t in experts.weight_of("gate_up")]
    with pytest.raises(NonFiniteError, match="gate_up_proj"):
        ours.merge_adapter()
    assert all(map(torch.equal, experts.weight_of("gate_up"), before))


@pytest.mark.parametrize("name", ["modelopt-qwen3_moe", "ct-qwen3_moe"])
def test_an_encoded_directory_from_loading_to_merged_files(name, tmp_path):
    """AutoPeft finds the base by its name. Encoded linear layers of attention are adapted too."""
    from peft import AutoPeftModelForCausalLM, PeftModel

    def base() -> Any:
        return from_pretrained(MADE / name, dtype=torch.float32)

    model, folder = wrapped(base(), target_modules=["q_proj", "o_proj"]), tmp_path / "adapter"
    tokens = TOKENS % model.config.vocab_size
    want = logits_of(model, tokens)
    model.save_pretrained(folder)
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(MADE / name)
    loaded = (
        AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if name.startswith("modelopt")  # others, transformers loads for their own packages
        else PeftModel.from_pretrained(base(), folder)
    )
    assert torch.equal(logits_of(loaded.eval(), tokens), want)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_near(logits_of(again, tokens), logits_of(merged, tokens), 1e-6)


def test_checkpointed_layers_give_the_same_gradients():
    want = None
    for how in ("plain", "reentrant", "not reentrant"):
        model = wrapped(quantized()).train()
        if how != "plain":
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        grads = {n: p.grad for n, p in trained(model).items()}
        want = want or grads
        assert all(torch.equal(g, want[n]) for n, g in grads.items())
        if how != "plain":
            assert model.is_gradient_checkpointing


# With add_lora_ -----------------------------------------------------------------------------------


def test_adapters_of_add_lora_become_pefts(tmp_path):
    """Both orders give one adapter of PEFT, with the values that there were."""
    from peft import PeftModel

    ours = quantized()
    nn.add_lora_(ours, 3, 5)
    fill(ours, 4)
    alone = save_lora(ours, tmp_path / "alone")
    first = wrapped(ours, seed=None, target_parameters=None)
    second = wrapped(quantized(), seed=None, target_parameters=None)
    nn.add_lora_(second, 3, 5)
    third = wrapped(quantized(), seed=None, target_parameters=None)
    load_lora_(third.get_base_model(), alone)
    assert set(trained(first)) == set(trained(second)) == set(trained(third))
    assert len(trained(first)) == 6
    assert not [n for n in first.state_dict() if "_lora." in n]
    q_proj = {n: p for n, p in first.state_dict().items() if "q_proj.lora" in n}
    third.load_state_dict(q_proj, strict=False)
    assert torch.equal(logits(first), logits(third))
    first.save_pretrained(tmp_path / "saved")
    again = PeftModel.from_pretrained(quantized(), tmp_path / "saved").eval()
    assert torch.equal(logits(again), logits(first))
    theirs = PeftModel.from_pretrained(decoded(quantized()), tmp_path / "saved").eval()
    assert_near(logits(theirs), logits(first))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda m: save_lora(m, "nowhere"), "adapters of another library around"),
        (nn.merge_lora_, "adapters of another library around"),
        (nn.remove_lora_, "adapters of another library around"),
        (nn.add_lora_, "has adapters already; train these.* what removes them in the library"),
    ],
    ids=["save_lora", "merge_lora_", "remove_lora_", "add_lora_"],
)
def test_pefts_adapters_are_pefts(what, says):
    model = wrapped(quantized())
    with pytest.raises(UnsupportedError, match=says):
        what(model)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"target_parameters": ["experts.down_proj_scale"]}, "expected the weights of .*: gate_up"),
        ({"target_modules": ["experts"]}, "expected linear layers in target_modules"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora'.*for nvfp4 weights"),
        ({"use_dora": True, "target_modules": []}, "does not work with use_dora"),
        ({"lora_dropout": 0.1}, "does not work with lora_dropout"),
    ],
    ids=str,
)
def test_what_peft_cannot_do_to_codes(how, says):
    with pytest.raises((UnsupportedError, ValueError), match=says):
        wrapped(quantized(), **how)


def test_what_add_lora_has_taken():
    model = quantized()
    nn.add_lora_(model, 2, 4)
    with pytest.raises(UnsupportedError, match="which has adapters of add_lora_; .* leave it out"):
        wrapped(model)
    model = quantized()
    nn.add_lora_(model, 2, 4)
    with pytest.raises(UnsupportedError, match="lora_dropout = 0.1 beside adapters of experts"):
        wrapped(model, target_parameters=None, lora_dropout=0.1)
    assert len(trained(model)) == 4


# PEFT's version -----------------------------------------------------------------------------------


def test_peft_is_changed_whichever_is_imported_first():
    """And not before it is: importing us does not import PEFT. In two processes that import what
    PEFT imports once.
    """
    script = """
import importlib.util, os, sys
import torch, transformers.modeling_utils
first = "fusion_moe" if os.fork() else "peft"
importlib.import_module(first)
import fusion_moe
experts = fusion_moe.NVFP4Experts.from_float(torch.randn(2, 32, 32), torch.randn(2, 32, 16))
assert ("peft" in sys.modules) == (first == "peft")
assert importlib.util.find_spec("peft")  # as transformers asks
import peft
model = peft.get_peft_model(
    torch.nn.Sequential(experts),
    peft.LoraConfig(target_modules=[], target_parameters=["0.down_proj"]),
)
finders = [type(finder).__name__ for finder in sys.meta_path]
print(type(model.base_model.model[0]).__module__, finders.count("_WhenImported"), flush=True)
if first == "fusion_moe":
    assert os.wait()[1] == 0
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fork has no threads of OpenMP
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["fusion_moe.integrations.peft.layers", "0"] * 2, done.stderr


def test_what_is_changed_is_there():
    """PEFT's functions that are wrapped, which are not its interface: look at them again for a
    version that has others.
    """
    import peft

    from fusion_moe.integrations.peft.install import _CHANGED

    assert tuple(map(int, peft.__version__.split(".")[:2])) == (0, 21)
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name, _ in _CHANGED)


def test_older_ones_are_refused(monkeypatch, caplog):
    import peft

    from fusion_moe.integrations.hooks import peft as hooks

    monkeypatch.setattr(peft, "__version__", "0.17.1")
    hooks._install()
    assert "PEFT does not adapt encoded weights: " in caplog.text
    assert "PEFT 0.17.1; expected 0.21 or newer" in caplog.text
