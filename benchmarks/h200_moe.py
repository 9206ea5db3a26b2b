"""NVFP4 mixtures of experts on an H200: this library and its peers, in one process, against what
the card can do.

    python benchmarks/h200_moe.py --out h200.jsonl [--model qwen3 ...] [--tokens 1 32 ... | --dense]
        [--part gemm1 gemm2 mlp]
                                  [--routing uniform zipf] [--contender fusion_moe ...] [--repeats
                                      7] [--minutes 7] [--commit HASH]
    python benchmarks/h200_page.py h200.jsonl

Every contender (h200_contenders.py, h200_humming.py) runs each cell (h200_cells.py): calls rotating
over layers and routings, captured in a CUDA graph. The graph's result is filled with NaN, the graph
is replayed, and the result of its last call is checked against float32; then the graphs are
replayed, interleaved. Times are medians, divided by the number of calls.

--activations fp8 measures the MLPs of more models under both routings: NVFP4 weights and rows of 16
bits, which is `prepare_(weights="packed")`; both in e4m3, "fp8"; and "both"; beside Humming's W4A8,
vLLM's and Hugging Face's kernels (h200_fp8_peers.py), and what torch's dense products in FP8 of the
same sizes take. --contender w8a16 has weights in FP8 and rows of 16 bits. DeepGEMM's products of
equal groups, beside ours: --activations fp8 --model equal --part gemm1 gemm2 --tokens 8192
--contender fp8 deepgemm "dense fp8".

The shards of tensor parallelism, --model qwen3-tp8 gpt-oss-tp4 i1392 i2064 --part mlp, are padded,
which "fusion_moe" does and --contender linear, the kernels for weights as they are stored, need
not.

--kernels CONTENDER prints the microseconds of each kernel of a call instead, from the end of the
one before on.

Installed peers take part: `pip install humming-kernels==0.1.20`, which compiles its kernels when a
model's cells begin, and caches them in HUMMING_CACHE_DIR. A peer that is missing or fails is named,
with the reason.

A finished cell is appended to --out as one line of JSON; cells in the file are skipped, and no cell
starts after --minutes. So the same command resumes a run. Clocks and power are read while the
graphs run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from cuda_graphs import Captured, capture, replays
from h200_cells import (
    ALL_MODELS,
    DENSE_TOKENS,
    FP8_CONTENDERS,
    FP8_PEERS,
    MODELS,
    MORE_MODELS,
    PARTS,
    ROUTINGS,
    TOKENS,
    Cell,
    Layers,
    error,
    is_right,
    routed,
)
from h200_contenders import W8A16, Both, Call, Contender, Dense, DenseFp8, Fp8, Linear, Ours, Torch
from h200_flashinfer import CuTile, MonoMoe
from h200_fp8_peers import DeepGemm, Finegrained, Vllm
from h200_humming import Grouped, GroupedFp8, Indexed, IndexedFp8
from h200_marlin import Marlin
from kernel_times import print_kernels

import fusion_moe

CONTENDERS: dict[str, type[Contender]] = {
    "fusion_moe": Ours,
    "linear": Linear,
    "humming indexed": Indexed,
    "humming grouped": Grouped,
    "torch": Torch,
    "dense": Dense,
    "fp8": Fp8,
    "both": Both,
    "w8a16": W8A16,
    "humming w4a8 indexed": IndexedFp8,
    "humming w4a8 grouped": GroupedFp8,
    "vllm": Vllm,
    "finegrained": Finegrained,
    "deepgemm": DeepGemm,
    "dense fp8": DenseFp8,
    "marlin": Marlin,
    "cutile": CuTile,
    "monomoe": MonoMoe,
}
_OF_FP8 = (*FP8_CONTENDERS, *FP8_PEERS, "dense fp8")
_GRAPH_SECONDS, _MOST_CALLS = 1.5e-3, 64  # what a graph takes at the floor


def watch(done: Callable[[], bool]) -> dict[str, list[float]]:
    """Least and most of the card's clock and power until it is done."""
    asked = {
        "MHz": torch.cuda.clock_rate,
        "W": lambda: torch.cuda.power_draw() / 1e3,
        "C": torch.cuda.temperature,
    }
    found: dict[str, list[float]] = {}
    while True:
        for name, ask in asked.items():
            value = ask()
            low, high = found.get(name, [value, value])
            found[name] = [min(low, value), max(high, value)]
        if done():
            return found


