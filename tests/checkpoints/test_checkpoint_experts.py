"""Experts in files: layers, projections and their order, by names; what is missing."""

from __future__ import annotations

import pytest
from files import MADE

from fusion_moe.checkpoints import Directory, layers_of_experts, method_of, stored_weights
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


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (
            ".experts.2.up_proj",
            "model.layers.0.mlp.experts: no up_proj of expert 2; expected all experts from 0 to 3",
        ),
        (
            ".experts.0.",
            "model.layers.0.mlp.experts: no gate_proj of expert 0; expected all "
            "experts from 0 to 3",
        ),
        (
            "down_proj",
            "model.layers.0.mlp.experts: gate_proj, up_proj alone; expected up_proj and "
            "down_proj, or w3 and w2, of each expert",
        ),
    ],
)
def test_missing_experts(gone: str, said: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        layers_of_experts(name for name in names_of("modelopt-qwen3_moe") if gone not in name)
    assert str(raised.value) == said


def test_a_number_beyond_any_memory() -> None:
    names = [
        f"a.experts.{e}.{projection}"
        for e in (0, 10**18)
        for projection in ("up_proj", "down_proj")
    ]
    with pytest.raises(
        CheckpointError,
        match=f"no up_proj of expert 1 and {10**18 - 2} more; "
        f"expected all experts from 0 to {10**18}",
    ):
        layers_of_experts(names)


def test_more_or_fewer_experts_than_the_configuration_says() -> None:
    names = [name for name in names_of("modelopt-qwen3_moe") if ".experts.3." not in name]
    assert layers_of_experts(names)["model.layers.0.mlp.experts"].experts == 3
    with pytest.raises(
        CheckpointError, match=r"mlp.experts: 3 experts; expected 4, by config.json"
    ):
        layers_of_experts(names, experts=4)


@pytest.mark.parametrize("number", ["01", "\u0661", "1\u0661", "+1"])
def test_an_expert_by_an_unusual_number(number: str) -> None:
    """It would be expert 1 again, or 11."""
    names = [
        f"a.experts.{e}.{p}"
        for e in ("0", "1", number)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    if number == "+1":  # no number at all
        assert layers_of_experts(names)["a.experts"].experts == 2
        return
    with pytest.raises(
        CheckpointError,
        match="gate_proj: expert .*; expected a number in digits 0 to 9, without leading zeros",
    ):
        layers_of_experts(names)


def test_an_expert_by_two_names() -> None:
    names = [f"a.experts.{e}.{p}" for e in range(2) for p in ("gate_proj", "up_proj", "down_proj")]
    with pytest.raises(
        CheckpointError,
        match=r"a.experts: a.experts.1.gate_proj and "
        r"a.experts.1.w1; expected one of the two",
    ):
        layers_of_experts([*names, "a.experts.1.w1"])


def test_both_ways_at_once() -> None:
    with pytest.raises(CheckpointError, match="one by one, and all in one tensor"):
        layers_of_experts(
            ["a.experts.0.up_proj", "a.experts.0.down_proj", "a.experts.gate_up_proj"]
        )
