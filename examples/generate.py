"""From a prompt to text with NVFP4 experts: transformers' `generate` with a static cache, compiled,
next to the same model in bf16.

    python examples/generate.py                                     # the small model of this
        repository
    python examples/generate.py --model DIR --prompt "..." --tokens 200
    python examples/generate.py --layers 4                          # on a GPU: layers of
        Qwen3-30B-A3B's size, random weights

Prints the text while it is generated. Then: time to the first token, tokens a second after it, and
memory, for NVFP4 and for bf16 with each of transformers' expert implementations that compile. Uses
CUDA graphs on a GPU. For a directory with NVFP4 experts there is no bf16 model.

With --layers there is no text: each decoding step, including sampling, is captured once and
replayed, so that no Python is timed; a long prompt is timed as `generate` runs it, not compiled.
"ours": the share of a step's GPU time that this library's kernels take. "head": the projection to
the vocabulary, which a model of any depth has once: the ratios without it are those of a deep
model. "NVFP4, all": attention's projections too, as in NVIDIA's checkpoint of Qwen3-30B-A3B.
Attention (--attention) is the same for all models; by default it is an implementation for queries
with shared keys: transformers, compiled, would copy keys and values for each query.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from demo import cache_argument
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    Qwen3MoeConfig,
    StaticCache,
    TextStreamer,
)
from transformers import logging as transformers_logging
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import fusion_moe
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.nn import Experts, QuantizedLinear
from fusion_moe.transformers import from_pretrained, fuse_routers_

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPT = '    def __repr__(self):\n        """Return'
BF16_EXPERTS = ("grouped_mm", "batched_mm")
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# tokens before the first step; steps before one is captured; replays timed at once
CONTEXT, WARM, REPLAYS = 512, 3, 20
FEW = 8  # sequences up to which batched_mm, which copies an expert for each row, may be the fastest
# names of other libraries' kernels
OTHERS = re.compile(r"::|^(_Z|void |triton|nvjet|sm\d|cutlass|cudnn|fmha|ampere|Mem)")
SHARED_KEYS = "shared_keys"


@dataclass(frozen=True)
class Contender:
    """A model, and the backend that compiles it. experts: which of transformers' implementations,
    "" for ours.
    """

    name: str
    model: Any
    backend: str
    experts: str = ""

    def generate(
        self, ids: torch.Tensor, tokens: int, streamer: BaseStreamer | None = None
    ) -> torch.Tensor:
        """ids i64[1, P] -> i64[1, P + tokens], greedy"""
        if self.experts:
            self.model.set_experts_implementation(self.experts)
        config = CompileConfig(backend=self.backend)  # the default mode is "reduce-overhead"
        config._compile_all_devices = True  # CPUs too
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
            streamer=streamer,
        )


@dataclass
class Clock(BaseStreamer):
    """The times at which the prompt and each token came."""

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
    """The model with NVFP4 experts; then the original model, unless its experts are encoded
    already.
    """
    model = from_pretrained(path, dtype=torch.bfloat16, device_map=device).eval()
    if any(isinstance(m, Experts) for m in model.modules()):
        fuse_routers_(model)
        return [Contender("NVFP4", model, "fusion_moe")]
    return beside(model)


def beside(model: Any) -> list[Contender]:
    """A copy of a model with NVFP4 experts, then the model itself."""
    encoded = copy.deepcopy(model)
    fusion_moe.quantize_(encoded)
    fuse_routers_(encoded)
    return [
        Contender("NVFP4", encoded, "fusion_moe"),
        *(Contender(f"bf16 {e}", model, "inductor", e) for e in BF16_EXPERTS),
    ]


def measured(contenders: list[Contender], ids: torch.Tensor, tokens: int, repeats: int) -> None:
    """Prints a line for each: medians of runs in turns, after everything is compiled."""
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
        print(
            f"{contender.name:16}{first * 1e3:11.1f} "
            f"ms{rate:12,.1f}{spread:9.0%}{size / 2**20:8,.1f} MiB"
        )


# Layers of Qwen3-30B-A3B's size -------------------------------------------------------------------


