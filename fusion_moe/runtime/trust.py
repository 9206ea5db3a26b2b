"""Which files and folders code may be loaded from: those that only this user and root can change or
replace.

The functions return a sentence about why not: what was found, what was expected, what to do. It is
empty for trusted ones.
"""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from . import transient

_OTHERS_WRITE = 0o022  # with access lists, the group's bit stands for everyone named there


def why_not_folder(folder: Path) -> str:
    """Why the contents of a folder are not to be trusted. Its path has no links. OSError if it
    cannot be examined.
    """
    if why := why_not_own(folder):
        return why
    # whoever can write there can replace the folder, unless the sticky bit forbids it
    for place in folder.parents:
        found = place.lstat()
        if why := _why_not(
            place, found, _ourselves() | _unmapped(), sticky=bool(found.st_mode & stat.S_ISVTX)
        ):
            return f"lies in {place}, which {why}"
    return ""


def why_not_own(folder: Path) -> str:
    """Why others may have put something into a folder, wherever it lies. OSError if it cannot be
    examined.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"is not a folder (mode {stat.filemode(found.st_mode)}, expected drwx------)"
    return _why_not(folder, found, _ourselves())


def why_not_file(path: Path) -> str:
    """Why a file in a trusted folder is not to be trusted. OSError if it cannot be examined."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return f"is not a plain file (mode {stat.filemode(found.st_mode)}, expected -rw-------)"
    return _why_not(path, found, _ourselves())


def _why_not(
    path: Path, found: os.stat_result, owners: frozenset[int], sticky: bool = False
) -> str:
    if found.st_uid not in owners:
        return (
            f"belongs to another user ({found.st_uid}, expected "
            f"{' or '.join(map(str, sorted(_ourselves())))})"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS_WRITE and not sticky:
        return (
            f"can be written by other users (mode {mode:o}, expected "
            f"{mode & ~_OTHERS_WRITE:o}: chmod go-w {path})"
        )
    return ""


def _ourselves() -> frozenset[int]:
    return frozenset((0, os.geteuid()))


@cache
def _unmapped() -> frozenset[int]:
    """Who root may be in a container that does not map the system's root: the user that stands for
    all unmapped users.
    """
    with transient.missing_ok("/proc/self/uid_map"):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
            return frozenset((int(Path("/proc/sys/kernel/overflowuid").read_text()),))
    return frozenset()
