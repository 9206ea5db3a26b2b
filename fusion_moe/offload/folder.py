"""The folder of experts that the host's memory has no room for."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..errors import OptionError

_IN_MEMORY = "tmpfs", "ramfs"


def free(folder: str | Path, where: str) -> int:
    """Bytes that are free in a folder. OptionError if it is none, or one that lies in memory."""
    path = Path(folder)
    why = "" if path.is_dir() else "there is no such folder"
    if not why and _kind(path) in _IN_MEMORY:
        why = f"it is a {_kind(path)}, which lies in memory"
    if not why and not os.access(path, os.W_OK | os.X_OK):
        why = "it is not writable"
    if why:
        raise OptionError(
            f"offload_folder = {str(folder)!r}: {why}",
            expected="a folder on a disk of this machine",
            where=where,
        )
    return shutil.disk_usage(path).free


def _kind(path: Path) -> str:
    """The kind of file system that a path is in; "" where the system is silent."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if number in before.split()[2:3]:
                return after.split()[0]
    return ""
