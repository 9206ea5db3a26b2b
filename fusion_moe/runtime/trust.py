"""Which files and folders code may be loaded from: those that only this user and root can change or
replace.

The functions return a sentence about why not: what was found, what was expected, what to do. It is
empty for trusted ones. OSError for what cannot be examined.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = 0o022  # with access lists, the group's bit stands for everyone named there


def why_not_folder(folder: Path) -> str:
    """Why the contents of a folder are not to be trusted. Its path has no links."""
    if why := why_not(folder):
        return why
    # whoever can write there can replace the folder, unless the sticky bit forbids it
    for place in folder.parents:
        mode = place.lstat().st_mode
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            return f"lies in {place}, which {_can_be_written(place, mode)}"
    return ""


def why_not(path: Path) -> str:
    """Why others may have written what is in a plain file or a folder, wherever it lies."""
    lstat, users = path.lstat(), (0, os.geteuid())
    if not (stat.S_ISREG(lstat.st_mode) or stat.S_ISDIR(lstat.st_mode)):
        return f"is neither a plain file nor a folder (mode {stat.filemode(lstat.st_mode)})"
    if lstat.st_uid not in users:
        expected = " or ".join(map(str, sorted(set(users))))
        return f"belongs to another user ({lstat.st_uid}, expected {expected})"
    return _can_be_written(path, lstat.st_mode) if lstat.st_mode & _OTHERS_WRITE else ""


def _can_be_written(path: Path, mode: int) -> str:
    mode = stat.S_IMODE(mode)
    return (
        f"can be written by other users (mode {mode:o}, expected {mode & ~_OTHERS_WRITE:o}: "
        f"chmod go-w {path})"
    )
