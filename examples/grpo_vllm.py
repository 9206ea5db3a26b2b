"""Reinforcement learning as in grpo.py, with TRL's colocated mode: vLLM's engine in the trainer's
process generates, with experts in NVFP4. With --server in TRL's server mode: on other GPUs.

    python examples/grpo_vllm.py                # the small model of this repository
    VLLM_BATCH_INVARIANT=1 python examples/grpo_vllm.py --model DIR --steps 10      # on a GPU

    fusion-moe quantize DIR SERVED --to nvfp4 --scales max
    CUDA_VISIBLE_DEVICES=0 VLLM_SERVER_DEV_MODE=1 vllm serve SERVED --quantization fusion_moe \\
        --max-model-len 256 --weight-transfer-config '{"backend": "nccl"}' \\
        --logprobs-mode processed_logprobs --enable-return-routed-experts
    CUDA_VISIBLE_DEVICES=1 python examples/grpo_vllm.py --model DIR --server http://127.0.0.1:8000

Before each rollout the engine takes the trainer's parameters in place (`reload_weights`; a server,
by NCCL): captured graphs stay, what the prefix cache has of older weights is dropped. On GPUs it
says which experts it chose, and the training step replays them. Under VLLM_BATCH_INVARIANT=1 (on
CPUs, which have no such flag: FUSION_MOE_ORDER=row) a token has the same bits in every batch of the
engine.

Before and after training, prints the mean and the largest difference of log-probabilities of the
same tokens between rollout and training step. Exits with 1 unless the engine has the trained
weights: other log-probabilities of the prompts, and those of the training step within rounding.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process

import numpy
import torch
import trl.generation.vllm_generation
import trl.trainer.grpo_trainer
from grpo import PROMPTS, TOKENS, arguments, autocast, loaded, trainer_of
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.generation.vllm_client import VLLMClient
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
    """The routing of what vLLM said last, for `grpo.Trainer`."""

    def __init__(self, policy: PreTrainedModel):
        self.policy, self.routed = policy, False
        self.routing: dict[tuple[int, ...], Routing] = {}

    def keep(self, answers: Iterable[tuple[list[int], list[int], Any]]) -> None:
        """Tokens of prompts and of answers, and their experts; None: vLLM does not say them, and
        they are left to the routers.
        """
        self.routing.clear()
        config = self.policy.config
        for prompt, new, experts in answers:
            ids, self.routed = (*prompt, *new), experts is not None
            if experts is None:
                shape = len(ids) - 1, config.num_hidden_layers, config.num_experts_per_tok
                experts = torch.full(shape, -1)
            self.routing[ids] = Routing.from_vllm(experts, self.policy)

    def of(self, tokens: Tensor, mask: Tensor) -> Routing:
        """The rows of a padded batch: tokens and mask [batch, length]."""
        pairs = zip(tokens, mask.bool(), strict=True)
        return Routing.padded([self.routing[tuple(t[m].tolist())] for t, m in pairs], mask)


class Engine(Rollouts):
    """Rollouts by an engine of the policy in NVFP4, in this process. more: options of vLLM."""

    def __init__(self, policy: PreTrainedModel, more: dict[str, Any]):
        super().__init__(policy)
        self.more = more
        self.llm: Any = None

    def start(self, model: str, **options: Any) -> Any:
        """For TRL, in place of `vllm.LLM`."""
        from vllm import LLM  # --help needs no vLLM

        served = quantize(model, Path(tempfile.mkdtemp()) / "nvfp4", to="nvfp4", scales="max")
        options |= {"quantization": "fusion_moe", "dtype": "bfloat16"}
        options |= {"enable_return_routed_experts": torch.cuda.is_available()}
        self.llm = LLM(str(served), **options | self.more)
        generate = self.llm.generate

        def kept(*args: Any, **kwargs: Any) -> list[Any]:
            answers = generate(*args, **kwargs)
            firsts = ((a.prompt_token_ids, a.outputs[0]) for a in answers)
            self.keep((prompt, [*one.token_ids], one.routed_experts) for prompt, one in firsts)
            return answers

        self.llm.generate = kept
        return self.llm

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], Tensor]:
        """TOKENS new tokens of each prompt, and their log-probabilities."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, logprobs=0, seed=0)
        answers = self.llm.generate(_given(prompts), asked, use_tqdm=False)
        new = [(a.outputs[0].token_ids, a.outputs[0].logprobs) for a in answers]
        found = [[at[t].logprob for t, at in zip(*one, strict=True)] for one in new]
        return [[*ids] for ids, _ in new], torch.tensor(found)

    def of_prompts(self, prompts: list[list[int]]) -> list[float]:
        """Log-probabilities of the prompts' own tokens: equal for equal weights."""
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        return [
            at[token].logprob
            for a in self.llm.generate(_given(prompts), asked, use_tqdm=False)
            for token, at in zip(a.prompt_token_ids[1:], a.prompt_logprobs[1:], strict=True)
        ]


