"""A whole model on a GPU: tokens a second of `generate` with NVFP4 experts from a checkpoint,
beside bf16 with transformers' own experts.

    python benchmarks/h200_generate.py                    # 4 layers of Qwen3-30B-A3B's sizes,
                                                          random weights, batches of 1 and 32
    python benchmarks/h200_generate.py --tiny             # the same steps on small sizes, on the
                                                          CPU if there is no GPU

The bf16 model is saved, its experts are quantized from file to file, and both directories are
loaded with `from_pretrained`. All run with a static cache, compiled with CompileConfig's mode
"reduce-overhead" (CUDA graphs), greedy, to the same length. In turns; median, and half the range
between quartiles. Prints how much memory loading took at its peak, what of a token's time the GPU
works (the rest is `generate`'s own Python), how often a graph was compiled for other prompts, and
how many of the first tokens are those of the same model run eagerly.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig

from fusion_moe.checkpoints import quantize
from fusion_moe.transformers import bench, from_pretrained

PROMPT, PROMPTS = 16, (16, 33, 128, 300, 512)
# tokens that are compared with eager ones: with random weights later ones hang on the last bit
FIRST = 8


@dataclass(frozen=True)
class Contender:
    """A model, and what compiles it."""

    name: str
    model: Any
    backend: str

    def generate(self, prompt: torch.Tensor, length: int, compiled: bool = True) -> torch.Tensor:
        """prompt i64[B, P] -> i64[B, length]"""
        config = CompileConfig(backend=self.backend)
        config._compile_all_devices = True  # on CPUs too
        how = {"compile_config": config} if compiled else {"disable_compile": True}
        return self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_length=length,
            min_length=length,
            do_sample=False,
            cache_implementation="static",
            **how,
        )


def made(folder: Path, layers: int, sizes: str, device: str) -> tuple[Path, Path]:
    """The directories of the bf16 model and of the one with NVFP4 experts."""
    bench.made(bench.config_of(sizes), layers, device).save_pretrained(folder / "bf16")
    quantize(folder / "bf16", folder / "nvfp4")
    return folder / "bf16", folder / "nvfp4"


def loaded(path: Path, device: str, **how: Any) -> Any:
    """A model on the device; on CUDA it says what that took."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    start = time.monotonic()
    if device == "cuda":
        how["device_map"] = device
    model = from_pretrained(path, dtype=torch.bfloat16, **how).eval()
    seconds = time.monotonic() - start
    if device == "cuda":
        peak, holds = (
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.memory_allocated() - before,
        )
        layer = sum(p.nbytes for p in model.model.layers[0].parameters())
        print(
            f"{path.name}: loaded in {seconds:.1f} s; peak {peak / 2**20:,.0f} MiB, model and "
            f"one layer {(holds + layer) / 2**20:,.0f}"
        )
    return model


def measured(
    contenders: list[Contender], batch: int, length: int, repeats: int, device: str
) -> None:
    """Tokens a second of each, in turns, and the ratio of the first to the best other."""
    vocabulary = contenders[0].model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (batch, PROMPT), device=device)
    for contender in contenders:  # compiles
        contender.generate(prompt, length)
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for _ in range(repeats):
        for contender in contenders:
            seconds[contender.name].append(
                timed(lambda c=contender: c.generate(prompt, length), device)
            )  # type: ignore[misc]
    rates = {
        name: [batch * (length - PROMPT) / s for s in found] for name, found in seconds.items()
    }
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name, found in rates.items():
        lower, _, upper = statistics.quantiles(found, n=4)
        print(
            f"batch {batch:3}  {name:20} {medians[name]:10,.1f} tokens/s  +- "
            f"{(upper - lower) / 2:,.1f}"
        )
    ours, *others = medians.values()
    print(
        f"batch {batch:3}  {contenders[0].name} is {ours / max(others):.2f} times the best other",
        flush=True,
    )
    if device == "cuda":
        for contender in contenders:
            print(
                f"batch {batch:3}  {contender.name:20} the GPU works "
                f"{busy(contender, prompt, length):.0f} us a token",
                flush=True,
            )


def busy(contender: Contender, prompt: torch.Tensor, length: int) -> float:
    """Microseconds of kernels for each step of `generate`, the prompt's included."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        contender.generate(prompt, length)
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in found.events()) / (length - PROMPT)


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.monotonic()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - start


def checked(contender: Contender, length: int, device: str) -> None:
    """Other prompts and lengths: how many graphs they cost, and whether their tokens are the eager
    ones.
    """
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    equal = total = 0
    prompts = [p for p in PROMPTS if p + FIRST <= length]
    for count in prompts:
        prompt = torch.randint(0, contender.model.config.vocab_size, (1, count), device=device)
        got, want = (
            contender.generate(prompt, length, compiled)[0, count : count + FIRST]
            for compiled in (True, False)
        )
        equal, total = equal + int((got == want).sum()), total + FIRST
    more = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    print(
        f"{contender.name}: prompts of {prompts} tokens compiled {more} more graphs; {equal} of "
        f"{total} first tokens are eager's"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--length", type=int, default=640, help="of prompt and generated tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        bf16, nvfp4 = made(
            Path(folder), given.layers, "tiny" if given.tiny else "qwen3-30b", device
        )
        contenders = [Contender("NVFP4", loaded(nvfp4, device), "fusion_moe")]
        for experts in ("grouped_mm", "batched_mm"):
            model = loaded(bf16, device, experts_implementation=experts)
            contenders.append(Contender(f"bf16 {experts}", model, "inductor"))
        for batch in given.batch:
            measured(contenders, batch, given.length, given.repeats, device)
        checked(contenders[0], given.length, device)


if __name__ == "__main__":
    main()
