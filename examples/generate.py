"""From a prompt to text with NVFP4 experts: transformers' `generate` with a static cache, compiled, beside the same model in bf16.

    python examples/generate.py                                     # the small model of this repository
    python examples/generate.py --model DIR --prompt "..." --tokens 200

Text comes as it is generated. Then: time to the first token, tokens a second after it, and memory, of NVFP4 and of bf16 with each of
transformers' experts that compile. CUDA graphs on a GPU. A directory with NVFP4 experts has no bf16 beside it.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoTokenizer, CompileConfig, TextStreamer
from transformers import logging as transformers_logging
from transformers.generation.streamers import BaseStreamer

import fusion_moe
from fusion_moe.nn import Experts
from fusion_moe.transformers import from_pretrained

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPT = '    def __repr__(self):\n        """Return'
BF16_EXPERTS = ("grouped_mm", "batched_mm")


@dataclass(frozen=True)
class Contender:
    """A model, and what compiles it. experts: which of transformers' own, "" for ours."""

    name: str
    model: Any
    backend: str
    experts: str = ""

    def generate(self, ids: torch.Tensor, tokens: int, streamer: BaseStreamer | None = None) -> torch.Tensor:
        """ids i64[1, P] -> i64[1, P + tokens], greedy"""
        if self.experts:
            self.model.set_experts_implementation(self.experts)
        config = CompileConfig(backend=self.backend)  # its mode is "reduce-overhead"
        config._compile_all_devices = True  # CPUs too
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            cache_implementation="static", compile_config=config, streamer=streamer,
        )  # fmt: skip


@dataclass
class Clock(BaseStreamer):
    """When the prompt and each token came."""

    times: list[float] = field(default_factory=list)

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # generate has copied the token to the host

    def end(self) -> None:
        pass

    @property
    def first(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def rate(self) -> float:
        """Tokens a second after the first one."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def loaded(path: Path, device: str) -> list[Contender]:
    """The model with NVFP4 experts; then as it is, unless its experts are encoded already."""
    model = from_pretrained(path, dtype=torch.bfloat16, device_map=device).eval()
    if any(isinstance(m, Experts) for m in model.modules()):
        return [Contender("NVFP4", model, "fusion_moe")]
    encoded = copy.deepcopy(model)
    fusion_moe.quantize_(encoded)
    return [Contender("NVFP4", encoded, "fusion_moe"), *(Contender(f"bf16 {e}", model, "inductor", e) for e in BF16_EXPERTS)]


def measured(contenders: list[Contender], ids: torch.Tensor, tokens: int, repeats: int) -> None:
    """Prints a line for each: medians of runs in turns, of what is compiled already."""
    clocks: dict[str, list[Clock]] = {c.name: [] for c in contenders}
    for _ in range(repeats):
        for contender in contenders:
            clocks[contender.name].append(clock := Clock())
            contender.generate(ids, tokens, clock)
    print(f"{'':16}{'first token':>14}{'tokens/s':>12}{'spread':>9}{'weights':>12}")
    for contender in contenders:
        found = clocks[contender.name]
        rates = sorted(clock.rate for clock in found)
        rate, first = statistics.median(rates), statistics.median(clock.first for clock in found)
        size = sum(t.nbytes for t in (*contender.model.parameters(), *contender.model.buffers()))
        spread = (rates[-1] - rates[0]) / rate
        print(f"{contender.name:16}{first * 1e3:11.1f} ms{rate:12,.1f}{spread:9.0%}{size / 2**20:8,.1f} MiB")


def main(given: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    contenders = loaded(given.model, given.device)
    ids = tokenizer(given.prompt, return_tensors="pt").input_ids.to(given.device)

    start = time.monotonic()
    contenders[0].generate(ids, given.tokens, TextStreamer(tokenizer))
    print(f"\n{given.tokens} tokens in {time.monotonic() - start:.1f} s, compiling included\n", flush=True)

    for contender in contenders[1:]:
        contender.generate(ids, given.tokens)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, prompt of {ids.shape[1]} tokens, median of {given.repeats} runs in turns")
    measured(contenders, ids, given.tokens, given.repeats)
    if given.device == "cuda":
        print(f"memory at its peak, with all of them: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a directory of transformers, in bf16 or with NVFP4 experts")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
