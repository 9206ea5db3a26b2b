"""The main use, on a small real model: quantize its experts to NVFP4, compile it, measure it, and
look at what was fused.

    python examples/demo.py [--device cuda] [--seconds S] [--text BYTES] [--tokens N]

The model is a Qwen3-MoE trained on the Python standard library (examples/train_tiny_qwen3_moe.py
made it).
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from heldout import load_heldout
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    StaticCache,
    logging as transformers_logging,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import fusion_moe
from fusion_moe.frontends.inductor.compile_graph import has_compiler
from fusion_moe.integrations.transformers.decoding import cache_argument
from fusion_moe.integrations.transformers.evaluation import Evaluation, change, evaluate
from fusion_moe.runtime import nvrtc

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
BATCHES = (1, 32)
PIECE = 200  # tokens of text that are read at once
FEWEST = 6  # pieces that are read, steps and calls that are timed, whatever time they take
PROMPT = '    def __repr__(self):\n        """Return'
# batch size -> the fastest of transformers' own experts in eager bf16
EXPERTS = {1: "batched_mm", 32: "grouped_mm"}


@dataclass(frozen=True)
class Speed:
    """Tokens per second: the median over steps, and the values that nine of ten steps are above and
    below.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float], tokens: int = 1) -> Speed:
        """seconds: of each step; tokens: in a step."""
        fast, *_, slow = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(tokens / statistics.median(seconds), tokens / slow, tokens / fast)

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median


@dataclass
class Variant:
    """One way to run the model. run: the model as it is called; experts: transformers'
    implementation, if it has several; decode: the call for steps of one token, if it differs (on a
    GPU a compiled model decodes under CUDA graphs).
    """

    name: str
    model: torch.nn.Module
    run: Callable[..., Any]
    experts: dict[int, str]
    decode: Callable[..., Any] | None = None


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def where_kernels_run() -> str:
    """cuda if there is a GPU and a compiler of its kernels."""
    if not torch.cuda.is_available():
        return "cpu"
    if why := nvrtc.why_missing():
        print(f"there is a GPU, but no kernels for it: {why}")
        return "cpu"
    return "cuda"


def now(device: str) -> float:
    """Seconds, once the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says on stderr what takes a while now, and every eight seconds that it still does."""
    over, start = threading.Event(), time.monotonic()

    def say() -> None:
        while not over.wait(8):
            print(f"  {what} ... {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    print(f"  {what} ...", file=sys.stderr, flush=True)
    teller = threading.Thread(target=say, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def within(seconds: float, items: Iterable[Any]) -> Iterator[Any]:
    """The items until that time is over, at least FEWEST."""
    start = time.monotonic()
    for i, item in enumerate(items):
        if i >= FEWEST and time.monotonic() - start > seconds:
            return
        yield item


def pieces_of(tokenizer: Any, texts: list[str]) -> list[str]:
    """The texts in pieces of PIECE tokens each, without the few that, once cut, have another number
    of tokens.
    """
    pieces = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        pieces += [tokenizer.decode(ids[i : i + PIECE]) for i in range(0, len(ids), PIECE)]
    return [p for p in pieces if len(tokenizer(p, add_special_tokens=False).input_ids) == PIECE]


def read(
    variant: Variant, tokenizer: Any, pieces: list[str], seconds: float = math.inf
) -> Evaluation:
    """Of the pieces that are read in that time."""
    if variant.experts:
        variant.model.set_experts_implementation("grouped_mm")
    losses = []
    if variant.run is not variant.model:
        with waiting(f"{variant.name}: compiling"):
            evaluate(variant.run, tokenizer, pieces[:1])
    start = time.monotonic()
    with waiting(f"{variant.name}: perplexity"):
        for piece in within(seconds, pieces):
            losses.append(torch.cat(evaluate(variant.run, tokenizer, [piece]).losses))
    total, tokens = float(torch.cat(losses).sum()), sum(map(len, losses))
    size = sum(len(piece.encode()) for piece in pieces[: len(losses)])
    found = Evaluation(tuple(losses), total / math.log(2) / size, math.exp(total / tokens))
    print(
        f"{variant.name:24} perplexity {found.perplexity:7.4f}   {found.bits_per_byte:.4f} bits "
        f"per byte   ({size:,} bytes in {time.monotonic() - start:.0f} s)",
        flush=True,
    )
    return found


@torch.inference_mode()
def decode_speed(
    variant: Variant, tokenizer: Any, batch: int, options: argparse.Namespace
) -> Speed:
    """The speed of greedy decoding with a static cache."""
    if variant.experts:
        variant.model.set_experts_implementation(variant.experts[batch])
    device = variant.model.device
    prompt = tokenizer([PROMPT] * batch, return_tensors="pt").input_ids.to(device)
    room = prompt.shape[1] + options.tokens + 8
    cache = StaticCache(config=variant.model.config, max_cache_len=room)
    given = {cache_argument(variant.model): cache}
    token = variant.model(prompt, **given).logits[:, -1:].argmax(-1)
    seconds, run = [], variant.run if variant.decode is None else variant.decode
    compiles = "" if variant.run is variant.model else " compiles, then"
    with waiting(f"{variant.name}:{compiles} decodes at batch {batch}"):
        for _ in range(3):
            token = run(token, **given).logits[:, -1:].argmax(-1)
        for _ in within(options.seconds, range(options.tokens)):
            start = now(device.type)
            token = run(token, **given).logits[:, -1:].argmax(-1)
            seconds.append(now(device.type) - start)
    return Speed.of(seconds, batch)


@torch.inference_mode()
def completion(variant: Variant, tokenizer: Any, tokens: int) -> str:
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids.to(variant.model.device)
    return tokenizer.decode(variant.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0])


def load(device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval().to(device)


def expert_bytes(model: torch.nn.Module) -> int:
    experts = [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
    return sum(p.numel() * p.element_size() for m in experts for p in m.parameters())


def compiled(
    name: str, model: torch.nn.Module, backend: str, device: str, experts: dict[int, str]
) -> Variant:
    """The model under torch.compile, a program for each shape: that of all pieces of text, without
    CUDA graphs, and that of each batch.
    """
    compile_ = partial(torch.compile, model, backend=backend, dynamic=False)
    graphs = compile_(mode="reduce-overhead") if device == "cuda" else None
    return Variant(name, model, compile_(), experts, graphs)


def compare_speeds(
    variants: list[Variant], tokenizer: Any, options: argparse.Namespace
) -> dict[tuple[str, int], Speed]:
    speeds, rows = {}, []
    for variant in variants:
        cells = []
        for batch in BATCHES:
            speed = speeds[variant.name, batch] = decode_speed(variant, tokenizer, batch, options)
            cells.append(f"{speed.median:>14,.0f}{speed.spread:>9.0%}")
        rows.append(f"{variant.name:24}" + "".join(cells))
    print(
        f"{'':24}" + "".join(f"{f'batch {b}':>14}{'spread':>9}" for b in BATCHES),
        *rows,
        sep="\n",
        flush=True,
    )
    return speeds


def say_who_wins(speeds: dict[tuple[str, int], Speed]) -> None:
    ours = "NVFP4 compiled"
    for batch in BATCHES:
        bf16 = ((n, s) for (n, b), s in speeds.items() if b == batch and not n.startswith("NVFP4"))
        name, best = max(bf16, key=lambda x: x[1].median)
        print(f"batch {batch}: {ours} {verdict(speeds[ours, batch], best, name)}")


def verdict(ours: Speed, other: Speed, name: str) -> str:
    """Which one is faster, and how much, if their step times hardly overlap."""
    ratio = f"is {ours.median / other.median:.2f}x as fast as {name}"
    if ours.low > other.high:
        return f"{ratio}: faster than bf16 here"
    if ours.high < other.low:
        return f"{ratio}: SLOWER than bf16 here"
    return f"and {name}: inconclusive: the steps of both take equally long, or the machine is busy"


def large_layer(device: str) -> torch.nn.Module:
    """One mixture-of-experts layer of Qwen3-30B-A3B's size, with random weights, the same in each
    expert: 604 M parameters, 128 experts, 8 for each token.
    """
    config = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    config._experts_implementation = "batched_mm"  # the fastest of transformers' own for one token
    with torch.device("meta"):
        layer = Qwen3MoeSparseMoeBlock(config)
    layer = layer.bfloat16().to_empty(device=device).requires_grad_(False).eval()
    for parameter in layer.parameters():
        alike = parameter[0] if parameter.dim() == 3 else parameter  # drawing all takes long
        parameter.copy_(torch.empty_like(alike).uniform_(-0.04, 0.04))
    return layer


@torch.inference_mode()
def time_large_layer(options: argparse.Namespace) -> None:
    """One token through the layer: bf16 and NVFP4, both compiled, in turns; each call has its own
    token and experts.
    """
    device = options.device
    tokens = torch.randn(options.calls + 3, 1, 1, 2048, device=device).bfloat16()
    runs = {}
    for name, backend in (("bf16 Inductor", "inductor"), ("NVFP4 compiled", "fusion_moe")):
        if backend == "inductor" and not has_compiler():
            continue
        layer = large_layer(device)
        if backend == "fusion_moe":
            start = time.monotonic()
            with waiting("NVFP4: quantizing"):
                fusion_moe.quantize_(layer)
            print(f"quantized in {time.monotonic() - start:.1f} s", flush=True)
        # CUDA graphs: for one token, the GPU needs less time than Python
        mode = "reduce-overhead" if device == "cuda" else None
        runs[name] = torch.compile(layer, backend=backend, mode=mode)
        with waiting(f"{name}: compiling"):
            for x in tokens[:3]:  # compiles, warms up
                runs[name](x)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with waiting("one token at a time"):
        for x in within(options.seconds, tokens[3:]):
            for name, run in runs.items():  # in turns: what else the machine does meets both
                start = now(device)
                run(x)
                seconds[name].append(now(device) - start)
    for name, took in seconds.items():
        print(f"{name:24} {1e3 * statistics.median(took):6.2f} ms for one token")
    if len(runs) == 2:
        print(f"NVFP4 compiled {by_token(*seconds.values())}")


def by_token(bf16: list[float], nvfp4: list[float]) -> str:
    """How many times as fast, by what the same token took just before or after."""
    times = [a / b for a, b in zip(bf16, nvfp4, strict=True)]
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
    said = f"is {statistics.median(times):.2f}x as fast ({low:.2f}x to {high:.2f}x for most tokens)"
    if low <= 1 <= high:
        return f"{said}: inconclusive"
    return f"{said}: {'faster' if low > 1 else 'SLOWER'} than bf16 here"


def all_variants(bf16: torch.nn.Module, nvfp4: torch.nn.Module, device: str) -> list[Variant]:
    """Both models, eager and compiled; those of NVFP4 are the last two."""
    variants = [Variant("bf16 eager", bf16, bf16, EXPERTS)]
    if has_compiler():
        variants.append(
            compiled(
                "bf16 Inductor", bf16, "inductor", device, dict.fromkeys(BATCHES, "batched_mm")
            )
        )
    else:
        print(
            "no C++ compiler: no bf16 under Inductor to compare with, and everything outside of "
            "our fusions runs call by call"
        )
    return [
        *variants,
        Variant("NVFP4 eager", nvfp4, nvfp4, {}),
        compiled("NVFP4 compiled", nvfp4, "fusion_moe", device, {}),
    ]


def compare_perplexities(
    variants: list[Variant], tokenizer: Any, options: argparse.Namespace
) -> None:
    """The effect of four bits, and of different rounding in fused kernels; all read what the first
    one has time for.
    """
    pieces = pieces_of(tokenizer, load_heldout(max_bytes=options.text))
    first, *others = (v for v in variants if v.name != "bf16 Inductor")
    found = {first.name: read(first, tokenizer, pieces, options.seconds)}
    pieces = pieces[: len(found[first.name].losses)]
    found |= {v.name: read(v, tokenizer, pieces) for v in others}
    low, middle, high = change(found["NVFP4 eager"].losses, found["bf16 eager"].losses)
    rounding = found["NVFP4 compiled"].perplexity / found["NVFP4 eager"].perplexity - 1
    print(
        f"from bf16 to NVFP4 {middle:+.2%} (95 %: {low:+.2%} to {high:+.2%}), "
        f"from eager to compiled {rounding:+.4%}"
    )


def main(options: argparse.Namespace) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # their messages about compiling, and about libraries for other machines
    for name in ("torch", "torchao"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options.device = options.device or where_kernels_run()
    step("load")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    bf16, nvfp4 = load(options.device), load(options.device)
    print(
        f"{type(bf16).__name__}, {sum(p.numel() for p in bf16.parameters()) / 1e6:.1f} M "
        f"parameters, from {MODEL.name}"
    )

    step("quantize the experts: fusion_moe.quantize_(model)")
    before = expert_bytes(bf16)
    fusion_moe.quantize_(nvfp4)
    after = expert_bytes(nvfp4)
    print(
        f"expert weights: {before:,} bytes in bf16, {after:,} in NVFP4: "
        f"{before / after:.2f}x smaller"
    )

    step('compile: torch.compile(model, backend="fusion_moe")')
    variants = all_variants(bf16, nvfp4, options.device)
    step(f"perplexity on held-out text, {PIECE} tokens at a time")
    compare_perplexities(variants, tokenizer, options)

    where = (
        f"{torch.get_num_threads()} threads"
        if options.device == "cpu"
        else torch.cuda.get_device_name()
    )
    step(
        f"decoding, tokens per second on {where} (median of at most {options.tokens} "
        "steps, spread p10 to p90)"
    )
    torch._dynamo.reset()  # decoding compiles again, for one token a sequence
    say_who_wins(compare_speeds(variants, tokenizer, options))

    step(f"one layer of Qwen3-30B-A3B's size, on {where}")
    time_large_layer(options)

    step("a completion, NVFP4")
    with waiting("60 tokens"):
        text = completion(variants[-2], tokenizer, 60)
    print(text)

    step("what was fused: fusion_moe.explain(model, input_ids) for one token")
    with torch.inference_mode():
        first = tokenizer(PROMPT, return_tensors="pt").input_ids[:, :1].to(options.device)
        report = fusion_moe.explain(nvfp4, first, use_cache=False)
    print(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="a GPU where there is one")
    parser.add_argument(
        "--seconds",
        type=float,
        default=6,
        help="what a measurement takes, about: on a slow machine it has less of what follows",
    )
    parser.add_argument("--text", type=int, default=60_000, help="bytes of held-out text, at most")
    parser.add_argument(
        "--tokens", type=int, default=24, help="decoding steps that are timed, at most"
    )
    parser.add_argument(
        "--calls", type=int, default=100, help="calls of the large layer that are timed, at most"
    )
    main(parser.parse_args())
