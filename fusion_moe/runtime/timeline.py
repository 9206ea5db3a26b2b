"""Kernels that mark when multiprocessors compute tiles: those that are compiled with the option
cuda_debug=timeline (backends/cuda/kernels/timeline.cuh). recorder/tiles.py reads the marks.
"""

from __future__ import annotations

from typing import Any

from .driver import checked, driver

kernels: list[tuple[str, int]] = []  # those that are loaded: names, and where their marks lie


def add(name: str, library: Any, code: bytes) -> None:
    """Adds a kernel in a loaded library to those whose marks are read, if it makes any."""
    if marks(code):
        address, _ = checked(driver().cuLibraryGetGlobal(library, b"timeline"), name)
        kernels.append((name, int(address)))


def marks(code: bytes) -> bool:
    """Whether machine code marks tiles."""
    return b"\0timeline\0" in code