class Bench:
    """The contenders with one model's weights."""

    def __init__(self, name: str, contenders: Iterable[str], cells: Sequence[Cell]):
        self.model = ALL_MODELS[name]
        names = list(contenders)
        # weights in other formats take long
        self.layers = Layers(self.model, 2 if {*names} & {*_OF_FP8} else self.model.layers)
        self.contenders: dict[str, Contender] = {}
        self.missing: dict[str, str] = {}
        for contender in names:
            made, begun = CONTENDERS[contender](self.model, self.layers), time.monotonic()
            try:
                made.prepare(cells)
                self.contenders[contender] = made
            except Exception as e:  # a peer may fail in any way; the others are measured
                self.missing[contender] = _sentence(e)
            print(f"{contender}: prepared in {time.monotonic() - begun:.1f} s", flush=True)

    def measure(self, cell: Cell, repeats: int) -> dict[str, Any] | None:
        """The line of one cell; None if nobody computes it, which is printed."""
        to = routed(cell)
        touched = statistics.mean(r.touched for r in to)
        floor = cell.floor(touched)
        count = min(_MOST_CALLS, max(len(self.layers), math.ceil(_GRAPH_SECONDS / floor)))
        graphs: dict[str, Captured] = {}
        found: dict[str, dict[str, Any]] = {
            name: {"missing": why} for name, why in self.missing.items()
        }
        for name, contender in self.contenders.items():
            try:
                calls = [
                    contender.run(cell, i % len(self.layers), to[i % len(to)]) for i in range(count)
                ]
                captured = capture([call.run for call in calls])
                found[name] = self.check(cell, captured, calls[-1]) if contender.exact else {}
                graphs[name] = captured
            except Exception as e:
                found[name] = {"missing": _sentence(e)}
                torch.cuda.synchronize()  # raises if the device cannot go on
        if not graphs:
            print(f"nobody computes {cell}: {found}", flush=True)
            return None
        state: dict[str, list[float]] = {}
        for name, us in replays(graphs, repeats, lambda done: state.update(watch(done))).items():
            median = statistics.median(us)
            found[name] |= {
                "us": round(median, 3),
                "spread": round((max(us) - min(us)) / median, 4),
            }
        return {
            "model": cell.name,
            "part": cell.part,
            "tokens": cell.tokens,
            "routing": cell.routing,
            "touched": touched,
            "bytes": round(touched * cell.model.expert_bytes(cell.part)),
            "flops": cell.flops,
            "floor_us": round(floor * 1e6, 3),
            "calls": count,
            "layers": len(self.layers),
            "routings": len(to),
            "contenders": found,
            **state,
        }

    def check(self, cell: Cell, captured: Captured, last: Call) -> dict[str, Any]:
        """The error of what the graph computes by its last call."""
        captured.result.fill_(math.nan)
        captured.graph.replay()
        found = error(
            cell,
            self.layers[last.layer],
            last.to,
            captured.result if cell.part == "mlp" else last.rows(captured.result),
        )
        return {"error": found if math.isfinite(found) else None}


def _sentence(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).strip()}".splitlines()[0][:200]


def versions() -> dict[str, str]:
    """Of the packages of the contenders, as far as they are there."""
    found = {}
    for name in ("torch", "triton", "humming-kernels", "vllm", "flashinfer-python", "cuda-tile"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def provenance(commit: str) -> dict[str, str]:
    """Where and with what."""
    asked = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    card = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = ("card", "driver", "power limit", "highest clock", "highest clock of memory")
    found = dict(zip(names, map(str.strip, card.stdout.splitlines()[0].split(",")), strict=True))
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        **found,
        **versions(),
        "cuda": torch.version.cuda or "",
        "fusion_moe": fusion_moe.__version__,
        "commit": commit,
        "date": today,
    }


def report(row: Mapping[str, Any]) -> None:
    """One line for a person."""
    parts = []
    for name, found in row["contenders"].items():
        if "us" not in found:
            parts.append(f"{name} missing ({found['missing']})")
            continue
        wrong = "" if is_right(name, row["part"], found) else " WRONG"
        err = f" err {found['error'] or math.nan:.1e}" if "error" in found else ""
        parts.append(f"{name} {found['us']:.1f} ({found['us'] / row['floor_us']:.2f}x){err}{wrong}")
    print(
        f"{row['model']} {row['part']} T={row['tokens']} {row['routing']} floor "
        f"{row['floor_us']:.1f}: {'; '.join(parts)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/h200_moe.jsonl"),
        help="where a run is resumed; %(default)s",
    )
    parser.add_argument("--model", nargs="+", choices=ALL_MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--dense",
        action="store_const",
        dest="tokens",
        const=list(DENSE_TOKENS),
        help="the tokens of a dense grid",
    )
    parser.add_argument("--part", nargs="+", choices=PARTS)
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS)
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS)
    parser.add_argument(
        "--activations",
        choices=["fp8"],
        help="measure rows in FP8 beside rows of 16 bits",
    )
    parser.add_argument("--kernels", choices=CONTENDERS, help="profile one contender")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=7)
    parser.add_argument("--commit", default="")
    told = parser.parse_args()
    fp8 = told.activations is not None
    of_fp8 = ["fusion_moe", *(n for n in _OF_FP8 if n not in ("w8a16", "deepgemm", "monomoe"))]
    usual = [name for name in CONTENDERS if name not in ("linear", "marlin", *_OF_FP8)]
    told.contender = told.contender or (of_fp8 if fp8 else usual)
    if told.kernels:
        told.contender = [told.kernels]
    told.model = told.model or list(MODELS | MORE_MODELS if fp8 else MODELS)
    told.part = told.part or (["mlp"] if fp8 else list(PARTS))
    told.routing = told.routing or (list(ROUTINGS) if fp8 else ["uniform"])
    begun, made = time.monotonic(), provenance(told.commit)
    told.out.parent.mkdir(parents=True, exist_ok=True)
    lines = told.out.read_text(encoding="utf-8").splitlines() if told.out.exists() else []
    done = {Cell(r["model"], r["part"], r["tokens"], r["routing"]) for r in map(json.loads, lines)}
    print(made, flush=True)
    by_nobody = []
    for name in told.model:
        wanted = [
            Cell(name, *rest) for rest in itertools.product(told.part, told.tokens, told.routing)
        ]
        cells = [cell for cell in wanted if cell not in done]
        bench = None
        for cell in cells:
            if time.monotonic() - begun > 60 * told.minutes:
                print(f"stopped before {cell}; the same command resumes there")
                return
            torch.manual_seed(0)
            bench = bench or Bench(name, told.contender, cells)
            if told.kernels:
                print(cell, flush=True)
                print_kernels(bench.contenders[told.kernels].run(cell, 0, routed(cell)[0]).run)
            elif row := bench.measure(cell, told.repeats):
                with told.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({**row, "provenance": made}) + "\n")
                report(row)
            else:
                by_nobody.append(cell)
            torch.cuda.empty_cache()
        del bench
        torch.cuda.empty_cache()
    if by_nobody:
        sys.exit(f"nobody computed {by_nobody}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
