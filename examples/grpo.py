"""Reinforcement learning (GRPO) of a mixture-of-experts policy whose rollouts run in NVFP4, with
the experts and the bits of the training step.

    python examples/grpo.py                     # the small model of this repository, on a CPU
    python examples/grpo.py --model DIR --steps 200

The policy trains with rounded weights (`qat_`, float masters); its copy in NVFP4 generates, and
takes the new weights in place before each rollout (`update_weights_`). A rollout records its
routing (`record_routing`), and the training step replays it (`replay_routing`), with gradients to
the router. Both run with order="row", in which a token's experts have the same bits in every batch.

TRL's GRPOTrainer trains, by its `rollout_func`: transformers generates here, since vLLM with TRL
needs a GPU. The reward is the share of a completion's characters that are a letter, "e" without
--letter; exits with 1 unless its mean over the last fifth of the steps is above that over the
first fifth.

First prints the mean and the largest difference of log-probabilities of the same tokens between
rollout and training step: with none of the two, one of them, and both. What is left with both is
attention's and that of dense layers, which add up in another order in another batch.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import fusion_moe
import fusion_moe.transformers
from fusion_moe.routing import Routing

SMALL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPTS = ["def main():\n", "import os\n", "class Model:\n", "The kernel", "# Changes\n", "return "]
TOKENS = 16  # of a completion


class Rollouts:
    """Generates with a copy of the policy in NVFP4. routing: the experts of each sequence, by its
    tokens.
    """

    def __init__(self, policy: PreTrainedModel, tokenizer: Any):
        self.policy, self.tokenizer = policy, tokenizer
        self.server = copy.deepcopy(policy)
        fusion_moe.quantize_(self.server, fusion_moe.NVFP4Config(scales="max"))
        fusion_moe.qat_(policy, "nvfp4", scales="max")
        self.routing: dict[tuple[int, ...], Routing] = {}

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's rollout_func."""
        fusion_moe.update_weights_(self.server, self.policy)
        self.routing.clear()
        given = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        given = given.to(self.server.device)
        with fusion_moe.record_routing(self.server) as recorded, autocast():
            made = self.server.eval().generate(
                **given,
                max_new_tokens=TOKENS,
                do_sample=True,
                min_new_tokens=TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        width, result = given.input_ids.shape[1], {"prompt_ids": [], "completion_ids": []}
        new = made.sequences[:, width:]
        logits = torch.stack(made.logits, 1).float()
        logprobs = logits.log_softmax(-1).gather(-1, new[..., None]).squeeze(-1)
        there = torch.cat([given.attention_mask, torch.ones_like(new)], 1).bool()
        for i, part in enumerate(recorded.sequences(len(prompts))):
            tokens = made.sequences[i, there[i]].tolist()
            # the last token was sampled, never computed
            self.routing[tuple(tokens)] = part[there[i, :-1]].to("cpu", torch.int16)
            result["prompt_ids"].append(tokens[:-TOKENS])
            result["completion_ids"].append(tokens[-TOKENS:])
        return result | {"logprobs": logprobs.tolist()}

    def of(self, tokens: Tensor, mask: Tensor) -> Routing:
        """The rows of a padded batch: tokens and mask [batch, length]."""
        pairs = zip(tokens, mask.bool(), strict=True)
        return Routing.padded([self.routing[tuple(t[m].tolist())] for t, m in pairs], mask)


class Trainer(GRPOTrainer):
    """Whose steps compute the experts that rollouts computed."""

    rollouts: Rollouts

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's. The backward of checkpointed layers replays too, though it runs afterwards."""
        tokens, mask = (
            torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
            for kind in ("ids", "mask")
        )
        with fusion_moe.replay_routing(model, self.rollouts.of(tokens, mask)):
            return super().compute_loss(model, inputs, *args, **kwargs)


def autocast() -> torch.autocast:
    """As the trainer's, with bf16=True."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def differences(rollouts: Rollouts, order: str) -> dict[str, Tensor]:
    """|log-probability in the rollout - in the training step| of each new token, without replay and
    with it.
    """
    found = {}
    with fusion_moe.options.override(order=order):
        torch.manual_seed(0)
        made = rollouts(PROMPTS * 4, None)
        lists = [p + c for p, c in zip(made["prompt_ids"], made["completion_ids"], strict=True)]
        want = torch.tensor(made["logprobs"])
        batch = rollouts.tokenizer.pad(
            {"input_ids": lists}, return_tensors="pt", padding_side="left"
        ).to(rollouts.policy.device)
        routing = rollouts.of(batch.input_ids, batch.attention_mask)
        with torch.no_grad(), autocast():
            for name in "", "replay":
                if name:
                    with fusion_moe.replay_routing(rollouts.policy, routing):
                        logits = rollouts.policy(**batch).logits
                else:
                    logits = rollouts.policy(**batch).logits
                new = batch.input_ids[:, -TOKENS:, None]
                got = logits[:, -TOKENS - 1 : -1].float().log_softmax(-1).gather(-1, new)
                found[name] = (got.squeeze(-1).cpu() - want).abs()
    return found


def trainer_of(
    policy: PreTrainedModel,
    tokenizer: Any,
    args: argparse.Namespace,
    rollouts: Any,
    config: dict[str, Any],
    **more: Any,
) -> Trainer:
    """A trainer by the command's arguments, whose steps ask `rollouts.of`. config: further fields
    of GRPOConfig; more: further arguments of GRPOTrainer.
    """

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [text.count(args.letter) / max(len(text), 1) for text in completions]

    trainer = Trainer(
        policy,
        reward_funcs=reward,
        args=GRPOConfig(
            tempfile.mkdtemp(),  # nothing is saved
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=24,
            num_generations=8,
            max_completion_length=TOKENS,
            gradient_checkpointing=False,
            bf16=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            **config,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * args.steps}),
        processing_class=tokenizer,
        **more,
    )
    trainer.rollouts = rollouts
    return trainer


def arguments(description: str | None, steps: int) -> argparse.ArgumentParser:
    """The command's arguments, with so many steps by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SMALL), help="a directory, in floats")
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--letter", default="e", help="what is rewarded")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of AdamW")
    return parser


def loaded(model: str) -> tuple[PreTrainedModel, Any]:
    """The policy of a directory, in float32, where it trains; and its tokenizer."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, experts_implementation="fusion_moe"
    ).to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return policy, tokenizer


def main() -> int:
    """0 if the reward rose."""
    args = arguments(__doc__, steps=40).parse_args()
    policy, tokenizer = loaded(args.model)
    rollouts = Rollouts(policy, tokenizer)

    print("log-probabilities, rollout - training step   mean     largest")
    for order, name in ("free", "neither"), ("row", 'order="row"'):
        for replay, found in differences(rollouts, order).items():
            both = f"{name} and replay" if replay and order == "row" else replay or name
            print(f"{both:42} {found.mean():.2e}   {found.max():.2e}")

    trainer = trainer_of(policy, tokenizer, args, rollouts, {}, rollout_func=rollouts)
    with fusion_moe.options.override(order="row"):
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    fifth = max(len(rewards) // 5, 1)
    first, last = (sum(some) / fifth for some in (rewards[:fifth], rewards[-fifth:]))
    print(f"reward: {first:.3f} in the first {fifth} steps, {last:.3f} in the last {fifth}")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
