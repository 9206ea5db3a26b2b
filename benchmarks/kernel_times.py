"""Times of the kernels of a call."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def print_kernels(run: Callable[[], object], steps: int = 4) -> None:
    """The medians over some steps, in order, each from the end of the kernel before on."""
    for _ in range(2):
        run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps + 1):
            run()
        torch.cuda.synchronize()
    on = torch.autograd.DeviceType.CUDA
    ran = [e for e in found.events() if e.device_type == on and "fusion_moe::" not in e.name]
    ran.sort(key=lambda e: e.time_range.start)
    each, end, took = len(ran) // (steps + 1), 0.0, list[float]()
    for e in ran:
        took.append(e.time_range.end - max(end, e.time_range.start))
        end = max(end, e.time_range.end)
    for i, e in enumerate(ran[-each:]):
        print(f"{statistics.median(took[each + i :: each]):8.1f} us  {e.name}")
