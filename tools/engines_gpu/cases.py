"""What an engine does beside the clock: from where weights come, layers for multi-token prediction,
sleep. One engine in this process.

    python tools/engines_gpu/cases.py MODEL CASE --out FILE.json [--options '{"quantization": ...}']

plain       the answers that all others must give
dummy       drawn weights give answers; then those of the directory, read into the running engine
mtp         drafts of the model's own layer: how many of them were taken
sleep-1     weights go to the host's memory, and come back
sleep-2     weights are forgotten, and read again
any other name is one of vLLM's load formats
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import Engine, numbers
from invariance import Notes

NAMED = "plain", "dummy", "mtp", "sleep-1", "sleep-2"


def options(case: str) -> dict[str, Any]:
    """Of LLM."""
    if case == "plain":
        return {}
    if case == "mtp":
        # of vLLM's counts
        drafts = {"method": "mtp", "num_speculative_tokens": 1}
        return {"speculative_config": drafts, "disable_log_stats": False}
    return {"enable_sleep_mode": True} if case.startswith("sleep") else {"load_format": case}


def found(engine: Engine, case: str) -> Iterator[tuple[str, Any]]:
    """Names and values, as they come; "numbers" are the answers to compare."""
    first = numbers(engine)
    if case == "dummy":
        # of NaN there is none in JSON
        yield "drawn", all(math.isfinite(v) for answer in first for v in answer["logprobs"])
        _read(engine, "auto")
    elif case.startswith("sleep"):
        yield "awake", first
        yield from _slept(engine, int(case[-1]))
    elif case == "mtp":
        metrics = {m.name: m for m in engine.llm.get_metrics()}
        names = "num_draft_tokens", "num_accepted_tokens"
        yield "drafts, taken", [metrics[f"vllm:spec_decode_{name}"].value for name in names]
    yield "numbers", numbers(engine)


def _slept(engine: Engine, level: int) -> Iterator[tuple[str, Any]]:
    import torch

    def free() -> float:
        return torch.cuda.mem_get_info()[0] / 2**30

    before, begun = free(), time.perf_counter()
    engine.llm.sleep(level)
    yield "freed, GiB", free() - before
    if level == 2:
        engine.llm.wake_up(tags=["weights"])
        _read(engine)
        engine.llm.wake_up(tags=["kv_cache"])
    else:
        engine.llm.wake_up()
    yield "asleep and awake again, s", time.perf_counter() - begun


def _read(engine: Engine, load_format: str | None = None) -> None:
    """The directory's weights into the engine, by this format if it had another."""
    if load_format:
        config = {"load_config": {"load_format": load_format}}
        engine.llm.collective_rpc("update_config", args=(config,))
    engine.llm.collective_rpc("reload_weights")
    engine.llm.reset_prefix_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("case", help=", ".join(NAMED))
    parser.add_argument("--options", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    note = Notes(asked.out)
    engine = Engine(asked.model, **options(asked.case) | asked.options)
    note("start, s", engine.start_s)
    for name, value in found(engine, asked.case):
        note(name, value)


if __name__ == "__main__":
    main()
    os._exit(0)  # a sleeping engine's memory pool may not outlive its allocator
