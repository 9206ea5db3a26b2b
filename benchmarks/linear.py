"""One NVFP4 matrix on a GPU, as attention, shared experts and dense layers have them, beside
torch's bf16 product of that matrix.

    python benchmarks/linear.py [--rows 1 8 16 ...]

Each time is of a call in a CUDA graph of many, which go round matrices that no cache holds
together; contenders take turns; medians. Our calls are those of
`torch.ops.fusion_moe.nvfp4_grouped_mm` with one group, which NVFP4Linear makes. The floor reads the
NVFP4 matrix at the bandwidth of the data sheet. Results are compared first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial

import torch
from cuda_graphs import capture, medians
from torch import Tensor

from fusion_moe.encodings import NVFP4, dequantize, quantize
from fusion_moe.layouts import W16X64
from fusion_moe.runtime import cuda

SIZES = {  # [N, K]
    "Qwen3-30B-A3B k_proj": (512, 2048),
    "Qwen3-30B-A3B o_proj": (2048, 4096),
    "DeepSeek-V3 shared down": (7168, 2048),
    "DeepSeek-V3 shared gate, up": (4096, 7168),
    "Qwen3-8B down_proj": (4096, 12288),
    "Llama-3-70B down_proj": (8192, 28672),
    "Llama-3-70B gate, up": (57344, 8192),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
COPIES_BYTES, MOST_COPIES, REPEATS = 2e8, 64, 7


def main(given: argparse.Namespace) -> None:
    """Prints a line for each matrix and contender."""
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us, ours, and torch's "
        "over ours"
    )
    print("| [N, K] | floor | " + " | ".join(f"{rows} rows" for rows in given.rows) + " |")
    print("|---" * (2 + len(given.rows)) + "|")
    for name, (n, k) in SIZES.items():
        floor = n * k * 9 / 16 / cuda.arch(torch.cuda.current_device()).memory_bandwidth * 1e6
        cells = [f"{ours:.1f} {torchs / ours:.2f}x" for ours, torchs in measured(n, k, given.rows)]
        print(f"| {name} [{n}, {k}] | {floor:.1f} | {' | '.join(cells)} |", flush=True)


def measured(n: int, k: int, counts: Sequence[int]) -> list[tuple[float, float]]:
    """us of a call of ours and of torch's, for each number of rows."""
    copies = max(2, min(MOST_COPIES, math.ceil(COPIES_BYTES / (n * k * 9 / 16))))
    weights = [
        quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), NVFP4)
        for _ in range(copies)
    ]
    packed = [
        (*W16X64.pack(w[0][None].clone(), w[1][None].clone(), encoding=NVFP4), w[2].reshape(1))
        for w in weights
    ]
    matrices = [dequantize(w).bfloat16() for w in weights]
    return [
        _of_rows(packed, matrices, torch.randn(rows, k, device="cuda", dtype=torch.bfloat16))
        for rows in counts
    ]


def _of_rows(
    packed: Sequence[tuple[Tensor, ...]], matrices: Sequence[Tensor], x: Tensor
) -> tuple[float, float]:
    offs = torch.tensor([len(x)], dtype=torch.int32, device="cuda")

    def ours(i: int) -> Tensor:
        return torch.ops.fusion_moe.nvfp4_grouped_mm(x, *packed[i], offs, weight_layout="w16x64")

    def torchs(i: int) -> Tensor:
        return x @ matrices[i].T

    error = (ours(0).float() - torchs(0).float()).norm() / torchs(0).float().norm()
    if not error < 1e-2:
        raise SystemExit(
            f"{len(x)} rows of {list(matrices[0].shape)}: results differ by {error:.1e}"
        )
    graphs = {
        call.__name__: capture([partial(call, i) for i in range(len(packed))])
        for call in (ours, torchs)
    }
    times = medians(graphs, REPEATS)
    return times["ours"], times["torchs"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    main(parser.parse_args())
