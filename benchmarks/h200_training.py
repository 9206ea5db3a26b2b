"""Training in bf16 on one H100 or H200: expert layers, forward and backward, this library and its
peers.

    python benchmarks/h200_training.py [--out FILE.jsonl] [--cells 'qwen3:*'] [--repeats 10]
        [--contender fusion_moe torch] [--recipe fp8] [--minutes 8] [--commit HASH]
    python benchmarks/h200_training.py [--out FILE.jsonl] --table   # what the file has
    python benchmarks/h200_training.py --device cpu --tiny

Cells (training_cells.py): a layer from the router's ids to tokens, in the sizes of four models,
`qwen3:4096:uniform`. Gradients are those of tokens, router weights and all weights. Contenders
(training_peers.py) get the same tensors in one process; results and gradients are compared with
torch's first. Then all run in turn, forward under no_grad, and forward and backward. A time is the
median between two CUDA events, the spread longest - shortest over it; before each start the host
gets ahead. Peak memory is that of one forward and backward beyond weights and inputs.

--recipe fp8 measures only this library, in bf16 and by a recipe of Transformer Engine, with weight
gradients by the recipe and in bf16: weights are quantized in each step. `rows` are layers on as
many rows that are sorted already, in bf16, by the recipe, and with weights that were quantized
before, as by a microbatch that is not the first one.

--kernels CONTENDER prints the microseconds of each kernel of its forward and backward instead, from
the end of the one before on: kernels begin while others still run.

A finished cell is appended to --out; cells in the file are skipped, and none starts after
--minutes. liger: `pip install liger-kernel`.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from kernel_times import print_kernels
from results import table as tabled
from torch import Tensor
from training_cells import FAR, Layer, apart, cells, digest, flops
from training_peers import LAYER, RECIPES, Contender

WARM_UPS = 2
_AHEAD = 10**7  # clocks that the device waits while the host enqueues


class Watch:
    """Time and memory of a device."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"

    def seconds(self, run: Callable[[], None]) -> float:
        """Of one run."""
        if not self.cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        torch.cuda._sleep(_AHEAD)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def peak(self, run: Callable[[], None]) -> int | None:
        """Bytes that one run needs beyond what is there."""
        if not self.cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free(self) -> None:
        """Gives back what nobody holds."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()  # raises if the device cannot go on
            torch.cuda.empty_cache()


def measure(cell: Layer, names: Iterable[str], repeats: int, device: str) -> dict[str, Any]:
    """The line of one cell."""
    watch, on = Watch(device), cell.inputs(device)
    found = compare(
        {name: partial(make, on) for name, make in LAYER.items()}, names, on.names, repeats, watch
    )
    return {
        "cell": cell.key,
        "rows": cell.rows,
        "products": cell.products,
        "flops": flops(cell),
        "contenders": found,
    }


def compare(
    makes: Mapping[str, Callable[[], Contender]],
    names: Iterable[str],
    results: Sequence[str],
    repeats: int,
    watch: Watch,
    judge: str = "torch",
) -> dict[str, dict[str, Any]]:
    """What contenders of these names take, and how far their results are from those of the
    judge.
    """
    found: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    want: list[Tensor] | None = None
    for name in (judge, *(n for n in makes if n != judge and n in names)):
        found[name] = {}
        try:
            contender = makes[name]()
            if contender.exact:
                got = digest(contender.results())
                want = got if name == judge else want
                found[name]["apart"] = (
                    dict(zip(results, apart(got, want), strict=True)) if want else None
                )
                del got
            if name in names:
                found[name]["peak"] = _prepared(contender, watch)
                contenders[name] = contender
        except Exception as e:  # a peer may fail in any way; the others are measured
            found[name]["missing"] = f"{type(e).__name__}: {str(e).strip()}".splitlines()[0][:200]
        watch.free()
    del want
    for name, times in _interleaved(contenders, repeats, watch).items():
        found[name] |= times
    return found


def _prepared(contender: Contender, watch: Watch) -> int | None:
    """Peak memory of a contender that is warm."""
    for run in (contender.forward, contender.both) * WARM_UPS:
        run()
    watch.free()
    return watch.peak(contender.both)


def _interleaved(
    contenders: Mapping[str, Contender], repeats: int, watch: Watch
) -> dict[str, dict[str, Any]]:
    """Seconds of each contender, everybody in turn, and in another order each time."""
    times: dict[str, dict[str, list[float]]] = {
        name: {"forward": [], "both": []} for name in contenders
    }
    names = list(contenders)
    for i in range(repeats):
        first = i % max(len(names), 1)
        for name in names[first:] + names[:first]:
            times[name]["forward"].append(watch.seconds(contenders[name].forward))
            times[name]["both"].append(watch.seconds(contenders[name].both))
    return {
        name: {part: _median(all_) for part, all_ in parts.items()} for name, parts in times.items()
    }


def _median(seconds: Sequence[float]) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"seconds": median, "spread": (max(seconds) - min(seconds)) / median}


def provenance(device: str, commit: str) -> dict[str, str]:
    """Where and with what."""
    versions = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **versions,
        "commit": commit,
        "date": today,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """This library in each cell, how many times as fast as each other, forward, then forward and
    backward, and whose results are too far from torch's.
    """
    names = [name for row in rows for name in row["contenders"] if name != "fusion_moe"]
    others = list(dict.fromkeys(names))
    lines = []
    for row in rows:
        ours, found = row["contenders"]["fusion_moe"], row["contenders"]
        wrong = [name for name, one in found.items() if not _right(one)]
        forward, both = (ours[part]["seconds"] for part in ("forward", "both"))
        peak = "" if ours["peak"] is None else f"{ours['peak'] / 1e9:.2f}"
        rate = f"{3 * row['flops'] / both / 1e12:.0f}"
        ratios = [
            f"{one['forward']['seconds'] / forward:.2f}, {one['both']['seconds'] / both:.2f}"
            if "both" in (one := found.get(name, {}))
            else ""
            for name in others
        ]
        times = f"{forward * 1e3:.2f}", f"{both * 1e3:.2f}", f"{ours['both']['spread']:.0%}"
        lines.append([row["cell"], *times, rate, peak, *ratios, ", ".join(wrong)])
    head = ["cell", "forward ms", "both ms", "spread", "TFLOP/s", "peak GB"]
    return tabled([*head, *(f"x {name}" for name in others), "wrong"], lines)


def _right(found: Mapping[str, Any]) -> bool:
    """Whether results are near torch's; NaN is not."""
    return all(value <= FAR for value in (found.get("apart") or {}).values())