def shared_keys(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, Q, d], key, value [B, KV heads, S, d] -> [B, Q, heads, d], None. For one
    token, heads that share keys become rows of one query, in plain products: torch's attention
    kernels use few multiprocessors for a sequence's keys. More tokens go to transformers' own
    attention.
    """
    (batch, heads, rows, d), groups = query.shape, key.shape[1]
    if rows > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    together = query.reshape(batch, groups, heads // groups, d)
    scores = (together @ key.mT).float() * others["scaling"]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    return (scores.softmax(-1).to(value.dtype) @ value).reshape(batch, 1, heads, d), None


AttentionInterface.register(SHARED_KEYS, shared_keys)
AttentionMaskInterface.register(SHARED_KEYS, sdpa_mask)


def with_attention(of: Contender) -> Contender:
    """A copy whose attention projections are NVFP4 too."""
    model = copy.deepcopy(of.model)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(
                layer.self_attn,
                name,
                QuantizedLinear(quantize(getattr(layer.self_attn, name).weight.detach(), NVFP4)),
            )
    return Contender(f"{of.name}, all", model, of.backend)


@torch.no_grad()
def layers(given: argparse.Namespace) -> None:
    """Prints a line for each batch and contender, and the ratios to the better bf16."""
    config = Qwen3MoeConfig(
        **QWEN3,
        num_hidden_layers=given.layers,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    with torch.device("cuda"):
        encoded, *bf16 = beside(
            AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=given.attention
            ).eval()
        )
    contenders = [encoded, with_attention(encoded), *(c for c in bf16 if c.experts in given.bf16)]
    for contender in contenders[:2]:
        fusion_moe.prepare_(contender.model)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.layers} layers, "
        f"{CONTEXT} tokens of context",
        flush=True,
    )
    print(f"{'batch':>6}  {'':16}{'us a step':>10}{'tokens/s':>12}{'ours':>7}{'head':>7}")
    for batch in given.batch:
        found, alone = dict[str, float](), dict[str, float]()
        for contender in contenders:
            if contender.experts != "batched_mm" or batch <= FEW:
                torch._dynamo.reset()
                replay, of_head = captured(contender, batch), head(contender, batch)
                spent = found[contender.name] = seconds(replay, REPLAYS)
                alone[contender.name] = spent - of_head
                show(f"{batch:6}  {contender.name:16}", spent, batch, replay, of_head)
        print(f"{batch:6}  {ratio(found)}")
        print(f"{batch:6}  without the projection to the vocabulary: {ratio(alone)}", flush=True)
    prompts = [c for c in contenders if c.experts != "batched_mm"]
    found = {
        c.name: seconds(
            partial(
                prefill, c, torch.randint(config.vocab_size, (1, given.prefill), device="cuda")
            ),
            5,
        )
        for c in prompts
    }
    for name, spent in found.items():
        print(f"prompt  {name:16}{spent * 1e6:10,.0f}{given.prefill / spent:12,.0f}")
    print(f"prompt  {ratio(found)}")


def captured(contender: Contender, batch: int) -> Callable[[], None]:
    """A function that replays a step: the token of each sequence -> the next one, in place."""
    if contender.experts:
        # batched_mm would copy an expert for each row of the prompts
        contender.model.set_experts_implementation("grouped_mm")
    cache = StaticCache(config=contender.model.config, max_cache_len=2 * CONTEXT)
    ids = torch.randint(contender.model.config.vocab_size, (batch, CONTEXT), device="cuda")
    given = {cache_argument(contender.model): cache}
    contender.model(ids, **given, logits_to_keep=1)  # allocates the cache
    ids = ids[:, -1:].clone()
    if contender.experts:
        contender.model.set_experts_implementation(contender.experts)
    step = torch.compile(contender.model, backend=contender.backend, dynamic=False)

    def run() -> None:
        ids.copy_(step(ids, **given).logits.argmax(-1))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
    """run: keeps the memory alive that the graph reads and writes."""
    graph.replay()


def head(contender: Contender, batch: int) -> float:
    """Seconds for the projection to the vocabulary, which a model has once and not in each
    layer.
    """
    x, graph = (
        torch.randn(batch, QWEN3["hidden_size"], device="cuda", dtype=torch.bfloat16),
        torch.cuda.CUDAGraph(),
    )
    contender.model.lm_head(x)
    with torch.cuda.graph(graph):
        contender.model.lm_head(x)
    return seconds(graph.replay, REPLAYS)


def prefill(contender: Contender, ids: torch.Tensor) -> None:
    """The last logits of a prompt."""
    if contender.experts:
        contender.model.set_experts_implementation(contender.experts)
    contender.model(ids, use_cache=False, logits_to_keep=1)


def seconds(call: Callable[[], None], times: int, repeats: int = 5) -> float:
    """The time of a call on the GPU: the median of several runs of `times` calls each."""
    call()
    found = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / times)
    return statistics.median(found)


def show(name: str, spent: float, batch: int, replay: Callable[[], None], of_head: float) -> None:
    """A line: the share of a step in which our kernels run, and the share of the projection to the
    vocabulary.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        replay()
        torch.cuda.synchronize()
    kernels = [e for e in profiled.events() if e.device_time_total > 0]
    ours = united(
        [(e.time_range.start, e.time_range.end) for e in kernels if not OTHERS.search(e.name)]
    )
    print(
        f"{name}{spent * 1e6:10,.0f}{batch / spent:12,.0f}"
        f"{ours / 1e6 / spent:7.0%}{of_head / spent:7.0%}",
        flush=True,
    )


