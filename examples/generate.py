"""From a prompt to text with NVFP4 experts: transformers' `generate` with a static cache, compiled,
next to the same model in bf16.

    python examples/generate.py  # the small model of this repository
    python examples/generate.py --model DIR --prompt "..." --tokens 200
    python examples/generate.py --layers 4  # GPU: layers of Qwen3-30B-A3B's size, random weights

Prints the text while it is generated. Then: time to the first token, tokens a second after it, and
memory, for NVFP4 and for bf16 with each of transformers' expert implementations that compile. Uses
CUDA graphs on a GPU. Beside a quantized directory stands a model in bf16 with its numbers.

With --layers there is no text: each decoding step, including sampling, is captured once and
replayed, as `fusion-moe run` does it, so that no Python is timed; a long prompt is timed as
`generate` runs it, not compiled.
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

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer, CompileConfig, TextStreamer, logging as transformers_logging
from transformers.generation.streamers import BaseStreamer

from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.integrations.transformers.bench import (
    BF16_EXPERTS,
    FEW,
    Contender,
    Times,
    alternating,
    beside,
    bytes_of,
    config_of,
    head,
    loaded,
    made,
)
from fusion_moe.integrations.transformers.decoding import SHARED_KEYS
from fusion_moe.nn import QuantizedLinear, prepare_

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
PROMPT = '    def __repr__(self):\n        """Return'
# tokens before the first step; replays timed at once; times that
CONTEXT, REPLAYS, REPEATS = 512, 20, 5
# names of other libraries' kernels
OTHERS = re.compile(r"::|^(_Z|void |triton|nvjet|sm\d|cutlass|cudnn|fmha|ampere|Mem)")


def generate(
    of: Contender, ids: torch.Tensor, tokens: int, streamer: BaseStreamer | None = None
) -> torch.Tensor:
    """ids i64[1, P] -> i64[1, P + tokens], greedy"""
    if of.experts:
        of.model.set_experts_implementation(of.experts)
    config = CompileConfig(backend=of.backend)  # the default mode is "reduce-overhead"
    config._compile_all_devices = True  # CPUs too
    return of.model.generate(
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


def measured(contenders: list[Contender], ids: torch.Tensor, tokens: int, repeats: int) -> None:
    """Prints a line for each: medians of runs in turns, after everything is compiled."""
    clocks: dict[str, list[Clock]] = {c.name: [] for c in contenders}
    for _ in range(repeats):
        for contender in contenders:
            clocks[contender.name].append(clock := Clock())
            generate(contender, ids, tokens, clock)
    print(f"{'':16}{'first token':>14}{'tokens/s':>12}{'spread':>9}{'weights':>12}")
    for contender in contenders:
        found = clocks[contender.name]
        rates = sorted(clock.rate for clock in found)
        rate, first = statistics.median(rates), statistics.median(clock.first for clock in found)
        spread = (rates[-1] - rates[0]) / rate
        print(
            f"{contender.name:16}{first * 1e3:11.1f} "
            f"ms{rate:12,.1f}{spread:9.0%}{bytes_of(contender.model) / 2**20:8,.1f} MiB"
        )


# Layers of Qwen3-30B-A3B's size -------------------------------------------------------------------


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


def layers(given: argparse.Namespace) -> None:
    """Prints a line for each batch and contender, and the ratios to the better bf16."""
    model = made(config_of("qwen3-30b"), given.layers, "cuda")
    encoded, *bf16 = beside(model)
    for contender in (encoded, *bf16):
        contender.model.set_attn_implementation(given.attention)
    contenders = [encoded, with_attention(encoded), *(c for c in bf16 if c.experts in given.bf16)]
    prepare_(contenders[1].model)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.layers} layers, "
        f"{CONTEXT} tokens of context",
        flush=True,
    )
    print(f"{'batch':>6}  {'':16}{'us a step':>10}{'tokens/s':>12}{'ours':>7}{'head':>7}")
    for batch in given.batch:
        steps = {
            c.name: decoding(c, batch)
            for c in contenders
            if c.experts != "batched_mm" or batch <= FEW
        }
        found, of_head = alternating(steps, REPLAYS, REPEATS), head(model, batch, REPEATS).median
        for name, times in found.items():
            show(f"{batch:6}  {name:16}", times.median, batch, steps[name], of_head)
        print(f"{batch:6}  {ratio(found)}")
        alone = ratio(found, of_head)
        print(f"{batch:6}  without the projection to the vocabulary: {alone}", flush=True)
    ids = torch.randint(model.config.vocab_size, (1, given.prefill), device="cuda")
    prompts = {c.name: partial(c.read, ids) for c in contenders if c.experts != "batched_mm"}
    found = alternating(prompts, 1, REPEATS)
    for name, times in found.items():
        rate = given.prefill / times.median
        print(f"prompt  {name:16}{times.median * 1e6:10,.0f}{rate:12,.0f}")
    print(f"prompt  {ratio(found)}")


def decoding(contender: Contender, batch: int) -> Callable[[], object]:
    """A step after a prompt, to be replayed."""
    decoder = contender.decoder(2 * CONTEXT, batch)
    vocabulary = contender.model.config.vocab_size
    decoder.prompt(torch.randint(vocabulary, (batch, CONTEXT), device="cuda"))
    return decoder.step


def show(name: str, spent: float, batch: int, replay: Callable[[], object], of_head: float) -> None:
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


def ratio(found: dict[str, Times], of_head: float = 0) -> str:
    """Ours compared with the fastest other, without the time of the head."""
    best = min(times.median for name, times in found.items() if name.startswith("bf16"))
    return "; ".join(
        f"{name}: {(best - of_head) / (times.median - of_head):.2f} times as fast as bf16"
        for name, times in found.items()
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
    generate(contenders[0], ids, given.tokens, TextStreamer(tokenizer))
    print(
        f"\n{given.tokens} tokens in {time.monotonic() - start:.1f} s, compiling included\n",
        flush=True,
    )

    for contender in contenders[1:]:
        generate(contender, ids, given.tokens)
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
