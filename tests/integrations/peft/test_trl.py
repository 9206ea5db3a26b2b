"""TRL's trainers on PEFT's adapters of encoded experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_peft_functions import config, quantized, trained

pytestmark = [pytest.mark.usefixtures("meaning"), pytest.mark.judges("trl", "datasets", "peft")]
WORDS = "abcdefghijklmnopqrstuvwxyz ."
USUAL = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 3e-2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def tokenizer() -> Any:
    """Letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *WORDS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = ("pad_token", "bos_token", "eos_token", "unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, **dict(zip(names, special, strict=True))
    )


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("packing", [False, True])
def test_supervised(packing, tmp_path):
    """TRL wraps the model by itself; what it saves loads on the model as it was."""
    from datasets import Dataset
    from peft import PeftModel
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(
        quantized(),
        SFTConfig(str(tmp_path), **USUAL, max_length=32, packing=packing),
        train_dataset=Dataset.from_list([{"text": "the quick brown fox."}] * 12),
        processing_class=tokenizer(),
        peft_config=config(),
    )
    assert len(trained(trainer.model)) == 6
    found = losses(trainer)
    assert found[-1] < found[0]
    again = PeftModel.from_pretrained(quantized(), Path(tmp_path, "checkpoint-3")).eval()
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        want = trainer.model.eval()(input_ids=tokens).logits
        assert torch.equal(again(input_ids=tokens).logits, want)


def test_preferences(tmp_path):
    """The reference is the same model, its adapters disabled: at first the loss is log 2, whatever
    the adapters are.
    """
    from datasets import Dataset
    from peft import get_peft_model
    from trl import DPOConfig, DPOTrainer

    pairs = [{"prompt": "the quick ", "chosen": "brown fox", "rejected": "lazy dog"}] * 8
    model = get_peft_model(quantized(), config())
    trainer = DPOTrainer(
        model,
        args=DPOConfig(str(tmp_path), **USUAL),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
    )
    found = losses(trainer)
    assert found[0] == pytest.approx(0.6931, rel=5e-3)  # and a little for the router
    assert found[-1] < found[0]
