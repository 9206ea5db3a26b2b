"""transformers' Trainer on PEFT's adapters of encoded experts and attention: what people do between
loading a model and giving away what they trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file
from test_peft_functions import config, factors, fill, quantized, trained, wrapped
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from fusion_moe.transformers import from_pretrained

pytestmark = [pytest.mark.usefixtures("meaning"), pytest.mark.judges("peft", "accelerate")]
DATA = [
    {"input_ids": torch.arange(i, i + 8) % 32, "labels": torch.arange(i, i + 8) % 32}
    for i in range(8)
]
EPOCHS, STEPS = 3, 2  # of an epoch


class Killed(TrainerCallback):
    """Ends the process, as it were, in the middle of an epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS + 1:
            raise KeyboardInterrupt


def trainer_of(model: Any, folder: Path, **how: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    usual = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": len(DATA) // STEPS,
        "save_strategy": "epoch",
        "logging_steps": 1,
        "learning_rate": 3e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **usual | how)
    return Trainer(model, args, train_dataset=DATA, eval_dataset=DATA[:2])


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapted() -> Any:
    torch.manual_seed(3)  # of A
    return wrapped(quantized(), seed=None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run without interruption."""
    trainer = trainer_of(adapted(), tmp_path_factory.mktemp("whole"))
    trainer.train()
    return trainer


def test_experts_and_attention_learn(whole):
    found = losses(whole)
    assert found[-1] < 0.9 * found[0]
    assert all(p.any() for p in trained(whole.model).values())
    folder = Path(get_last_checkpoint(whole.args.output_dir))
    assert folder.name == f"checkpoint-{EPOCHS * STEPS}"
    assert not (folder / "model.safetensors").exists()
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == len(factors(whole.model)) == 6


def test_a_killed_run_resumes_to_the_same_losses(whole, tmp_path):
    """Bit for bit, from the last epoch's checkpoint, in a model made anew."""
    killed = trainer_of(adapted(), tmp_path)
    killed.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    model = adapted()
    fill(model, 9)  # which the checkpoint replaces
    resumed = trainer_of(model, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    want = factors(whole.model)
    assert all(torch.equal(p, want[n]) for n, p in factors(model).items())


def test_evaluations_in_between_change_nothing_and_the_best_comes_back(whole, tmp_path):
    how = {"eval_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}
    # the loss falls: the first epoch is the "best"
    trainer = trainer_of(adapted(), tmp_path, metric_for_best_model="loss", **how)
    trainer.train()
    assert losses(trainer) == losses(whole)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{STEPS}")
    saved = load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    found = {n.replace(".default", ""): p for n, p in factors(trainer.model).items()}
    assert found.keys() == saved.keys()
    assert all(torch.equal(p, saved[n]) for n, p in found.items())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_activations_give_the_same_losses(whole, use_reentrant, tmp_path):
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    model = adapted()
    trainer = trainer_of(model, tmp_path, gradient_checkpointing=True, save_strategy="no", **how)
    trainer.train()
    assert losses(trainer) == losses(whole)


def test_what_was_trained_is_merged_saved_and_loaded(whole, tmp_path):
    """By PEFT onto the model as it was, and merged into it, by transformers alone."""
    from peft import PeftModel

    tokens = DATA[0]["input_ids"][None]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits

    want = logits(whole.model)
    model = PeftModel.from_pretrained(quantized(), get_last_checkpoint(whole.args.output_dir))
    assert torch.equal(logits(model), want)
    merged = model.merge_and_unload()
    assert (logits(merged) - want).norm() < 0.1 * want.norm()
    merged.save_pretrained(tmp_path)
    for load in from_pretrained, AutoModelForCausalLM.from_pretrained:
        state = load(tmp_path, dtype=torch.float32).state_dict()
        assert state.keys() == merged.state_dict().keys()
        assert all(torch.equal(t, state[n]) for n, t in merged.state_dict().items())


def test_fp16_with_a_gradient_scaler():
    """Losses of float32 within fp16's rounding; the scaler's steps are not skipped."""
    found = []
    for dtype in torch.float32, torch.float16:
        model = adapted().train()
        scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
        optimizer = torch.optim.AdamW(trained(model).values(), lr=3e-2)
        batch = {key: torch.stack([row[key] for row in DATA]) for key in DATA[0]}
        for _ in range(3):
            with torch.autocast("cpu", dtype, enabled=dtype == torch.float16):
                loss = model(**batch).loss
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        assert scaler.get_scale() in (1.0, 2.0**16)
    assert found[3:] == pytest.approx(found[:3], rel=1e-2)
    assert found[5] < found[3]


def test_a_reward_model(tmp_path):
    """The new head trains beside the adapters, and is saved with them."""
    from peft import PeftModel, get_peft_model
    from transformers import AutoModelForSequenceClassification

    quantized().save_pretrained(tmp_path / "base")

    def base() -> Any:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=1, dtype=torch.float32
        )

    lora = config(modules_to_save=["score"])
    lora.task_type = "SEQ_CLS"
    model = get_peft_model(base(), lora)
    model.config.pad_token_id = 0
    fill(model, 1)
    tokens = torch.arange(1, 9)[None]
    model(input_ids=tokens).logits.sum().backward()
    assert all(p.grad is not None for p in trained(model).values())
    assert any("score.modules_to_save" in n for n in trained(model))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    again.config.pad_token_id = 0
    assert torch.equal(again.eval()(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)
