"""Reinforcement learning as in grpo.py, with TRL's colocated mode: vLLM's engine in the trainer's
process generates, with experts in NVFP4.

    python examples/grpo_vllm.py                # the small model of this repository
    VLLM_BATCH_INVARIANT=1 python examples/grpo_vllm.py --model DIR --steps 10      # on a GPU

Before each rollout the engine takes the trainer's parameters in place (`reload_weights`): captured
graphs stay, what the prefix cache has of older weights is dropped. On GPUs it says which experts it
chose, and the training step replays them. Under VLLM_BATCH_INVARIANT=1 (on CPUs, which have no such
flag: FUSION_MOE_ORDER=row) a token has the same bits in every batch of the engine.

Before and after training, prints the mean and the largest difference of log-probabilities of the
same tokens between rollout and training step. Exits with 1 unless the engine has the trained
weights: other log-probabilities of the prompts, and those of the training step within rounding.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process

import torch
import trl.generation.vllm_generation
import trl.trainer.grpo_trainer
from grpo import PROMPTS, TOKENS, arguments, autocast, loaded, trainer_of
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration

import fusion_moe
import fusion_moe.transformers
from fusion_moe.checkpoints import quantize
from fusion_moe.routing import Routing

# of log-probabilities, on average; 0.005 to 0.02 were seen
ROUNDING = 0.05


class Colocated(VLLMGeneration):
    """TRL's colocated mode."""

    def sync_weights(self) -> None:
        """The trainer's parameters, one at a time, into the engine's weights."""
        pairs = self._iter_named_params()
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        self.llm.reset_prefix_cache()


class Rollouts:
    """vLLM's engine of the policy in NVFP4, and the routing of what it said last, for
    `grpo.Trainer`.
    """

    def __init__(self, policy: PreTrainedModel, options: dict[str, Any]):
        self.policy, self.options = policy, options
        self.llm: Any = None
        self.answers: list[Any] = []

    def start(self, model: str, **options: Any) -> Any:
        """For TRL, in place of `vllm.LLM`."""
        from vllm import LLM  # --help needs no vLLM

        served = quantize(model, Path(tempfile.mkdtemp()) / "nvfp4", to="nvfp4", scales="max")
        options |= {"quantization": "fusion_moe", "dtype": "bfloat16"}
        options |= {"enable_return_routed_experts": torch.cuda.is_available()}
        self.llm = LLM(str(served), **options | self.options)
        generate = self.llm.generate

        def kept(*args: Any, **kwargs: Any) -> list[Any]:
            self.answers = generate(*args, **kwargs)
            return self.answers

        self.llm.generate = kept
        return self.llm

    def of(self, tokens: Tensor, mask: Tensor) -> Routing:
        """The rows of a padded batch: tokens and mask [batch, length]. Where the engine does not
        say them, they are left to the routers.
        """
        config, known = self.policy.config, {}
        for answer in self.answers:
            ids = *answer.prompt_token_ids, *answer.outputs[0].token_ids
            experts = answer.outputs[0].routed_experts
            if experts is None:
                shape = len(ids) - 1, config.num_hidden_layers, config.num_experts_per_tok
                experts = torch.full(shape, -1)
            known[ids] = Routing.from_vllm(experts, self.policy)
        pairs = zip(tokens, mask.bool(), strict=True)
        return Routing.padded([known[tuple(t[m].tolist())] for t, m in pairs], mask)


def untie_(policy: PreTrainedModel, tokenizer: Any, folder: str) -> None:
    """Gives the policy a head of its own, and writes it to folder. Of a tied one vLLM has a packed
    copy on CPUs, which keeps its weights.
    """
    policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
    policy.config.tie_word_embeddings = False
    for part in policy, tokenizer:
        part.save_pretrained(folder)
    policy.name_or_path = folder


def differences(rollouts: Rollouts, tokenizer: Any) -> dict[str, Tensor]:
    """|log-probability in the rollout - in the training step| of each new token, without replay
    and, where the engine says its routing, with it.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in tokenizer(PROMPTS * 4).input_ids]
    asked = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, logprobs=0, seed=0)
    answers = rollouts.llm.generate(prompts, asked, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    want = torch.tensor(
        [[at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    )
    lists = [[*a.prompt_token_ids, *a.outputs[0].token_ids] for a in answers]
    batch = tokenizer.pad({"input_ids": lists}, return_tensors="pt", padding_side="left")
    batch = batch.to(rollouts.policy.device)

    def apart() -> Tensor:
        logits = rollouts.policy(**batch).logits[:, -TOKENS - 1 : -1].float()
        new = batch.input_ids[:, -TOKENS:, None]
        return (logits.log_softmax(-1).gather(-1, new).squeeze(-1).cpu() - want).abs()

    routing = rollouts.of(batch.input_ids, batch.attention_mask)
    with torch.no_grad(), autocast():
        found = {"": apart()}
        if outputs[0].routed_experts is not None:
            with fusion_moe.replay_routing(rollouts.policy, routing):
                found[" and replay"] = apart()
    return found


def of_prompts(rollouts: Rollouts, tokenizer: Any) -> list[float]:
    """The engine's log-probabilities of the prompts' own tokens: equal for equal weights."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in tokenizer(PROMPTS).input_ids]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return [
        at[token].logprob
        for answer in rollouts.llm.generate(prompts, asked, use_tqdm=False)
        for token, at in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
    ]


def main() -> int:
    """0 if the engine has the trained weights after training."""
    parser = arguments(__doc__, steps=10)
    parser.add_argument("--engine", type=json.loads, default={}, help="options of vLLM, as JSON")
    args = parser.parse_args()

    policy, tokenizer = loaded(args.model)
    if policy.config.tie_word_embeddings and not torch.cuda.is_available():
        untie_(policy, tokenizer, tempfile.mkdtemp())
    fusion_moe.qat_(policy, "nvfp4", scales="max")
    rollouts = Rollouts(policy, args.engine)

    trl.generation.vllm_generation.LLM = rollouts.start
    trl.trainer.grpo_trainer.VLLMGeneration = Colocated
    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.2,
        "vllm_max_model_length": 256,
        # a rollout's experts are the training step's; nothing is to be corrected
        "vllm_importance_sampling_correction": False,
    }
    trainer = trainer_of(policy, tokenizer, args, rollouts, colocated)
    # the flag is the engine's alone
    flag = "row" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else None
    with fusion_moe.options.override(order=flag or fusion_moe.options.current().order):
        print("log-probabilities, rollout - training step   mean     largest")
        _show("before", differences(rollouts, tokenizer))
        old = of_prompts(rollouts, tokenizer)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        apart = differences(rollouts, tokenizer)
        _show("after", apart)
        new = of_prompts(rollouts, tokenizer)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    return 0 if new != old and apart[""].mean() < ROUNDING else 1


def _show(name: str, found: dict[str, Tensor]) -> None:
    for replay, apart in found.items():
        print(f"{name + replay:42} {apart.mean():.2e}   {apart.max():.2e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