def united(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts: a kernel may begin before the previous one has
    ended.
    """
    total = until = 0.0
    for start, end in sorted(spans):
        total, until = total + max(0.0, end - max(start, until)), max(until, end)
    return total


def ratio(found: dict[str, float]) -> str:
    """Ours compared with the fastest other."""
    best = min(spent for name, spent in found.items() if name.startswith("bf16"))
    return "; ".join(
        f"{name}: {best / spent:.2f} times as fast as bf16"
        for name, spent in found.items()
        if name.startswith("NVFP4")
    )


# --------------------------------------------------------------------------------------------------


def main(given: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if given.layers:
        layers(given)
        return
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    contenders = loaded(given.model, given.device)
    ids = tokenizer(given.prompt, return_tensors="pt").input_ids.to(given.device)

    start = time.monotonic()
    contenders[0].generate(ids, given.tokens, TextStreamer(tokenizer))
    print(
        f"\n{given.tokens} tokens in {time.monotonic() - start:.1f} s, compiling included\n",
        flush=True,
    )

    for contender in contenders[1:]:
        contender.generate(ids, given.tokens)
    where = (
        torch.cuda.get_device_name()
        if given.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"{where}, prompt of {ids.shape[1]} tokens, median of {given.repeats} runs in turns")
    measured(contenders, ids, given.tokens, given.repeats)
    if given.device == "cuda":
        print(
            "memory at its peak, with all of them: "
            f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a directory of transformers, in bf16 or with NVFP4 experts",
    )
    parser.add_argument("--prompt", default=PROMPT, help="text to go on from")
    parser.add_argument(
        "--tokens", type=int, default=64, help="how many to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="measurements, of which the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=int, default=0, help="of Qwen3-30B-A3B's sizes, in place of a model"
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 64], help="sequences, with --layers"
    )
    parser.add_argument(
        "--attention", default=SHARED_KEYS, help="transformers' name of an attention, with --layers"
    )
    parser.add_argument(
        "--bf16",
        nargs="+",
        choices=BF16_EXPERTS,
        default=BF16_EXPERTS,
        help="transformers' experts in bf16, with --layers",
    )
    parser.add_argument(
        "--prefill", type=int, default=4096, help="tokens of the prompt, with --layers"
    )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=usual, help="a GPU where there is one"
    )
    arguments = parser.parse_args()
    if arguments.tokens < 2:
        parser.error(
            f"--tokens {arguments.tokens}: expected at least 2, since tokens a second "
            "are counted after the first one"
        )
    if not torch.cuda.is_available() and (arguments.layers or arguments.device == "cuda"):
        parser.error(
            f"{'--layers' if arguments.layers else '--device cuda'} needs a GPU that "
            "torch can use: see python -m fusion_moe.env"
        )
    main(arguments)
