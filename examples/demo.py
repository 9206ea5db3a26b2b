"""The main use, on a small real model: quantize its experts to NVFP4, compile it, measure it, and
look at what was fused.

    python examples/demo.py [--device cuda] [--text BYTES] [--tokens N]

The model is a Qwen3-MoE trained on the Python standard library (examples/train_tiny_qwen3_moe.py
made it).
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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


def wait(variant: Variant, what: str) -> None:
    """Says on stderr what will take a while now."""
    compiles = " (compiles first)" if variant.run is not variant.model else ""
    print(f"  {variant.name}: {what}{compiles} ...", file=sys.stderr, flush=True)


def perplexity(variant: Variant, tokenizer: Any, texts: list[str]) -> Evaluation:
    wait(variant, "perplexity")
    start = time.monotonic()
    if variant.experts:
        variant.model.set_experts_implementation("grouped_mm")
    found = evaluate(variant.run, tokenizer, texts)
    print(
        f"{variant.name:24} perplexity {found.perplexity:7.4f}   {found.bits_per_byte:.4f} bits "
        f"per byte   ({time.monotonic() - start:.0f} s)",
        flush=True,
    )
    return found


@torch.inference_mode()
def decode_speed(variant: Variant, tokenizer: Any, batch: int, steps: int) -> Speed:
    """The speed of greedy decoding with a static cache."""
    if variant.experts:
        variant.model.set_experts_implementation(variant.experts[batch])
    device = variant.model.device
    prompt = tokenizer([PROMPT] * batch, return_tensors="pt").input_ids.to(device)
    cache = StaticCache(config=variant.model.config, max_cache_len=prompt.shape[1] + steps + 8)
    given = {cache_argument(variant.model): cache}
    token = variant.model(prompt, **given).logits[:, -1:].argmax(-1)
    wait(variant, f"{steps} steps at batch {batch}")
    seconds, run = [], variant.run if variant.decode is None else variant.decode
    for i in range(steps + 3):
        start = now(device.type)
        token = run(token, **given).logits[:, -1:].argmax(-1)
        if i >= 3:  # the first steps compile and warm up
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
    """The model under torch.compile: for texts of any length without CUDA graphs, which would be
    recorded for each length.
    """
    graphs = (
        torch.compile(model, backend=backend, mode="reduce-overhead") if device == "cuda" else None
    )
    return Variant(name, model, torch.compile(model, backend=backend), experts, graphs)


def compare_speeds(
    variants: list[Variant], tokenizer: Any, steps: int
) -> dict[tuple[str, int], Speed]:
    speeds, rows = {}, []
    for variant in variants:
        cells = []
        for batch in BATCHES:
            speed = speeds[variant.name, batch] = decode_speed(variant, tokenizer, batch, steps)
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
    """One mixture-of-experts layer of Qwen3-30B-A3B's size, with random weights: 604 M parameters,
    128 experts, 8 for each token.
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
        parameter.uniform_(-0.04, 0.04)
    return layer


@torch.inference_mode()
def time_large_layer(calls: int, device: str) -> None:
    """One token through the layer: bf16 and NVFP4, both compiled, in turns; each call has its own
    token and experts.
    """
    tokens = torch.randn(calls + 3, 1, 1, 2048, device=device).bfloat16()
    runs = {}
    for name, backend in (("bf16 Inductor", "inductor"), ("NVFP4 compiled", "fusion_moe")):
        if backend == "inductor" and not has_compiler():
            continue
        layer = large_layer(device)
        if backend == "fusion_moe":
            start = time.monotonic()
            fusion_moe.quantize_(layer)
            print(f"quantized in {time.monotonic() - start:.1f} s")
        # CUDA graphs: for one token, the GPU needs less time than Python
        mode = "reduce-overhead" if device == "cuda" else None
        runs[name] = torch.compile(layer, backend=backend, mode=mode)
        for x in tokens[:3]:  # compiles, warms up
            runs[name](x)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for x in tokens[3:]:  # in turns: what else the machine does meets both
        for name, run in runs.items():
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


def compare_perplexities(variants: list[Variant], tokenizer: Any, texts: list[str]) -> None:
    """The effect of four bits, and of different rounding in fused kernels."""
    found = {v.name: perplexity(v, tokenizer, texts) for v in variants if v.name != "bf16 Inductor"}
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
    texts = load_heldout(max_bytes=options.text)
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
    step(f"perplexity on {sum(len(t.encode()) for t in texts):,} bytes of held-out text")
    compare_perplexities(variants, tokenizer, texts)

    where = (
        f"{torch.get_num_threads()} threads"
        if options.device == "cpu"
        else torch.cuda.get_device_name()
    )
    step(
        f"decoding, tokens per second on {where} (median of {options.tokens} steps, spread "
        "p10 to p90)"
    )
    torch._dynamo.reset()  # decoding compiles again, for one token a sequence
    say_who_wins(compare_speeds(variants, tokenizer, options.tokens))

    step(f"one layer of Qwen3-30B-A3B's size, on {where}")
    time_large_layer(options.calls, options.device)

    step("a completion, NVFP4")
    print(completion(variants[-2], tokenizer, 60))

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
    parser.add_argument("--text", type=int, default=60_000, help="bytes of held-out text")
    parser.add_argument("--tokens", type=int, default=24, help="decoding steps that are timed")
    parser.add_argument(
        "--calls", type=int, default=100, help="calls of the large layer that are timed"
    )
    main(parser.parse_args())
