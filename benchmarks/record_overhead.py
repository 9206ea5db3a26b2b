"""What `fusion_moe.record` adds to a step of decoding: the same steps with and without it, in turn.

    python benchmarks/record_overhead.py                          # the small model, on the CPU
    python benchmarks/record_overhead.py --config qwen3-30b --layers 2
    python benchmarks/record_overhead.py --config qwen3-30b --layers 4 --device cuda   # replayed
                                                                  # graphs

Prints medians and lower quartiles of rounds, and the median of their ratios to those without it;
"again" is without it too: what the same differs by here. No step is profiled; then what the
profiler adds to the two steps that it watches by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

import fusion_moe
from fusion_moe.integrations.transformers.bench import config_of, made
from fusion_moe.integrations.transformers.decoding import Decoder, share_keys_
from fusion_moe.nn import prepare_, quantize_
from fusion_moe.transformers import fuse_routers_

PROMPT, LENGTH = 64, 4096


def decoder(model: Any) -> Decoder:
    """One that has read a prompt; on a GPU its step is captured here."""
    found = Decoder(model, LENGTH)
    found.prompt(torch.arange(PROMPT, device=model.device)[None])
    return found


def seconds(step: Callable[[], object], times: int) -> float:
    """Of one of so many steps, after two that are not timed. On a CPU the process's own, of one
    thread: other programs do not count.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    for _ in range(2):
        step()
    start = clock()
    for _ in range(times):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (clock() - start) / times


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = made(config_of(given.config), given.layers, given.device)
    quantize_(model)
    fuse_routers_(model)
    share_keys_(model)
    prepare_(model, tokens=(1, PROMPT))
    plain = decoder(model)
    with fusion_moe.record(model, profile=()):  # a graph that counts is captured here
        counting = decoder(model) if given.device == "cuda" else plain
    on_gpu = given.device == "cuda"  # where replays count, recorded or not
    ways: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
        "without": (plain.step, nullcontext),
        "again": (plain.step, nullcontext),
        "with": (
            counting.step,
            nullcontext if on_gpu else partial(fusion_moe.record, model, profile=()),
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, (step, recorded) in ways.items():
            plain.prompt(torch.arange(PROMPT, device=model.device)[None])
            with recorded():
                found[name].append(seconds(step, given.steps))
    for name, times in found.items():
        low, middle, _ = (1e6 * t for t in quantiles(times, n=4))
        ratios = (b / a for a, b in zip(found["without"], times, strict=True))
        print(
            f"{name:8}{middle:10,.0f} us a step, the lower quartile {low:,.0f}; "
            f"{median(ratios) - 1:+.1%}"
        )
    with fusion_moe.record(model) as run:
        for _ in range(4):
            run.step()
            counting.step()
        run.step()
    profiled = sum(run.data.steps[2:4]) - 2 * median(found["with"])
    print(f"the two steps that are profiled: {profiled * 1e3:,.0f} ms more")


if __name__ == "__main__":
    main()
