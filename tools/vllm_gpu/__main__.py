"""This library in vLLM on a GPU, beside vLLM's own kernels, in vLLM's default mode.

    python tools/vllm_gpu FOLDER [--models nvfp4 mxfp4] [--together] [--soak 600]
        [--ranks tp2 ep2 tp4 ep4]

Needs a GPU and vLLM. Makes models with random weights in FOLDER, measures an engine of each kind of
experts, then a server with clients. FOLDER/serving.json keeps the last run of each part, and
benchmarks/results/serving.md is written from it; --page only does that. --together starts the
engines of all kinds at the same time, which takes more of the GPU's memory, and measures them one
at a time. --ranks measures engines that divide each expert (tp) or the experts (ep) between GPUs.
The kind "adapters" is an engine of ours that has an adapter of experts, which no request asks for,
and then all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "benchmarks")]

import models
import page
import server

OURS, ADAPTERS = page.OURS, page.ADAPTERS
# kinds of experts: options of vLLM, or of engine.py
KINDS = {OURS: ["--quantization", OURS], "vllm": [], "marlin": ["--moe-backend", "marlin"]}
ENGINES = KINDS | {ADAPTERS: [*KINDS[OURS], "--adapter"]}
CLIENTS = 16, 64
RANKS = {
    f"{name}{n}": ["--tensor-parallel-size", str(n), *more]
    for n in (2, 4)
    for name, more in (("tp", []), ("ep", ["--enable-expert-parallel"]))
} | {"1": []}


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=["nvfp4", "mxfp4"])
    parser.add_argument("--kinds", nargs="+", choices=ENGINES, default=list(KINDS))
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--ranks",
        nargs="+",
        choices=RANKS,
        default=["1"],
        help="tp2: each expert divided between 2 GPUs; ep2: the experts",
    )
    parser.add_argument("--lengths", type=int, default=500, help="how many new lengths of prompts")
    parts = "engine", "server"
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--soak", type=float, default=0, help="seconds with mixed requests")
    parser.add_argument("--port", type=int, default=8123, help="of servers; default: %(default)s")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    record = asked.folder / "serving.json"
    if not asked.page:
        before = json.loads(record.read_text()) if record.exists() else {}
        found = _measured(asked)
        merged = {part: before.get(part, {}) | value for part, value in found.items()}
        record.write_text(json.dumps(before | merged))
    page.page(json.loads(record.read_text()))


def _measured(asked: argparse.Namespace) -> dict[str, Any]:
    asked.folder.mkdir(parents=True, exist_ok=True)
    made = {name: models.make(asked.folder, name, asked.layers) for name in asked.models}
    found: dict[str, Any] = {
        "versions": {n: importlib.metadata.version(n) for n in ("vllm", "torch")}
    }
    if "engine" in asked.parts:
        found["engines"] = _engines(asked, made)
    if "server" in asked.parts or asked.soak:
        found["servers"] = {name: _servers(asked, path) for name, path in made.items()}
    return found


def _engines(asked: argparse.Namespace, made: dict[str, Path]) -> dict[str, dict[str, Any]]:
    running = {}
    turn = asked.folder / "turn"
    turn.write_text("")
    for model, ranks in itertools.product(made, asked.ranks):
        path, title = made[model], model if ranks == "1" else f"{model}, {ranks}"
        for kind in asked.kinds:
            out = asked.folder / f"{model}-{ranks}-{kind}.json"
            ready = out.with_suffix(".ready")
            for stale in out, ready:
                stale.unlink(missing_ok=True)
            command = [sys.executable, str(Path(__file__).parent / "engine.py"), str(path)]
            command += [*ENGINES[kind], *RANKS[ranks], "--out", str(out)]
            command += ["--lengths", str(asked.lengths)]
            command += ["--turn", str(turn)] if asked.together else []
            with out.with_suffix(".log").open("w") as log:
                started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running[title, kind] = started, out
            if not asked.together:
                started.wait()
    for started, out in running.values():
        while started.poll() is None and not out.with_suffix(".ready").exists():
            time.sleep(0.2)
    turn.write_text("all are ready")
    found: dict[str, dict[str, Any]] = {title: {} for title, _ in running}
    for (title, kind), (started, out) in running.items():
        if started.wait():
            print(f"{title} with {kind} failed: see {out.with_suffix('.log')}", file=sys.stderr)
        else:
            found[title][kind] = json.loads(out.read_text())
    return found


def _servers(asked: argparse.Namespace, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in asked.kinds:
        with server.serving(path, asked.port, *KINDS[kind]) as running:
            found[kind] = {"start_s": running.start_s}
            if "server" in asked.parts:
                found[kind] |= {str(n): server.latencies(running, n) for n in CLIENTS}
            if asked.soak:
                found[kind]["soak"], prompts, alone = server.soak(running, CLIENTS[-1], asked.soak)
        # it was killed; another one finds its caches
        if asked.soak and kind == OURS:
            with server.serving(path, asked.port, *KINDS[kind]) as running:
                again = [running.greedy(prompt) for prompt in prompts]
                found[kind]["soak"] |= {
                    "restart_s": running.start_s,
                    "apart after a restart": max(map(server.apart, again, alone)),
                }
    return found


if __name__ == "__main__":
    main()
