"""Tensors on large pages, of 2 MiB where the system has them: reading weights then does not wait for address translation.

    t = empty((128, 1536, 1024), torch.uint8)      # starts at a page; pages come when it is written
    obtained(t)                                    # bytes of it that lie on large pages

Where the system takes no advice on pages, and for what is smaller than one, `empty` is torch.empty.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2**21
_TAKES_ADVICE = hasattr(mmap, "MADV_HUGEPAGE")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) |^AnonHugePages: +(\d+) kB", re.MULTILINE)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty contiguous tensor on the CPU, its whole pages large. It owns its memory and no more than it needs."""
    size = prod(shape) * dtype.itemsize
    if size >= PAGE and _TAKES_ADVICE:
        with contextlib.suppress(OSError):  # no such kernel, or no memory: torch says that better
            return _mapped(size).view(dtype).view(*shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def takes(t: Tensor) -> bool:
    """Whether a copy of a tensor may be made by `empty`: it is on the CPU, and neither fake nor of a class of its own."""
    return t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)


def on_large_pages(t: Tensor) -> Tensor:
    """t, contiguous: itself where it starts at a page, is small or is not taken; else a copy made by `empty`."""
    if not takes(t) or t.nbytes < PAGE or (t.is_contiguous() and t.data_ptr() % PAGE == 0):
        return t.contiguous()
    return empty(t.shape, t.dtype).copy_(t)


def obtained(*tensors: Tensor) -> int:
    """How many bytes of tensors on the CPU lie on large pages now; 0 where the system does not report it.

    It tells of mappings: where one holds other memory too, these tensors are taken to have its large pages.
    """
    wanted = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    inside = ((sum(max(0, min(b, end) - max(a, start)) for a, b in wanted), large) for start, end, large in _mappings())
    return sum(min(both) for both in inside)


def _mapped(size: int) -> Tensor:
    """u8[size] that starts at a page. The advice is for whole pages: the rest must not take one."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # given back with the tensor that holds it
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, size // PAGE * PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _mappings() -> Iterator[tuple[int, int, int]]:
    """(first address, address after the last, bytes on large pages) of what this process has mapped."""
    start = end = 0
    with contextlib.suppress(OSError):
        for line in _MAPPING.finditer(Path("/proc/self/smaps").read_text(errors="replace")):
            if line[3] is None:
                start, end = int(line[1], 16), int(line[2], 16)
            elif line[3] != "0":
                yield start, end, int(line[3]) * 1024