def resumed(
    told: argparse.Namespace, cells: Sequence[Any], measure: Callable[[Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of told.out, and unless told.table those of cells that it lacks and that there is
    memory for: each is measured and appended.

    told.cells: patterns of keys; told.minutes: after which no cell is started.
    """
    begun = time.monotonic()
    told.out.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in told.out.read_text(encoding="utf-8").splitlines()]
        if told.out.exists()
        else []
    )
    if not told.table:
        made, done = provenance(told.device, told.commit), {row["cell"] for row in rows}
        print(made, flush=True)
        for cell in cells:
            if cell.key in done or not any(
                fnmatch.fnmatch(cell.key, pattern) for pattern in told.cells
            ):
                continue
            if time.monotonic() - begun > 60 * told.minutes:
                print(f"stopped before {cell.key}; the same command resumes there")
                break
            try:
                rows.append({**measure(cell), "provenance": made})
            except torch.OutOfMemoryError as error:  # each contender fits, not all at once
                print(f"left out {cell.key}: {str(error).splitlines()[0]}", flush=True)
                Watch(told.device).free()
                continue
            with told.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1]["contenders"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/h200_training.jsonl"),
        help="where a run is resumed; %(default)s",
    )
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns")
    parser.add_argument(
        "--contender",
        nargs="+",
        choices=sorted(LAYER),
        default=sorted(LAYER),
    )
    parser.add_argument("--recipe", choices=("mxfp8", "fp8"), help="beside bf16, and nothing else")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small cells, to try the program")
    parser.add_argument(
        "--table",
        action="store_true",
        help="print a line for each cell that the file has, measure nothing",
    )
    parser.add_argument("--kernels", choices=LAYER, help="profile one contender")
    parser.add_argument("--commit", default="")
    told = parser.parse_args()
    if told.kernels:
        for cell in cells(told.tiny):
            if any(fnmatch.fnmatch(cell.key, pattern) for pattern in told.cells):
                print_kernels(LAYER[told.kernels](cell.inputs(told.device)).both)
        return
    if told.recipe:
        rows = [n for n in LAYER if n == "rows" or n.startswith(f"rows_{told.recipe}")]
        told.contender = ["fusion_moe", *(n for n in RECIPES if n.startswith(told.recipe)), *rows]
    rows = resumed(
        told,
        cells(told.tiny),
        lambda cell: measure(cell, told.contender, told.repeats, told.device),
    )
    print(summary(rows))


if __name__ == "__main__":
    main()
