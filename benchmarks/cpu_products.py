"""NVFP4 grouped products on the CPU, against read bandwidth and against torch, in one process.
(cpu_moe.py: whole layers.)

    python benchmarks/cpu_products.py [--threads 1 2] [--repeats 7] [--json FILE] [--no-page]

Each cell: `experts` matrices n x k, more than the last-level cache holds, each with the same number
of rows. Contenders are interleaved and run `repeats` times; the tables show medians, and our spread
as (longest - shortest) / median. GB/s count the bytes of the NVFP4 weights, 0.5625 each, for every
contender, so that columns compare. "read" is the loop with which the library measures a machine's
bandwidth (fusion_moe/runtime/host_memory/bandwidth.cpp), over a GiB, interleaved too. Times are CPU
time for one thread, wall time for more. The tables and a plot go into
docs/performance/cpu_products.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cpu_peers
import cpu_products_page
import torch
from torch import Tensor
from torch.nn.functional import linear

import fusion_moe
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.runtime import build, isa
from fusion_moe.runtime.host_memory import bandwidth, pages

CELLS = ((1536, 2048), (2048, 768))  # n, k
ROWS = {1: 128, 4: 128, 16: 128, 64: 16, 256: 16}  # rows of each expert: experts


def random_weight(experts: int, n: int, k: int) -> Quantized:
    """Random codes, block scales of ordinary sizes."""
    codes, scales = (
        pages.empty((experts, n, k // 2), torch.uint8),
        pages.empty((experts, n, k // 16), torch.uint8),
    )
    codes.random_(0, 256)
    scales.random_(0x20, 0x70)
    return Quantized(
        codes, scales.view(torch.float8_e4m3fn), torch.full((experts,), 0.01), encoding=NVFP4
    )


def on_large_pages(*tensors: Tensor) -> str:
    """How much of them is."""
    return (
        f"{pages.obtained(*tensors) >> 20} of {sum(t.nbytes for t in tensors) >> 20} MiB on "
        "large pages"
    )


class Clock:
    """Medians of interleaved contenders."""

    def __init__(self, threads: int, repeats: int):
        self.threads, self.repeats = threads, repeats
        self.now = time.thread_time if threads == 1 else time.perf_counter

    def __call__(self, contenders: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for function in contenders.values():
            function()
        for _ in range(self.repeats):
            for name, function in contenders.items():
                start = self.now()
                function()
                found[name].append(self.now() - start)
        return found


def products(
    clock: Clock, read: Callable[[Tensor], None], pool: Tensor, most: int, with_peers: bool
) -> list[dict[str, float]]:
    """One row of the table for each cell. pool: at least a GiB to read."""
    table = []
    for n, k in CELLS:
        weight = random_weight(max(ROWS.values()), n, k)
        print(f"weights {n} x {k}: {on_large_pages(*weight)}")
        bf16 = torch.randn(max(ROWS.values()), n, k).bfloat16()
        packed = [
            torch._convert_weight_to_int4pack_for_cpu(
                torch.randint(0, 16, (n, k), dtype=torch.int32), 1
            )
            for _ in bf16
        ]
        peers = cpu_peers.installed(len(bf16), n, k, clock.threads) if with_peers else {}
        for rows in (r for r in ROWS if r <= most):
            table.append(
                product(clock, lambda: read(pool), pool.numel(), rows, weight, bf16, packed, peers)
            )
    return table


def product(
    clock: Clock,
    read: Callable[[], None],
    pool_bytes: int,
    rows: int,
    weight: Quantized,
    bf16: Tensor,
    packed: list[Tensor],
    peers: Mapping[str, cpu_peers.Peer],
) -> dict[str, float]:
    """One cell: the same product by all."""
    experts, (n, k) = ROWS[rows], bf16.shape[1:]
    x, scales = torch.randn(experts * rows, k).bfloat16(), torch.rand(k // 32, n, 2).bfloat16()
    parts, ends = x.split(rows), torch.arange(1, experts + 1, dtype=torch.int32) * rows
    args = (x, *(t[:experts] for t in weight), ends)
    found = clock(
        {
            "ours": lambda: torch.ops.fusion_moe.nvfp4_grouped_mm(*args),
            "bf16": lambda: [linear(p, w) for p, w in zip(parts, bf16, strict=False)],
            "int4pack": lambda: [
                torch._weight_int4pack_mm_for_cpu(p, w, 32, scales)
                for p, w in zip(parts, packed, strict=False)
            ],
            **{name: partial(peer, parts) for name, peer in peers.items()},
            "read": read,
        }
    )
    size = experts * n * k * 9 // 16
    t = {name: statistics.median(times) for name, times in found.items()}
    t["read"] *= size / pool_bytes
    row = {
        "n": n,
        "k": k,
        "rows": rows,
        "threads": clock.threads,
        **{f"{name} GB/s": size / s / 1e9 for name, s in t.items()},
        "GFLOP/s": 2 * experts * rows * n * k / t["ours"] / 1e9,
        **{f"x {name}": t[name] / t["ours"] for name in ("bf16", "int4pack", *peers)},
        "of read": t["read"] / t["ours"],
        "spread": (max(found["ours"]) - min(found["ours"])) / t["ours"],
    }
    print(
        f"{n:5d} x {k:4d} {rows:5d} rows {clock.threads} threads: {row['ours GB/s']:6.2f} GB/s "
        f"{row['GFLOP/s']:5.0f} GFLOP/s"
        f"  bf16 {row['bf16 GB/s']:5.2f} ({row['x bf16']:.2f}x)  int4pack "
        f"{row['int4pack GB/s']:5.2f} ({row['x int4pack']:.2f}x)"
        + "".join(
            f"  {name} {row[f'{name} GB/s']:5.2f} ({row[f'x {name}']:.2f}x)" for name in peers
        )
        + f"  read {row['read GB/s']:5.1f} ({row['of read']:.0%})  spread {row['spread']:.0%}",
        flush=True,
    )
    return row


def machine(repeats: int, what_is_on_large_pages: str) -> dict[str, Any]:
    """Where, when and with what these numbers come about."""
    compiler = build.find_compiler()
    return {
        "cpu": bandwidth.cpu(),
        "cores": bandwidth.cpus(),
        "tier": isa.selected(),
        "date": datetime.date.today().isoformat(),
        "fusion_moe": fusion_moe.__version__,
        "torch": torch.__version__,
        "repeats": repeats,
        "pages": what_is_on_large_pages,
        "compiler": compiler.version.splitlines()[0] if compiler else "no compiler",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most-rows", type=int, default=max(ROWS))
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure other packages' products too, where installed (cpu_peers.py)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="write the results here; benchmarks/cpu_products_page.py turns them into the page",
    )
    parser.add_argument(
        "--no-page", action="store_true", help="leave docs/performance/cpu_products.md as it is"
    )
    told = parser.parse_args()
    torch.manual_seed(0)
    pool = pages.empty((2**30,), torch.uint8).fill_(1)
    print(
        f"fusion_moe {fusion_moe.__version__}, torch {torch.__version__}, {bandwidth.cpu()}, "
        f"tier {isa.selected()}"
    )
    print(f"read: {on_large_pages(pool)}")
    found: dict[str, Any] = {"machine": machine(told.repeats, on_large_pages(pool)), "products": []}
    for threads in told.threads:
        torch.set_num_threads(threads)
        memory, clock = bandwidth.of(threads), Clock(threads, told.repeats)
        print(f"reading with {threads} threads: {memory.by}")
        found["products"] += products(clock, memory.read, pool, told.most_rows, told.peers)
    if told.json:
        told.json.write_text(json.dumps(found, indent=1))
    if not told.no_page:
        print(cpu_products_page.write(found))


if __name__ == "__main__":
    main()
