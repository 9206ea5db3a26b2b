"""Tensors on large pages, of 2 MiB if the system has them: reading weights then does not wait for
address translation.

    t = empty((128, 1536, 1024), torch.uint8)  # starts at a page; allocated when it is written
    obtained(t)                                # how many of its bytes lie on large pages

If the system takes no advice on pages, and for tensors smaller than a page, `empty` is torch.empty.
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
    """An empty contiguous CPU tensor with its whole pages large. It owns its memory and no more
    than it needs.
    """
    size = prod(shape) * dtype.itemsize
    if size >= PAGE and _TAKES_ADVICE:
        # unsupported by the kernel, or out of memory: torch reports that better
        with contextlib.suppress(OSError):
            return _mapped(size).view(dtype).view(*shape)
    return torch.empty(shape, dtype=dtype, device="cpu")


def takes(t: Tensor) -> bool:
    """Whether `empty` may make a copy of a tensor: it is on the CPU, and neither fake nor of a
    tensor subclass.
    """
    return t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)


def on_large_pages(t: Tensor) -> Tensor:
    """t, contiguous: unchanged if it is where `empty` would put it, is small, or cannot be taken;
    otherwise a copy made by `empty`.
    """
    if not takes(t) or t.nbytes < PAGE or (t.is_contiguous() and t.data_ptr() % PAGE == 0):
        return t.contiguous()
    return empty(t.shape, t.dtype).copy_(t)


def obtained(*tensors: Tensor) -> int:
    """How many bytes of CPU tensors lie on large pages now; 0 if the system does not report it.

    The system reports mappings: if a mapping holds other memory too, its large pages are attributed
    to these tensors.
    """
    wanted = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
    inside = (
        (sum(max(0, min(b, end) - max(a, start)) for a, b in wanted), large)
        for start, end, large in _mappings()
    )
    return sum(min(both) for both in inside)


def _mapped(size: int) -> Tensor:
    """u8[size] that starts at a page. The advice covers whole pages, so that the rest does not take
    a large one.
    """
    # freed with the tensor that holds it
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    start = -address % PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, size // PAGE * PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _mappings() -> Iterator[tuple[int, int, int]]:
    """(first address, address after the last, bytes on large pages) of the mappings of this
    process.
    """
    start = end = 0
    with contextlib.suppress(OSError):
        for line in _MAPPING.finditer(Path("/proc/self/smaps").read_text(errors="replace")):
            if line[3] is None:
                start, end = int(line[1], 16), int(line[2], 16)
            elif line[3] != "0":
                yield start, end, int(line[3]) * 1024
