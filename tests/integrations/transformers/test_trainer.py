"""transformers' Trainer on models with encoded experts: what a checkpoint holds, and what resuming
and the best model bring back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tiny_qwen3 import qwen3_moe
from transformers import AutoModel, AutoModelForCausalLM

import fusion_moe
from fusion_moe.errors import CheckpointError
from fusion_moe.integrations.transformers.trainer import load_checkpoint_
from fusion_moe.lora.files import load_lora_
from fusion_moe.nn import add_lora_, remove_lora_
from fusion_moe.transformers import from_pretrained

# which needs accelerate, as Trainer does
pytestmark = [pytest.mark.usefixtures("meaning"), pytest.mark.judges("peft")]
DATA = [
    {"input_ids": torch.arange(i, i + 8) % 32, "labels": torch.arange(i, i + 8) % 32}
    for i in range(8)
]


def base(seed: int = 0) -> Any:
    """A random model, its experts in NVFP4."""
    model = qwen3_moe(seed)
    fusion_moe.quantize_(model)
    return model


def adapted(seed: int = 0, rank: int = 2, alpha: float = 4) -> Any:
    model = base(seed)
    add_lora_(model, rank, alpha)
    return model


def trainer_of(model: Any, folder: Path, steps: int = 2, **how: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = {
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), max_steps=steps, learning_rate=1e-2, **given, **how)
    return Trainer(model, args, train_dataset=DATA, eval_dataset=DATA[:2])


def assert_equal(a: Any, b: Any, of: Callable[[str], bool] = lambda name: True) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items() if of(name))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with adapters after two steps, and what its Trainer wrote."""
    from fusion_moe import options

    model, folder = adapted(), tmp_path_factory.mktemp("trained")
    with options.override(target="reference"):
        trainer_of(model, folder).train()
    assert model.model.layers[0].mlp.experts.down_lora.B.any()
    return model, folder


