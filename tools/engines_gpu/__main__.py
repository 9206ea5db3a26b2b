"""This library in vLLM on a GPU, beside vLLM's own kernels, in vLLM's default mode.

    python tools/engines_gpu FOLDER [--models nvfp4 glm/config.json] [--together] [--soak 600]
        [--ranks tp2 ep2 tp4 ep4] [--cases plain dummy mtp sleep-1]

Needs a GPU and vLLM. Makes models with random weights in FOLDER, those with a name or small ones of
any config.json (given.py), measures an engine of each kind of experts, then a server with clients,
and has engines of ours do what --cases names (cases.py). FOLDER/serving.json keeps the last run of
each part, as soon as it is known, and at the end benchmarks/results/serving.md is written from it;
--page only does that. --together starts the engines of all kinds at the same time, which takes more
of the GPU's memory, and measures them one at a time. --ranks measures engines that divide each
expert (tp) or the experts (ep) between GPUs. The kind "adapters" is an engine of ours that has an
adapter of experts, which no request asks for, and then all.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from functools import partial
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
    parser = argparse.ArgumentParser(prog="engines_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--models",
        nargs="+",
        type=_named,
        default=["nvfp4", "mxfp4"],
        help=f"{', '.join(models.NAMES)}, or files of any model's config.json",
    )
    parser.add_argument("--to", default="nvfp4", help="the format of models of a config.json")
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
    parser.add_argument("--cases", nargs="+", default=[], help="of cases.py")
    parser.add_argument("--port", type=int, default=8123, help="of servers; default: %(default)s")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    record = Record(asked.folder / "serving.json")
    if not asked.page:
        _measure(asked, record)
    page.page(record.found)


class Record:
    """What was found, in a file from the moment that it is known."""

    def __init__(self, file: Path):
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def keep(self, value: Any, *names: str) -> None:
        """In place of an earlier one of the same part, model and kind."""
        *above, last = names
        within = self.found
        for name in above:
            within = within.setdefault(name, {})
        within[last] = value
        self.file.write_text(json.dumps(self.found))


def _named(text: str) -> str | Path:
    """A model's name, or the file that describes one."""
    if text in models.NAMES:
        return text
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no file, and none of {', '.join(models.NAMES)}"
        )
    return Path(text)


def _measure(asked: argparse.Namespace, record: Record) -> None:
    asked.folder.mkdir(parents=True, exist_ok=True)
    made = [_made(asked, name) for name in asked.models]
    paths = {path.name: path for path in made}
    versions = {n: importlib.metadata.version(n) for n in ("vllm", "torch")}
    record.keep(versions, "versions")
    if "engine" in asked.parts:
        _engines(asked, paths, record)
    for name, path in paths.items():
        for case in asked.cases:
            _case(asked, path, case, record)
        if "server" in asked.parts or asked.soak:
            _servers(asked, name, path, record)


def _made(asked: argparse.Namespace, name: str | Path) -> Path:
    if isinstance(name, str):
        return models.make(asked.folder, name, asked.layers)
    import given  # with transformers and this library

    return given.make(asked.folder, name, asked.layers, asked.to)


def _case(asked: argparse.Namespace, path: Path, case: str, record: Record) -> None:
    out = asked.folder / f"{path.name}-{case}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).parent / "cases.py"), str(path), case]
    command += ["--out", str(out), "--options", json.dumps({"quantization": OURS})]
    with out.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    found = json.loads(out.read_text()) if out.exists() else {}
    failed = {"failed": f"exit status {code}: see {log.name}"} if code else {}
    record.keep(found | failed, "cases", path.name, case)


def _engines(asked: argparse.Namespace, made: dict[str, Path], record: Record) -> None:
    running = []
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
            running.append((started, out, title, kind))
            if not asked.together:
                _keep(*running.pop(), record)
    for started, out, *_ in running:
        while started.poll() is None and not out.with_suffix(".ready").exists():
            time.sleep(0.2)
    turn.write_text("all are ready")
    for one in running:
        _keep(*one, record)


def _keep(
    started: subprocess.Popen[bytes], out: Path, title: str, kind: str, record: Record
) -> None:
    """Waits for an engine's process, and keeps what it found, also if it then failed."""
    if started.wait():
        print(f"{title} with {kind} failed: see {out.with_suffix('.log')}", file=sys.stderr)
    if out.exists():
        record.keep(json.loads(out.read_text()), "engines", title, kind)


def _keep_soak(record: Record, name: str, kind: str, found: dict[str, Any]) -> None:
    print({what: value for what, value in found.items() if what != "apart"}, flush=True)
    record.keep(found, "servers", name, kind, "soak")


def _servers(asked: argparse.Namespace, name: str, path: Path, record: Record) -> None:
    for kind in (kind for kind in asked.kinds if kind in KINDS):
        with server.serving("vllm", path, asked.port, *KINDS[kind]) as running:
            record.keep({"start_s": running.start_s}, "servers", name, kind)
            for n in CLIENTS if "server" in asked.parts else ():
                record.keep(server.latencies(running, n), "servers", name, kind, str(n))
            if asked.soak:
                keep = partial(_keep_soak, record, name, kind)
                soaked, prompts, alone = server.soak(running, CLIENTS[-1], asked.soak, keep)
        # it was killed; another one finds its caches
        if asked.soak and kind == OURS:
            with server.serving("vllm", path, asked.port, *KINDS[kind]) as running:
                again = [running.greedy(prompt) for prompt in prompts]
                soaked |= {
                    "restart_s": running.start_s,
                    "apart after a restart": max(map(server.apart, again, alone)),
                }
                record.keep(soaked, "servers", name, kind, "soak")


if __name__ == "__main__":
    main()
