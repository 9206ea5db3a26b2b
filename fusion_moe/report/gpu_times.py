"""Times of calls on a GPU, measured with CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ..runtime import cuda

# cycles that the GPU waits, so that a call is queued before the first event passes
_QUEUED = 1_000_000


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The time of one call, between two events, with none of its inputs in the L2 cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    with torch.cuda.device(device):
        _other_memory(cuda.index_of(device)).zero_()
        torch.cuda._sleep(_QUEUED)
        start.record()
        call()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def bytes_per_second(device: torch.device) -> float:
    """The memory bandwidth of a GPU, as specified."""
    return cuda.arch(cuda.index_of(device)).memory_bandwidth


def name(device: torch.device) -> str:
    """The name of a GPU."""
    return torch.cuda.get_device_name(device)


@cache
def _other_memory(index: int) -> torch.Tensor:
    """u8: a buffer four times the size of the L2 cache."""
    return torch.empty(
        4 * cuda.arch(index).l2_bytes, dtype=torch.uint8, device=torch.device("cuda", index)
    )