class Server(Rollouts):
    """Rollouts by a server, of which TRL's client asks."""

    client: Any = None

    def connect(self, **options: Any) -> Any:
        """For TRL, in place of its client."""
        self.client = VLLMClient(**options)
        post = self.client._post

        def kept(url: str, **asked: Any) -> Any:
            answer = post(url, **asked)
            if url.endswith("/completions"):
                self.keep(
                    (one["prompt_token_ids"], one["token_ids"], _array(one.get("routed_experts")))
                    for one in answer["choices"]
                    if one["token_ids"]
                )
            return answer

        self.client._post = kept
        return self.client

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], Tensor]:
        """As of `Engine`."""
        more = {"min_tokens": TOKENS, "seed": 0}
        made = self.client.generate(prompts, max_tokens=TOKENS, generation_kwargs=more)
        return made["completion_ids"], torch.tensor(made["logprobs"]).squeeze(-1)

    def of_prompts(self, prompts: list[list[int]]) -> list[float]:
        """As of `Engine`."""
        found = self.client.get_sequence_logprobs(prompts, [1] * len(prompts), top_logprobs=1)
        return [at[0] for one in found["actual_logprobs"] for at in one]


def _given(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": ids} for ids in prompts]


def _array(said: str | None) -> Any:
    return said and numpy.load(io.BytesIO(base64.b64decode(said)))


def untie_(policy: PreTrainedModel, tokenizer: Any, folder: str) -> None:
    """Gives the policy a head of its own, and writes it to folder. Of a tied one vLLM has a packed
    copy on CPUs, which keeps its weights.
    """
    policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
    policy.config.tie_word_embeddings = False
    for part in policy, tokenizer:
        part.save_pretrained(folder)
    policy.name_or_path = folder


def differences(rollouts: Engine | Server, tokenizer: Any) -> dict[str, Tensor]:
    """|log-probability in the rollout - in the training step| of each new token, without replay
    and, where the engine says its routing, with it.
    """
    prompts = tokenizer(PROMPTS * 4).input_ids
    new, want = rollouts.sample(prompts)
    lists = [[*before, *after] for before, after in zip(prompts, new, strict=True)]
    batch = tokenizer.pad({"input_ids": lists}, return_tensors="pt", padding_side="left")
    batch = batch.to(rollouts.policy.device)

    def apart() -> Tensor:
        logits = rollouts.policy(**batch).logits[:, -TOKENS - 1 : -1].float()
        new = batch.input_ids[:, -TOKENS:, None]
        return (logits.log_softmax(-1).gather(-1, new).squeeze(-1).cpu() - want).abs()

    routing = rollouts.of(batch.input_ids, batch.attention_mask)
    with torch.no_grad(), autocast():
        found = {"": apart()}
        if rollouts.routed:
            with fusion_moe.replay_routing(rollouts.policy, routing):
                found[" and replay"] = apart()
    return found


def main() -> int:
    """0 if the engine has the trained weights after training."""
    parser = arguments(__doc__, steps=10)
    parser.add_argument("--engine", type=json.loads, default={}, help="options of vLLM, as JSON")
    parser.add_argument("--server", help="the address of a server, in place of an engine")
    parser.add_argument("--group-port", type=int, default=51216, help="for weights to a server")
    args = parser.parse_args()

    policy, tokenizer = loaded(args.model)
    prompts = tokenizer(PROMPTS).input_ids
    if policy.config.tie_word_embeddings and not torch.cuda.is_available():
        untie_(policy, tokenizer, tempfile.mkdtemp())
    fusion_moe.qat_(policy, "nvfp4", scales="max")
    rollouts: Engine | Server
    if args.server:
        rollouts = Server(policy)
        trl.generation.vllm_generation.VLLMClient = rollouts.connect
        mode: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": args.server}
        mode |= {"vllm_group_port": args.group_port}
    else:
        rollouts = Engine(policy, args.engine)
        trl.generation.vllm_generation.LLM = rollouts.start
        trl.trainer.grpo_trainer.VLLMGeneration = Colocated
        mode = {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
        mode |= {"vllm_max_model_length": 256}
    # a rollout's experts are the training step's; nothing is to be corrected
    mode |= {"use_vllm": True, "vllm_importance_sampling_correction": False}
    trainer = trainer_of(policy, tokenizer, args, rollouts, mode)
    # the flag is the engine's alone
    flag = "row" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else None
    with fusion_moe.options.override(order=flag or fusion_moe.options.current().order):
        print("log-probabilities, rollout - training step   mean     largest")
        trainer.vllm_generation.sync_weights()  # a server may have others
        _show("before", differences(rollouts, tokenizer))
        old = rollouts.of_prompts(prompts)
        trainer.train()
        trainer.vllm_generation.sync_weights()
        apart = differences(rollouts, tokenizer)
        _show("after", apart)
        new = rollouts.of_prompts(prompts)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward: {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")
    return 0 if new != old and apart[""].mean() < ROUNDING else 1


def _show(name: str, found: dict[str, Tensor]) -> None:
    for replay, apart in found.items():
        print(f"{name + replay:42} {apart.mean():.2e}   {apart.max():.2e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
