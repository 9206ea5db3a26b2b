"""Experts in files: layers, projections and their order, by names; what is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from bad_calls import messages
from files import MADE

from fusion_moe.checkpoints import Directory, layers_of_experts, method_of, stored_weights
from fusion_moe.checkpoints.experts import experts_of, predicts_further_tokens
from fusion_moe.errors import CheckpointError

PER_EXPERT = [
    "modelopt-qwen3_moe",
    "modelopt-mixtral",
    "modelopt-deepseek_v3-w4a16",
    "ct-qwen3_moe",
    "ct-mixtral",
    "ct-gpt_oss",
]


def names_of(name: str) -> list[str]:
    directory = Directory.open(MADE / name)
    return list(stored_weights(directory.tensors, method_of(directory.quantization)))


@pytest.mark.parametrize("name", PER_EXPERT)
def test_experts_one_by_one(name: str) -> None:
    names = names_of(name)
    ((layer, found),) = layers_of_experts(reversed(names)).items()
    assert layer.startswith("model.layers.0.")
    assert list(found.projections) == ["gate_proj", "up_proj", "down_proj"]
    assert (found.experts, found.fused) == (4, False)
    gate, up, down = (
        ("w1", "w3", "w2") if name == "modelopt-mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    assert found.projections["gate_proj"] == tuple(f"{layer}.{e}.{gate}" for e in range(4))
    assert (found.projections["up_proj"][2], found.projections["down_proj"][3]) == (
        f"{layer}.2.{up}",
        f"{layer}.3.{down}",
    )
    assert set(found.names) <= set(names)


def test_experts_without_a_gate() -> None:
    ((layer, found),) = layers_of_experts(names_of("modelopt-nemotron_h")).items()
    assert (layer, list(found.projections), found.experts) == (
        "backbone.layers.0.mixer.experts",
        ["up_proj", "down_proj"],
        4,
    )


def test_experts_in_one_tensor() -> None:
    ((layer, found),) = layers_of_experts(names_of("modelopt-gpt_oss")).items()
    assert found.projections == {
        "gate_up_proj": (f"{layer}.gate_up_proj",),
        "down_proj": (f"{layer}.down_proj",),
    }
    assert (found.fused, found.experts) == (True, None)


def test_shared_experts_are_none_of_them() -> None:
    assert all(
        "shared" not in name
        for found in layers_of_experts(names_of("modelopt-deepseek_v3-w4a16")).values()
        for name in found.names
    )


def test_what_is_missing_or_there_twice(golden: Callable[[str], None]) -> None:
    def without(part: str) -> list[str]:
        return [name for name in names_of("modelopt-qwen3_moe") if part not in name]

    def of(*experts: int | str) -> list[str]:
        return [f"a.experts.{e}.{p}_proj" for e in experts for p in ("gate", "up", "down")]

    fewer, both = without(".experts.3."), [*of(0), "a.experts.gate_up_proj"]
    assert layers_of_experts(fewer)["model.layers.0.mlp.experts"].experts == 3
    assert layers_of_experts(of(0, 1, "+1"))["a.experts"].experts == 2  # no number at all
    golden(
        messages(
            {
                "no up of an expert": lambda: layers_of_experts(without(".experts.2.up_proj")),
                "not the first": lambda: layers_of_experts(without(".experts.0.")),
                "no down": lambda: layers_of_experts(without("down_proj")),
                "more than any memory has": lambda: layers_of_experts(of(0, 10**18)),
                "fewer than in config.json": lambda: layers_of_experts(fewer, experts=4),
                "expert 1 again": lambda: layers_of_experts(of(0, 1, "01")),
                "expert 1 in another script": lambda: layers_of_experts(of(0, 1, "\u0661")),
                "expert 11 in two scripts": lambda: layers_of_experts(of(0, 1, "1\u0661")),
                "two names": lambda: layers_of_experts([*of(0, 1), "a.experts.1.w1"]),
                "in one tensor too": lambda: layers_of_experts(both),
            }
        )
    )


TOWERS = {
    "num_experts": 64,  # of nothing: the text model says it
    "text_config": {"num_experts": 4, "num_hidden_layers": 2},
    "vision_config": {"num_local_experts": 8, "num_hidden_layers": 5},
    "talker_config": {
        "text_config": {"n_routed_experts": 16, "num_hidden_layers": 3},
        "code_predictor_config": {"num_hidden_layers": 1},
    },
}


@pytest.mark.parametrize(
    ("name", "experts", "layers"),
    [
        ("model.layers.{}.mlp.experts", 4, 2),
        ("model.language_model.layers.{}.mlp.text_moe.experts", 4, 2),
        ("vision_encoder.layers.{}.mlp.experts", 8, 5),
        ("model.visual.layers.{}.mlp.experts", 8, 5),
        ("talker.model.layers.{}.mlp.experts", 16, 3),
        ("talker.code_predictor.model.layers.{}.mlp.experts", None, 1),
    ],
)
def test_each_tower_has_its_number_of_experts_and_layers(
    name: str, experts: int | None, layers: int
) -> None:
    last, further = name.format(layers - 1), name.format(layers)
    assert experts_of(TOWERS, last) == experts
    assert not predicts_further_tokens(last, TOWERS)
    assert predicts_further_tokens(further, TOWERS)

    def of(count: int) -> list[str]:
        return [f"{last}.{e}.{p}_proj" for e in range(count) for p in ("gate", "up", "down")]

    assert layers_of_experts(of(experts or 7), TOWERS)[last].experts == (experts or 7)
    if experts:
        with pytest.raises(CheckpointError, match=rf"3 experts; expected {experts}, by config"):
            layers_of_experts(of(3), TOWERS)
