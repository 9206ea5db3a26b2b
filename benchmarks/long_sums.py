"""Sums of the rows of groups, which are gradients of biases: time and largest relative error,
beside torch's `sum`.

    python benchmarks/long_sums.py [--device cuda] [--repeats 50]

Times are medians. To compare two trees, run both in turns, each with its own PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import fusion_moe
from fusion_moe.ir.builder import FusionDefinition
from fusion_moe.ir.core import Fusion

CELLS = [
    (rows, groups, columns)
    for rows in (4_096, 65_536, 1_000_000)
    for groups, columns in ((1, 32), (1, 1024), (64, 1024))
]


def sums(groups: int, columns: int) -> Fusion:
    """x bf16[m, columns], offs -> the sum of each group's rows, f32"""
    fd = FusionDefinition()
    x, offs = (
        fd.define_tensor(shape=[-1, columns], dtype="bf16"),
        fd.define_tensor(shape=[groups], dtype="i32"),
    )
    ends = fd.groups_of(offs, x.type.shape[0])
    fd.add_output(fd.ops.group_sum(fd.ops.partition(x, ends), ends))
    return fd.fusion()


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[repeats // 5 :])


def error(found: Tensor, want: Tensor) -> float:
    """The largest relative one."""
    return float(((found.double() - want) / want).abs().max())


def main() -> None:
    """Prints a line for each cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    for rows, groups, columns in CELLS:
        x = torch.rand(rows, columns, device=given.device).bfloat16()
        offs = (torch.arange(1, groups + 1, device=given.device) * (rows // groups)).int()
        used, fusion = x[: rows // groups * groups].view(groups, -1, columns), sums(groups, columns)
        want = used.double().sum(1)
        ways: dict[str, Callable[[], Tensor]] = {
            "ours": lambda fusion=fusion, x=x, offs=offs: fusion_moe.run(fusion, [x, offs])[0],  # type: ignore[misc]
            "torch": lambda used=used: used.sum(1, dtype=torch.float32),  # type: ignore[misc]
        }
        shown = [
            f"{n} {1e6 * seconds(f, given.device, given.repeats):.1f} us, error "
            f"{error(f(), want):.1e}"
            for n, f in ways.items()
        ]
        print(f"{rows} rows, {groups} groups, {columns} columns: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
