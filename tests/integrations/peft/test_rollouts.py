"""order="row": rollouts and training by the same modules have the same log-probabilities, bit for
bit, on the small real model: alone, and in TRL's GRPO.
"""

from __future__ import annotations

import pytest
import torch
from rollouts import others_by_row, padded, roll_out, small_model, trained

from fusion_moe import options

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("one_thread")]
PROMPTS = ([5, 6, 7, 8, 9], [300, 301], [40] * 9, [1500, 3, 77])


def difference(order: str) -> float:
    """The largest between a rollout's log-probabilities and those of a training step."""
    torch.manual_seed(0)
    model = small_model()
    with options.override(order=order), others_by_row():
        chosen, logps = roll_out(model, PROMPTS, 6)
        ids, mask = padded([[*p, *c] for p, c in zip(PROMPTS, chosen.tolist(), strict=True)])
        model.get_input_embeddings().weight.requires_grad_()
        found = trained(model, ids, mask, 6)
        assert found.requires_grad
    return float((found.detach() - logps).abs().max())


@pytest.fixture
def one_thread():
    """Rows are too short to be shared: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_training_has_the_log_probabilities_of_rollouts():
    assert difference("row") == 0
    assert 0 < difference("free") < 1e-3


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.judges("peft", "trl")
@pytest.mark.filterwarnings("ignore")  # those of TRL about itself
def test_grpo(tmp_path):
    """20 steps of TRL's trainer, of adapters of experts and attention. What TRL computes without
    logits, in tiles, is not ours, and is computed by rows here.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from rollouts import TINY
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    count, differences = 6, list[float]()

    class Trainer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        ):
            self.found = trained(model, input_ids, attention_mask, logits_to_keep)
            return self.found, torch.zeros_like(self.found), torch.zeros(())

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            assert loss.requires_grad
            delta = self.found.detach() - inputs["sampling_per_token_logps"]
            differences.append(float(delta[inputs["completion_mask"].bool()].abs().max()))
            return loss

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.decode([0])

    def rollout(prompts, trainer):
        ids = [tokenizer(p)["input_ids"] for p in prompts]
        chosen, logps = roll_out(trainer.accelerator.unwrap_model(trainer.model), ids, count)
        return {"prompt_ids": ids, "completion_ids": chosen.tolist(), "logprobs": logps.tolist()}

    torch.manual_seed(0)
    adapters = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    config = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=count,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        disable_tqdm=True,
    )
    with options.override(order="row"), others_by_row():
        trainer = Trainer(
            model=small_model(),
            reward_funcs=lambda completions, **_: [float(c.count("e")) for c in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p} for p in ("def f", "class A", "x =")]),
            processing_class=tokenizer,
            peft_config=adapters,
            rollout_func=rollout,
        )
        before = {n: p.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        trainer.train()
    assert differences == [0.0] * 20
    changed = [
        n for n, p in trainer.model.named_parameters() if n in before and (p != before[n]).any()
    ]
    assert {"experts" in n for n in changed} == {True, False}
