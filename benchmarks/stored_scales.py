"""Products of NVFP4 weights whose block scales are stored swizzled beside those of the linear
layout: `f16a_nvfp4weight_scaled_grouped_mm` and `nvfp4_grouped_mm` of the same numbers. With
--frozen: a module of the former, compiled while Inductor freezes weights, beside `nvfp4_grouped_mm`
of weights as `prepare_` stores them.

    python benchmarks/stored_scales.py [--device cpu|cuda] [--threads N] [--repeats N]
    python benchmarks/stored_scales.py --frozen --rows 8192

Both take turns: the median of `repeats` calls, and half of what lies between the quartiles. All
experts have the same numbers. On a GPU a call is an eighth of a CUDA graph of eight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._inductor import config

import fusion_moe
from fusion_moe.backends import TARGETS
from fusion_moe.encodings import NVFP4
from fusion_moe.layouts import LAYOUTS, SF128X4

# experts, out- and in-features
SIZES = {
    "8 small experts": (8, 512, 512),
    "Qwen3-30B's gate and up": (128, 1536, 2048),
    "an expert of DeepSeek-V3": (1, 4096, 7168),
}
ROWS, IN_GRAPH = (1, 8, 64, 512), 8
ops = torch.ops.fusion_moe


class Product(nn.Module):
    """The operation with swizzled scales, as a module that has the weight."""

    def __init__(self, *weight: Tensor):
        super().__init__()
        for name, t in zip(("codes", "scale", "factor"), weight, strict=True):
            self.register_buffer(name, t)

    def forward(self, x: Tensor, *groups: Tensor) -> Tensor:
        return ops.f16a_nvfp4weight_scaled_grouped_mm(
            x, self.codes, self.scale, self.factor, *groups
        )


def calls(
    experts: int, n: int, k: int, rows: int, device: str, frozen: bool = False
) -> list[Callable[[], Tensor]]:
    """The operation with swizzled scales, and the one with linear ones; frozen: of constants, and
    with weights as `prepare_` stores them.
    """
    g = torch.Generator().manual_seed(0)
    codes, scale, decode = fusion_moe.ops.nvfp4_quantize(
        torch.randn(1, n, k, generator=g).bfloat16()
    )
    codes, scale = (t.expand(experts, *t.shape[1:]).to(device) for t in (codes, scale))
    codes, scale, decode = codes.contiguous(), scale.contiguous(), decode.expand(experts).to(device)
    sizes = torch.bincount(torch.arange(rows) * experts // rows % experts, minlength=experts).int()
    ends, padded = sizes.cumsum(0).int(), (sizes + 127) // 128 * 128
    starts, padded_starts = ends - sizes, (padded.cumsum(0) - padded).int()
    problem = torch.stack([sizes, torch.full_like(sizes, n), torch.full_like(sizes, k)], 1)
    x = torch.randn(rows, k, generator=g).bfloat16().to(device)
    fp4, decode = codes.view(torch.float4_e2m1fn_x2).transpose(1, 2), decode.float().contiguous()
    swizzled = SF128X4.forward(scale)
    of = [t.to(device) for t in (starts, padded_starts, problem)]
    ends = ends.to(device)
    if frozen:
        layout = LAYOUTS[TARGETS[device].layout_of(NVFP4.name, "bf16")]
        parts = layout.pack(codes, scale, decode, encoding=NVFP4)
        torch._dynamo.reset()
        product = torch.compile(Product(fp4, swizzled, decode), backend="fusion_moe")
        with config.patch(freezing=True), torch.no_grad():
            product(x, *of)
        return [
            lambda: product(x, *of),
            lambda: ops.nvfp4_grouped_mm(x, *parts, ends, weight_layout=layout.name),
        ]
    return [
        lambda: ops.f16a_nvfp4weight_scaled_grouped_mm(x, fp4, swizzled, decode, *of),
        lambda: ops.nvfp4_grouped_mm(x, codes, scale, decode, ends),
    ]


def replays(call: Callable[[], Tensor]) -> Callable[[], None]:
    """IN_GRAPH calls in a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    return graph.replay


def microseconds(calls: list[Callable[[], object]], repeats: int, device: str) -> list[list[float]]:
    """Of each call, sorted."""
    found: list[list[float]] = [[] for _ in calls]
    for i in range(-2, repeats):
        for call, times in zip(calls, found, strict=True):
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= 0:
                times.append((time.perf_counter() - start) * 1e6)
    return [sorted(times) for times in found]


def main() -> None:
    """Prints a row for each size and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--frozen", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    one, other = ("frozen", "prepared") if asked.frozen else ("swizzled", "linear")
    print(f"| weights | rows | {one}, us | {other}, us | {one} / {other} |")
    print("|---|---:|---:|---:|---:|")
    for name, size in SIZES.items():
        for rows in asked.rows:
            with torch.no_grad():
                both = calls(*size, rows, asked.device, asked.frozen)
                found, want = (call() for call in both)
                assert torch.equal(found, want), (name, rows)
                timed = list(map(replays, both)) if asked.device == "cuda" else both
                each = IN_GRAPH if asked.device == "cuda" else 1
                times = microseconds(timed, asked.repeats, asked.device)
            medians = [statistics.median(t) / each for t in times]
            spreads = [(t[3 * len(t) // 4] - t[len(t) // 4]) / 2 / each for t in times]
            cells = [f"{m:.1f} +- {s:.1f}" for m, s in zip(medians, spreads, strict=True)]
            print(
                f"| {name} | {rows} | {' | '.join(cells)} | {medians[0] / medians[1]:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
