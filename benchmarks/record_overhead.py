"""What `fusion_moe.record` adds to a step of decoding: the same steps with and without it, in turn.

    python benchmarks/record_overhead.py                          # the small model, on the CPU
    python benchmarks/record_overhead.py --config qwen3-30b --layers 2
    python benchmarks/record_overhead.py --config qwen3-30b --layers 4 --device cuda   # replayed
                                                                  # graphs

Prints the medians of rounds, the median of their ratios, and the fastest rounds. No step is
profiled; then what the profiler adds to the two steps that it watches by default.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

import fusion_moe
from fusion_moe.nn import prepare_, quantize_
from fusion_moe.transformers import fuse_routers_
from fusion_moe.transformers.bench import config_of, made
from fusion_moe.transformers.decoding import Decoder, share_keys_

PROMPT, LENGTH = 64, 4096


def decoder(model: Any) -> Decoder:
    """One that has read a prompt; on a GPU its step is captured here."""
    found = Decoder(model, LENGTH)
    found.prompt(torch.arange(PROMPT, device=model.device)[None])
    return found


def seconds(step: Callable[[], object], times: int) -> float:
    """Of one of so many steps, after one that is not timed. On a CPU the process's own, of one
    thread: other programs do not count.
    """
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
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
    found: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(given.rounds):
        plain.prompt(torch.arange(PROMPT, device=model.device)[None])
        found["without"].append(seconds(plain.step, given.steps))
        plain.prompt(torch.arange(PROMPT, device=model.device)[None])
        on_gpu = given.device == "cuda"  # where replays count, recorded or not
        with nullcontext() if on_gpu else fusion_moe.record(model, profile=()):
            found["with"].append(seconds(counting.step, given.steps))
    ratios = [b / a for a, b in zip(found["without"], found["with"], strict=True)]
    for name, times in found.items():
        print(
            f"{name:8}{median(times) * 1e6:10,.0f} us a step, the fastest {min(times) * 1e6:,.0f}"
        )
    least = min(found["with"]) / min(found["without"])
    print(f"added: {median(ratios) - 1:.1%}, by the fastest rounds {least - 1:.1%}")
    with fusion_moe.record(model) as run:
        for _ in range(4):
            run.step()
            counting.step()
        run.step()
    profiled = sum(run.data.steps[2:4]) - 2 * median(found["with"])
    print(f"the two steps that are profiled: {profiled * 1e3:,.0f} ms more")


if __name__ == "__main__":
    main()
