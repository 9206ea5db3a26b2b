"""`update_weights_` by the numbers of the float model, in its names and its order: for every family
and class, the same weights again change nothing, and others give what `quantize_` makes of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

import fusion_moe
from fusion_moe import update_weights_
from fusion_moe.errors import DtypeError, Error, NonFiniteError, UnsupportedError
from fusion_moe.nn import NVFP4Experts, add_lora_, convert, qat_
from fusion_moe.transformers import from_pretrained
from tests.families.models import AnyConfig, class_of, decorated, randomized
from tests.families.test_round_trips import logits, same
from tests.families.tiny import FAMILIES, tiny

ORDERS = ("aria", "gpt_oss", "llama4", "openai_privacy_filter")  # not [E, N, K], gate above up
EXPERTS = (*sorted(decorated()), ("llama4", "Llama4TextExperts"))
CONFIGS = {
    "nvfp4": fusion_moe.NVFP4Config(scales="max"),
    "mse": fusion_moe.NVFP4Config(scales="mse"),
    "mxfp4": fusion_moe.MXFP4Config(),
    "fp8": fusion_moe.FP8Config(),
}


def memory(module: nn.Module) -> dict[str, Tensor]:
    """The bytes of all that a module has, as it is stored."""
    both = *module.named_parameters(), *module.named_buffers()
    return {name: t.detach().flatten().view(torch.uint8).clone() for name, t in both}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def quantized(floats: Any, encoding: str = "nvfp4") -> Any:
    model = copy.deepcopy(floats)
    fusion_moe.quantize_(model, CONFIGS[encoding])
    return model


def refits(floats: nn.Module) -> Iterable[Any]:
    """All weights, by a module, a mapping and pairs in another order, and some one by one."""
    state = floats.state_dict()
    yield from (floats, state, iter(reversed(state.items())))
    yield from ({name: state[name]} for name in [n for n in state if "experts." in n][-4:])


def other_weights(floats: Any) -> Any:
    torch.manual_seed(7)
    return randomized(copy.deepcopy(floats))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_again_change_nothing(family):
    floats = tiny(family)
    model = quantized(floats)
    again, before = copy.deepcopy(model), memory(model)
    for tensors in refits(floats):
        update_weights_(model, tensors)
        assert equal(memory(model), before)
    other = other_weights(floats)
    update_weights_(model, other)
    assert same(model, quantized(other))
    update_weights_(model, again.state_dict())  # parts, with their biases
    assert equal(memory(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["mse", "mxfp4", "fp8"])
@pytest.mark.parametrize("family", ORDERS)
def test_of_other_rules_and_encodings(family, encoding):
    if family == "llama4" and encoding != "mse":
        pytest.skip("its experts are quantized to NVFP4 only")
    floats = tiny(family)
    model = quantized(floats, encoding)
    before, answer = memory(model), logits(model)
    for tensors in refits(floats):
        update_weights_(model, tensors)
        assert equal(memory(model), before)
    assert torch.equal(logits(model), answer)


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 64), (64, 32)], ids=["H=I", "H=2I"])
@pytest.mark.parametrize(("family", "name"), EXPERTS, ids=[".".join(e) for e in EXPERTS])
def test_no_shape_decides(family, name, hidden, intermediate):
    """Where a weight and its transpose have one shape."""
    torch.manual_seed(0)
    floats = randomized(class_of(family, name)(AnyConfig(hidden, intermediate)))
    if hasattr(floats, "is_transposed"):
        made = convert(floats)
    else:
        made = NVFP4Experts.from_float(floats.gate_up_proj.mT, floats.down_proj.mT)
        made.transposed = True
    before = memory(made)
    for key, t in floats.state_dict().items():
        update_weights_(made, {key: t})
        assert equal(memory(made), before), key


def copied(model: Any, floats: Any, folder: Path) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any, floats: Any, folder: Path) -> Any:
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


def loaded(model: Any, floats: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return from_pretrained(folder)


def ordered(model: Any, floats: Any, folder: Path) -> Any:
    fusion_moe.prepare_(model, "cuda")
    return model


def cast(model: Any, floats: Any, folder: Path) -> Any:
    return model.to(torch.bfloat16).float()


def adapted(model: Any, floats: Any, folder: Path) -> Any:
    add_lora_(model, rank=4, alpha=4)
    return model


def trained(model: Any, floats: Any, folder: Path) -> Any:
    """By `qat_`, whose scales of matrices stay as they were."""
    qat_(floats, frozen=True)
    model = copy.deepcopy(floats)
    fusion_moe.quantize_(model)
    with torch.no_grad():
        for p in floats.parameters():
            p.mul_(0.7)
    return model


@pytest.mark.parametrize("change", [copied, pickled, loaded, ordered, cast, adapted, trained])
@pytest.mark.parametrize("family", ORDERS)
def test_what_a_module_remembers(family, change, tmp_path):
    floats = tiny(family)
    if change is trained and family == "llama4":
        pytest.skip("its layer does not train in 4 bits")
    model = change(quantized(floats), floats, tmp_path)
    if change is trained:
        update_weights_(model, floats)
        floats = quantized(floats)
        assert equal(memory(model), memory(floats))
        return
    before = memory(model)
    for tensors in refits(floats):
        update_weights_(model, tensors)
    after = memory(model)
    if change is cast:  # of all that is not encoded
        before = memory(cast(quantized(floats), floats, tmp_path))
        after = memory(cast(model, floats, tmp_path))
    assert equal(after, before)


WRONG: dict[str, tuple[Any, type[Error], str]] = {
    "float64": (lambda t: t.double(), DtypeError, "torch.float64"),
    "integers": (lambda t: t.long(), DtypeError, "torch.int64"),
    "no values": (lambda t: t.to("meta"), Error, "on meta"),
    "no tensor": (lambda t: t.tolist(), Error, "a list"),
    "sparse": (lambda t: t.to_sparse(), Error, "sparse"),
    "infinite": (lambda t: t / 0, NonFiniteError, "infinite"),
    "another order": (lambda t: t.mT[..., :1], Error, "expected"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "gate_up_proj_bias"])
def test_what_is_refused_changes_nothing(name, case):
    change, kind, text = WRONG[case]
    floats = tiny("gpt_oss")
    model, state = quantized(floats), other_weights(floats).state_dict()
    before = memory(model)
    key = f"model.layers.1.mlp.experts.{name}"
    state[key] = change(state[key])
    with pytest.raises(kind, match=f"{name}.*{text}|{text}.*{name}"):
        update_weights_(model, state)
    assert equal(memory(model), before)
    logits(model)


def test_numbers_that_a_parameter_cannot_hold():
    floats = tiny("gpt_oss")
    model, state = quantized(floats).bfloat16(), floats.state_dict()
    for name in ("lm_head.weight", "model.layers.1.mlp.experts.down_proj_bias"):
        with pytest.raises(NonFiniteError, match=f"{name} in torch.bfloat16"):
            update_weights_(model, state | {name: torch.full_like(state[name], 3.4e38)})


def test_parameters_without_memory_are_no_place():
    """Which a copy to them would not say."""
    with torch.device("meta"):
        made = convert(class_of("gpt_oss", "GptOssExperts")(AnyConfig()))
    with pytest.raises(UnsupportedError, match="down_proj, on the meta device; expected a param"):
        update_weights_(made, {"down_proj": torch.ones(4, 32, 64)})


def test_scales_that_training_froze_are_not_others():
    floats = tiny("qwen3_moe")
    qat_(floats, frozen=True)
    model = copy.deepcopy(floats)
    fusion_moe.quantize_(model)
    name = "model.layers.1.mlp.experts.down_frozen_scale"
    with pytest.raises(UnsupportedError, match=f"{name}, other scales than the module's"):
        update_weights_(model, {name: 2 * floats.get_buffer(name)})
