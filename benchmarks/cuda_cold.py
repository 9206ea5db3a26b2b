"""What calls of new counts of tokens cost on a GPU: after all kernels were compiled ahead, and
while they are compiled in the background.

    python benchmarks/cuda_cold.py [--model qwen3] [--how ahead|background|neither]

One layer's experts, an empty cache. Each line: milliseconds of the first call of a count and of a
later one, with the same inputs, and by how much their results differ. In the background: later is
when its own kernels are compiled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from h200_cells import MODELS, Model

import fusion_moe
from fusion_moe import options
from fusion_moe.nn import NVFP4Experts
from fusion_moe.runtime import background

COUNTS = (1, 2, 4, 7, 20, 64, 130, 250, 400, 700, 1000, 2048, 5000)
FIRST = 8  # tokens


def layer(of: Model) -> NVFP4Experts:
    """Random experts."""
    gate_up = (
        torch.randn(of.experts, 2 * of.intermediate, of.hidden, device="cuda", dtype=torch.bfloat16)
        / of.hidden**0.5
    )
    down = (
        torch.randn(of.experts, of.hidden, of.intermediate, device="cuda", dtype=torch.bfloat16)
        / of.intermediate**0.5
    )
    made = NVFP4Experts.from_float(gate_up, down)
    fusion_moe.prepare_(made)
    return made


def inputs(of: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts and weights."""
    ids = torch.rand(tokens, of.experts, device="cuda").topk(of.slots).indices
    return (
        torch.randn(tokens, of.hidden, device="cuda", dtype=torch.bfloat16),
        ids,
        torch.rand(tokens, of.slots, device="cuda"),
    )


def timed(experts: NVFP4Experts, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
    """The result, and milliseconds until it is there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = experts(*given)
    torch.cuda.synchronize()
    return y, 1e3 * (time.perf_counter() - start)


def compiled() -> int:
    """Kernels in the cache."""
    return len(list(Path(options.current().cache_dir).rglob("*.cubin")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3", choices=list(MODELS))
    parser.add_argument("--how", default="ahead", choices=["ahead", "background", "neither"])
    asked = parser.parse_args()
    of = MODELS[asked.model]
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        options.override(cache_dir=folder, background_compile=asked.how == "background"),
    ):
        experts, given = layer(of), inputs(of, FIRST)
        start = time.perf_counter()
        if asked.how == "ahead":
            with fusion_moe.preparing("all"):
                experts(*given)
            print(
                f"{of.title}: {compiled()} kernels of all counts compiled and loaded in "
                f"{time.perf_counter() - start:.2f} s"
            )
        _, ms = timed(experts, given)
        print(f"the first call, {FIRST} tokens: {ms:.1f} ms, {compiled()} kernels compiled")
        for tokens in COUNTS:
            given = inputs(of, tokens)
            (first, cold), waited = timed(experts, given), time.perf_counter()
            _, warm = timed(experts, given)
            while background._unfinished:
                time.sleep(0.01)
            seconds = time.perf_counter() - waited
            experts(*given)
            then, own = timed(experts, given)
            error = float((first.float() - then.float()).norm() / then.float().norm())
            same = "the same bits" if torch.equal(first, then) else f"differs by {error:.1e}"
            print(
                f"{tokens:5} tokens: first {cold:8.2f} ms, next {warm:6.2f}, with own kernels "
                f"{own:6.2f} after {seconds:.2f} s; {same}"
            )
        print(f"{compiled()} kernels compiled")


if __name__ == "__main__":
    main()
