"""One engine of vLLM in this process, with its default settings: what it says and how fast it is.

    python tools/engines_gpu/engine.py MODEL --quantization fusion_moe --out FILE.json

Prompts are token ids. `--turn FILE`: engines that start side by side are measured one at a time,
under a lock of this file, once it says "all are ready". With `--tensor-parallel-size` the ranks are
processes of their own, whose kernels this one does not see: there are times by the clock alone.
With `--adapter`, decoding is measured once more, all requests with an adapter of experts. The file
is written after each part.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

import models
import torch
from torch.profiler import ProfilerActivity, profile
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

SEQUENCES, PREFILL, LONGEST = (1, 8, 64, 256), 8191, 8192
_STEPS = 64  # that are timed, after as many tokens as graphs and caches need
_TIMES = 3


class Engine:
    """An engine, and prompts for it."""

    def __init__(self, model: str, **options: Any):
        begun = time.perf_counter()
        usual = {
            "model": model,
            "dtype": "bfloat16",
            "max_model_len": LONGEST + 1024,
            "max_num_batched_tokens": LONGEST,
            "max_num_seqs": max(SEQUENCES),
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 2 << 30,
            "gpu_memory_utilization": 0.1,  # what must be free at the start: others may run here
            "disable_log_stats": True,
            "seed": 0,
        }
        self.llm = LLM(**usual | options)
        self.start_s = time.perf_counter() - begun
        one = options.get("tensor_parallel_size", 1) == 1
        self.is_here = one and torch.cuda.is_available()  # the GPU's work is this process's
        self.adapter: LoRARequest | None = None  # of all requests
        self.vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]

    def prompts(self, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        """Random ones, the same for the same seed."""
        drawn = random.Random(seed)
        return [
            {"prompt_token_ids": [drawn.randrange(10, self.vocabulary) for _ in range(length)]}
            for _ in range(count)
        ]

    def generate(self, prompts: Any, tokens: int, **asked: Any) -> Any:
        """Greedily, this many tokens for each."""
        wanted = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, **asked
        )
        return self.llm.generate(prompts, wanted, use_tqdm=False, lora_request=self.adapter)

    def seconds(self, prompts: Any, tokens: int) -> float:
        """The time of a call of `generate`."""
        begun = time.perf_counter()
        self.generate(prompts, tokens)
        return time.perf_counter() - begun

    def step_seconds(self, prompts: Any) -> list[float]:
        """The times of the last steps of a call of `generate`."""
        engine, ends = self.llm.llm_engine, list[float]()
        step = engine.step

        def timed() -> Any:
            said = step()
            ends.append(time.perf_counter())
            return said

        engine.step = timed
        try:
            self.generate(prompts, _STEPS + 32)
        finally:
            engine.step = step
        return [b - a for a, b in pairwise(ends)][-_STEPS:-1]  # the last one frees requests

    def gpu_us(self, prompts: Any, tokens: int) -> dict[str, float]:
        """The time of each kernel in a call; of none if they run in other processes."""
        if not self.is_here:
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            self.generate(prompts, tokens)
        found: dict[str, float] = {}
        for event in prof.events():
            if event.device_time_total and "Memcpy" not in event.name:
                found[event.name] = found.get(event.name, 0.0) + event.device_time_total
        return found


def numbers(engine: Engine) -> list[dict[str, Any]]:
    """What it says for six prompts: greedy tokens, and log-probabilities of the prompts."""
    prompts = engine.prompts(6, 48, seed=11)
    answers = engine.generate(prompts, 24, prompt_logprobs=0)
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "logprobs": [
                at[token].logprob
                for at, token in zip(
                    answer.prompt_logprobs[1:], prompt["prompt_token_ids"][1:], strict=True
                )
            ],
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def decode(engine: Engine, sequences: int) -> dict[str, Any]:
    """A step by the clock, and its GPU time with that of each kernel."""
    prompts = engine.prompts(sequences, 32, seed=sequences)
    engine.generate(prompts, 8)
    steps = [seconds for _ in range(_TIMES) for seconds in engine.step_seconds(prompts)]
    times = statistics.quantiles(steps, n=4)
    few, many = engine.gpu_us(prompts, 1), engine.gpu_us(prompts, 9)
    kernels = {name: (us - few.get(name, 0.0)) / 8 for name, us in many.items()}
    return _times(times, kernels)


def prefill(engine: Engine) -> dict[str, Any]:
    """One long prompt."""
    prompts = engine.prompts(1, PREFILL, seed=3)
    times = [engine.seconds(prompts, 1) for _ in range(_TIMES + 1)][1:]
    return _times(times, engine.gpu_us(prompts, 1))


def _times(seconds: Sequence[float], kernels: Mapping[str, float]) -> dict[str, Any]:
    return {
        "ms": [1e3 * t for t in sorted(seconds)],
        "gpu_us": sum(kernels.values()),
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:30]),
    }


def lengths(engine: Engine, count: int) -> dict[str, Any]:
    """Prompts of drawn lengths that the engine has not had: how long the first time takes, beside
    the median of further times.
    """
    drawn = random.Random(7).sample(range(1, LONGEST), count)
    found = []
    for n in drawn:
        prompts = engine.prompts(1, n, seed=n)
        first, *further = (1e3 * engine.seconds(prompts, 1) for _ in range(1 + _TIMES))
        found.append((n, first, statistics.median(further)))
    extra = [first - usual for _, first, usual in found]
    return {
        "longest_extra_ms": max(extra),
        "median_extra_ms": statistics.median(extra),
        "longest_ratio": max(first / usual for _, first, usual in found),
        "all": found,
    }


def measured(engine: Engine, count: int, adapter: Path | None) -> Iterator[dict[str, Any]]:
    """What is known of an engine after each part, at last with this many lengths of prompts."""
    engine.generate(engine.prompts(2, 20, seed=1), 4)
    found = {
        "start_s": engine.start_s,
        "gpu": torch.cuda.get_device_name(),
        "reserved_gib": torch.cuda.memory_reserved() / 2**30 - 2 if engine.is_here else None,
    }
    yield found
    yield (found := found | {"numbers": numbers(engine)})
    for n in SEQUENCES:
        yield (found := found | {"decode": found.get("decode", {}) | {n: decode(engine, n)}})
    yield (found := found | {"prefill": prefill(engine)})
    yield (found := found | {"lengths": lengths(engine, count)})
    if adapter is not None:
        engine.adapter = LoRARequest("adapter", 1, str(adapter))
        yield found | {"adapted": {n: decode(engine, n) for n in SEQUENCES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--moe-backend")
    parser.add_argument("--tensor-parallel-size", type=int)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, default=500)
    parser.add_argument("--turn", type=Path)
    asked = parser.parse_args()
    names = "quantization", "moe_backend", "tensor_parallel_size", "enable_expert_parallel"
    given = {name: getattr(asked, name) for name in names if getattr(asked, name)}
    adapter = models.adapter(Path(asked.model)) if asked.adapter else None
    if adapter:
        given |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": models.RANK}
        given["lora_target_modules"] = ["experts"]
    engine = Engine(asked.model, **given)
    with _turn(asked.turn, asked.out):
        for found in measured(engine, asked.lengths, adapter):
            print(f"measured: {list(found)[-1]}", flush=True)
            asked.out.write_text(json.dumps(found))


@contextmanager
def _turn(file: Path | None, out: Path) -> Iterator[None]:
    """Waits until it is this engine's turn to be measured."""
    if file is None:
        yield
        return
    out.with_suffix(".ready").touch()
    while not file.read_text():
        time.sleep(0.2)
    with file.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
