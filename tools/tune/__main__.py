"""Chooses which kernels of grouped products are used for how many rows, by measured times: a table
for each GPU.

    python tools/tune sweep --out timings.json --minutes 4   # on the GPU: times kernels; goes on
                                                             where the file ends
    python tools/tune fit timings.json [--write]             # without: the table that fits them
                                                             best, and how well; --write: keeps it
    python tools/tune show timings.json                      # how well the table fits that is used
                                                             now
    python tools/tune model a.json b.json [--write]          # the model of products of one group
                                                             that fits these GPUs best, and how well
    python tools/tune predict h200.json h100.json [--write]  # tables of known GPUs without wgmma by
        the times of the first, and how well each of these GPUs predicts the others
    python tools/tune balance timings.json --tokens 300 1300 # how far products are from their
        floors, and how evenly blocks work

Tables are in fusion_moe/backends/cuda/tables/, the timings that they come from in
tools/tune/timings/.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import fit
import timings as files

from fusion_moe.arch import KNOWN
from fusion_moe.backends.cuda.table import path_of, table_of
from fusion_moe.backends.cuda.variants import LargeM

HERE = Path(__file__).parent


def main() -> int:
    asked = _arguments()
    return {
        "sweep": _sweep,
        "fit": _fit,
        "model": _model,
        "show": _show,
        "predict": _predict,
        "balance": _balance,
    }[asked.do](asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="do", required=True)
    sweep = commands.add_parser("sweep", help="times kernels on this GPU")
    sweep.add_argument(
        "--out", type=Path, help="a file; by default that of this GPU in tools/tune/timings"
    )
    sweep.add_argument("--minutes", type=float, default=4)
    sweep.add_argument("--repeats", type=int, default=5)
    sweep.add_argument("--layout", default="w16x64", help="of weights: w16x64 or linear")
    sweep.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="products whose name has one of these texts: qwen3, down",
    )
    sweep.add_argument("--tokens", type=int, nargs="+")
    for name, what in (
        ("fit", "chooses a table"),
        ("model", "fits the model of products of one group"),
        ("show", "says how good the table of today is"),
        ("predict", "predicts tables, and says how well"),
        ("balance", "says how evenly blocks work"),
    ):
        command = commands.add_parser(name, help=what)
        command.add_argument("timings", type=Path, nargs="+", help="files of one GPU")
        if name in ("fit", "model", "predict"):
            command.add_argument("--write", action="store_true", help="writes it into the package")
        if name == "balance":
            command.add_argument(
                "--tokens", type=int, nargs=2, default=[1, 2**31], metavar=("FEWEST", "MOST")
            )
            command.add_argument(
                "--only",
                nargs="+",
                default=[""],
                metavar="TEXT",
                help="products whose names begin so",
            )
    return parser.parse_args()


def _sweep(asked: argparse.Namespace) -> int:
    import sweep
    import torch

    from fusion_moe.runtime import cuda

    arch = cuda.arch(torch.cuda.current_device())
    path = asked.out or HERE / "timings" / path_of(arch).name
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "read": str(cuda.read_arch(torch.cuda.current_device())),
        "layout": asked.layout,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    begun = files.load(path) if path.exists() else files.Timings(arch, about)
    if begun.arch != arch:
        raise SystemExit(
            f"{path} has timings of {begun.arch.name}, this is {arch.name}: name "
            "another file with --out"
        )
    tasks = [
        sweep.Task(layer, part, asked.layout)
        for layer in (*sweep.LAYERS, *sweep.DENSE, *sweep.OTHERS)
        for part in sweep.PARTS
    ]
    tasks = [task for task in tasks if any(text in task.name for text in asked.only)]
    keep = partial(files.save, path=path)
    found = sweep.sweep(
        begun,
        table_of(arch),
        tasks,
        asked.tokens,
        60 * asked.minutes,
        asked.repeats,
        keep,
        partial(print, flush=True),
    )
    print("\n".join(fit.summary(fit.fitted(table_of(arch), found))))
    print(f"{len(found.cells)} cells in {path}")
    return 0


def _fit(asked: argparse.Namespace) -> int:
    found = files.load_all(asked.timings)
    before = table_of(found.arch)
    after = fit.fit(before, found)
    print(fit.shown(after, found))
    print("\nbefore:", *fit.summary(fit.fitted(before, found)))
    print("\n".join(fit.changes(before, after)) or "nothing changes")
    if asked.write:
        path_of(found.arch).write_text(fit.text(after), encoding="utf-8")
        print(f"written to {path_of(found.arch)}")
    return 0


def _model(asked: argparse.Namespace) -> int:
    import model

    found = [files.load(path) for path in asked.timings]
    fitted = model.fit(found)
    print(fitted)
    if asked.write:
        model.write(fitted)
        print(f"written to {model.CONSTANTS}; how well it chooses: tools/tune show")
    return 0


def _show(asked: argparse.Namespace) -> int:
    found = files.load_all(asked.timings)
    print(fit.shown(table_of(found.arch), found))
    print(
        "\none choice for all routings, at best:", *fit.summary(fit.best_of_counts(found)), sep="\n"
    )
    return 0


def _predict(asked: argparse.Namespace) -> int:
    import predict

    found = [files.load(path) for path in asked.timings]
    for measured, by in permutations(found, 2):
        print(predict.quality(measured, by))
    for gpu in KNOWN.values():
        if not gpu.why_not(LargeM.needs):
            continue
        table = predict.table(found[0], gpu)
        print(f"\n{gpu.name}", *map(fit.said, table.tiled), sep="\n")
        if asked.write:
            path_of(gpu).write_text(fit.text(table), encoding="utf-8")
    return 0


def _balance(asked: argparse.Namespace) -> int:
    import balance

    found, (fewest, most) = files.load_all(asked.timings), asked.tokens
    cells = [
        cell
        for cell in found.cells
        if fewest <= cell.tokens <= most and cell.product.startswith(tuple(asked.only))
    ]
    print("\n".join(balance.shown(table_of(found.arch), replace(found, cells=tuple(cells)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