def test_checkpoints_have_pefts_files_beside_the_model(trained):
    model, folder = trained
    for step in (1, 2):
        files = {
            str(p.relative_to(folder / f"checkpoint-{step}"))
            for p in (folder / f"checkpoint-{step}").rglob("*")
        }
        assert files >= {
            "model.safetensors",
            "adapters/adapter_config.json",
            "adapters/adapter_model.safetensors",
        }
    plain = base()
    load_lora_(plain, folder / "checkpoint-2" / "adapters")
    assert_equal(plain, model, lambda name: "lora" in name)
    # other loaders of the base read only what they know
    config = json.loads((folder / "checkpoint-1" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert "adapter" not in json.dumps(config)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs, too."""
    from transformers.utils import logging

    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


def test_resuming_goes_on_where_training_stopped(trained, tmp_path, warned):
    """Bit for bit, also from another base and at another step than the last one."""
    model, folder = trained
    there = adapted(seed=1)
    trainer_of(there, tmp_path).train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert_equal(there, model)
    assert "keys" not in warned.text


def test_the_best_model_comes_back(tmp_path):
    how = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    model = adapted()
    # the loss falls: the first is the "best"
    trainer = trainer_of(model, tmp_path, greater_is_better=True, **how)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    plain = base()
    load_lora_(plain, tmp_path / "checkpoint-1" / "adapters")
    assert_equal(plain, model)


def test_without_adapters_the_rest_trains_and_resumes(tmp_path, warned):
    model, there = base(), base(seed=1)
    trainer_of(model, tmp_path / "a").train()
    trainer_of(there, tmp_path / "b").train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1")
    )
    assert_equal(there, model)
    assert not (tmp_path / "a" / "checkpoint-1" / "adapters").exists()
    assert "keys" not in warned.text


@pytest.mark.parametrize(
    "load", [from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["ours", "transformers'"]
)
def test_a_saved_model_loads_with_its_adapters(load, trained, tmp_path):
    model, _ = trained
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load(tmp_path)
    assert_equal(loaded, model)
    assert {n for n, p in loaded.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


def test_base_models_have_the_adapters_too(trained, tmp_path):
    model, _ = trained
    model.save_pretrained(tmp_path / "whole")
    assert_equal(AutoModel.from_pretrained(tmp_path / "whole"), model.model)
    loaded = AutoModel.from_pretrained(tmp_path / "whole")
    loaded.save_pretrained(tmp_path / "base")
    assert_equal(AutoModel.from_pretrained(tmp_path / "base"), model.model)
    plain = base()
    load_lora_(plain, tmp_path / "base" / "adapters")
    assert_equal(plain, model, lambda name: "lora" in name)


def test_adapters_of_others_are_left_out_and_stay(trained, tmp_path, caplog):
    model, _ = trained
    model.save_pretrained(tmp_path)
    config = tmp_path / "adapters" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj"]}))
    loaded = from_pretrained(tmp_path)
    assert not [name for name in loaded.state_dict() if "lora" in name]
    loaded.save_pretrained(tmp_path)
    assert len(list((tmp_path / "adapters").iterdir())) == 2
    assert "adapters are left out: " in caplog.text
    assert "target_modules = ['q_proj']" in caplog.text


def test_adapters_of_an_earlier_model_do_not_stay(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    remove_lora_(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "adapters").exists()
    assert_equal(from_pretrained(tmp_path), model)


def test_only_the_main_process_writes(tmp_path):
    adapted().save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            base,
            r"rank 2, alpha 4.0 for model.layers.0.mlp.experts.gate_up; expected no adapter of "
            r".*, as the model has; give the model",
        ),
        (lambda: adapted(rank=4), "rank 2, alpha 4.0 for .*; expected rank 4, alpha 4"),
        (lambda: adapted(alpha=2), "rank 2, alpha 4.0 for .*; expected rank 2, alpha 2"),
    ],
    ids=["none", "another rank", "another alpha"],
)
def test_other_adapters_than_the_checkpoints_are_an_error(model, says, trained):
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint_(model(), trained[1] / "checkpoint-1")


def test_a_checkpoint_without_adapters_is_an_error(tmp_path):
    base().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter of .*experts.gate_up; expected rank 2"):
        trainer_of(adapted(), tmp_path).train(resume_from_checkpoint=str(tmp_path))


def test_both_adapters_resume(tmp_path):
    """PEFT's on attention and ours on experts: PEFT's file has both."""
    from peft import LoraConfig, get_peft_model

    def both() -> Any:
        lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return get_peft_model(adapted(), lora)

    model, there = both(), both()
    trainer_of(model, tmp_path / "a").train()
    trainer_of(there, tmp_path / "b").train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2")
    )
    assert model.base_model.model.model.layers[0].mlp.experts.B.any()
    assert_equal(there, model)


class Tiny(torch.nn.Module):
    """Adapted experts, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = fusion_moe.NVFP4Experts.from_float(
            torch.randn(3, 32, 32), torch.randn(3, 32, 16)
        )
        add_lora_(self, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.nn.functional.one_hot(input_ids.flatten(), 32).float()
        y = self.experts(x, input_ids.flatten()[:, None] % 3, torch.ones(len(x), 1))
        return {"loss": y.square().mean()}


@pytest.fixture
def backend_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps the first backend of a process."""
    from accelerate.state import AcceleratorState

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("backend_of_this_test")
def test_torch_compile_backend(tmp_path):
    """By Trainer's own argument: the loss of a model that is not compiled."""
    losses = []
    for backend in (None, "fusion_moe"):
        torch.manual_seed(0)
        trainer = trainer_of(
            Tiny(), tmp_path / str(backend), save_strategy="no", torch_compile_backend=backend
        )
        losses.append(trainer.train().training_loss)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert trainer.accelerator.state.dynamo_plugin.to_kwargs()["backend"] == "fusion_moe"
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_other_backends_stay_unknown():
    from accelerate.utils import DynamoBackend

    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="'FUSION' is not a valid DynamoBackend"):
        DynamoBackend("FUSION")
