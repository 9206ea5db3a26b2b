"""The kernels for GPUs without wgmma, on a newer GPU: an expert MLP with NVFP4 weights by the
kernels of compute capability 8.0 beside those of this GPU, and Marlin.

    python benchmarks/ampere_moe.py [--out build/ampere_moe] [--arch 8.0] [--model qwen3 ...]
        [--tokens 1 64 ...] [--minutes 7]

Both runs are h200_moe.py's, in processes of their own: one by PTX, with the option cuda_arch, and
one as usual. Marlin takes part in that if vLLM is installed: its kernels use mma.sync in either.
These times say how good the code is. They predict no other card, whose tensor cores, memory and
clocks have other ratios, as is printed below the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from h200_cells import MODELS, MORE_MODELS, TOKENS

NO_PREDICTION = "Times of this GPU by code for another one. They predict no time of that one."


def measured(out: Path, arch: str, contenders: list[str], told: argparse.Namespace) -> int:
    """Runs the cells that are not in a file yet. -> the exit status"""
    command = [
        *(sys.executable, str(Path(__file__).with_name("h200_moe.py")), "--out", str(out)),
        *("--part", "mlp", "--model", *told.model, "--tokens", *map(str, told.tokens)),
        *("--minutes", str(told.minutes), "--contender", *contenders),
    ]
    environment = {**os.environ, "FUSION_MOE_CUDA_ARCH": arch}
    return subprocess.run(command, check=False, env=environment).returncode


def cells(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The lines of a file, by model and tokens; none if no cell was finished."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
    return {(row["model"], row["tokens"]): row for row in lines}


def line(model: str, tokens: int, lane: dict[str, Any], own: dict[str, Any]) -> str:
    """A row of the table."""
    us = {
        "lane": lane["contenders"]["fusion_moe"].get("us"),
        **{name: found.get("us") for name, found in own["contenders"].items()},
    }
    shown = [f"{us[name]:.1f}" if us.get(name) else "missing" for name in ("lane", "fusion_moe")]
    marlin, by_lane = us.get("marlin"), us["lane"]
    against = f"{marlin:.1f} | {by_lane / marlin:.2f}" if marlin and by_lane else "missing | "
    tflops = f"{lane['flops'] / by_lane / 1e6:.0f}" if by_lane else ""
    return f"| {model} | {tokens} | {' | '.join(shown)} | {against} | {tflops} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/ampere_moe"))
    parser.add_argument("--arch", default="8.0", help="the option cuda_arch; %(default)s")
    parser.add_argument("--model", nargs="+", choices=MODELS | MORE_MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--minutes", type=float, default=7, help="of each run")
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    lane, own = (told.out / f"{name}.jsonl" for name in (told.arch, "own"))
    statuses = (
        measured(lane, told.arch, ["fusion_moe"], told),
        measured(own, "auto", ["fusion_moe", "marlin"], told),
    )
    lane_head = f"us by {told.arch} | us by its own | Marlin | of Marlin's | TFLOP/s by {told.arch}"
    print(f"| model | tokens | {lane_head} |")
    by_own = cells(own)
    for at, row in cells(lane).items():
        if at in by_own:
            print(line(*at, row, by_own[at]))
    print(NO_PREDICTION)
    if any(statuses):
        sys.exit(f"not every cell was measured: the runs ended with {statuses}")


if __name__ == "__main__":
    main()
