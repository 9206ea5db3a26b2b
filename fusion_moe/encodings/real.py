"""Tensors with memory, whatever traces the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def real_tensors() -> Iterator[None]:
    """Inside, tensors have memory, on the CPU: for what is computed once and kept, whether the
    first call that needs it runs or is traced. torch's default dtype stays.
    """
    autocast = torch.autocast("cpu", enabled=False)
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad(), autocast:
        yield
