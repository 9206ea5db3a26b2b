"""Tensors on large pages, of 2 MiB if the system has them: reading weights then does not wait for
address translation.

    t = empty((128, 1536, 1024), torch.uint8)  # starts at a page; allocated when it is written
    obtained(t)                                # how many of its bytes lie on large pages
    with in_files(folder):                     # what `empty` makes here lies in files instead

If the system takes no advice on pages, and for tensors smaller than a page, `empty` is torch.empty.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...options import during

PAGE = 2**21
_TAKES_ADVICE = hasattr(mmap, "MADV_HUGEPAGE")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) |^AnonHugePages: +(\d+) kB", re.MULTILINE)


@dataclass
class _Files:
    """A folder, and how many bytes of tensors do not go there before all others do."""

    folder: str | Path
    left: int


_files: ContextVar[_Files | None] = ContextVar("fusion_moe_files", default=None)


def in_files(folder: str | Path, after: int = 0) -> contextlib.AbstractContextManager[None]:
    """What `empty` makes in this block after so many bytes lies in files of a folder, each of which
    is reserved whole and has no name, so that nobody shortens it. Such a tensor is shared: child
    processes have the same one, and GPUs do not pin it. OSError for a folder without room.
    """
    return during(_files, _Files(folder, after))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty contiguous CPU tensor with its whole pages large. It owns its memory and no more
    than it needs.
    """
    size = prod(shape) * dtype.itemsize
    if (files := _files.get()) is not None and size >= PAGE:
        files.left -= size
        if files.left < 0:
            return _in_a_file(files.folder, size).view(dtype).view(*shape)
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


def _in_a_file(folder: str | Path, size: int) -> Tensor:
    """u8[size] that starts at a page, as `on_large_pages` asks for."""
    whole = size + PAGE
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, whole)
        name = f"/proc/self/fd/{file.fileno()}"
        memory = torch.from_file(name, shared=True, size=whole, dtype=torch.uint8, device="cpu")
    return memory.narrow(0, -memory.data_ptr() % PAGE, size)


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
