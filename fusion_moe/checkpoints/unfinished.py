"""Folders of directories that are being written: `.DST.xxxxxxxx.partial` beside DST, each locked by
the process that writes it. What a killed one leaves is gone on from, or removed.

    .DST.xxxxxxxx.partial/files/           what becomes DST
    .DST.xxxxxxxx.partial/lock             held with flock, which the system releases
    .DST.xxxxxxxx.partial/manifest.json    the job, and each finished file: bytes, mtime, inode
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FILES, _LOCK, _MANIFEST = "files", "lock", "manifest.json"


class Unfinished:
    """One that this process writes. lock: its descriptor; None where a file system has no locks.
    finished: what is whole of a job that another process began.
    """

    def __init__(self, path: Path, lock: int | None, job: str):
        self.path, self.files, self._lock, self._job = path, path / _FILES, lock, job
        self.finished = {name: facts for name, facts in self._noted() if self._facts(name) == facts}

    def note(self, name: str) -> None:
        """Notes that a file is whole, and synced to disk."""
        self.finished[name] = self._facts(name)
        text = json.dumps({"job": self._job, "files": self.finished})
        replacing = self.path / f"{_MANIFEST}.new"
        replacing.write_text(text)
        sync(replacing)
        replacing.replace(self.path / _MANIFEST)
        sync(self.path)

    def remove(self) -> None:
        """Removes the folder, and what is still in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _noted(self) -> Iterator[tuple[str, list[int]]]:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            manifest = json.loads((self.path / _MANIFEST).read_text())
            if self._job and manifest["job"] == self._job:
                yield from manifest["files"].items()

    def _facts(self, name: str) -> list[int]:
        try:
            lstat = (self.files / name).lstat()
        except OSError:
            return []
        return [lstat.st_size, lstat.st_mtime_ns, lstat.st_ino]


def begin(dst: Path, job: str) -> Unfinished:
    """A folder for the files of dst: one in which a process that has ended left finished files of
    the same job, else a new one. Others that such processes left for dst are removed.

    job: text that determines all bytes; "": nothing is gone on from.
    """
    kept: Unfinished | None = None
    for path in _left(dst):
        if (lock := _locked(path)) is None:
            continue
        one = Unfinished(path, lock, job)
        if kept is None and one.finished:
            kept = one
        else:
            one.remove()
    if kept is None:
        return _new(dst, job)
    for file in kept.files.iterdir():  # which it was writing
        if file.name not in kept.finished:
            file.unlink()
    return kept


def _left(dst: Path) -> Iterator[Path]:
    """Folders of dst that this user's processes write, or wrote."""
    name = re.compile(rf"\.{re.escape(dst.name)}\.\w{{8}}\.partial")
    for path in sorted(dst.parent.iterdir()):
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            if (path / _LOCK).exists():
                if path.stat().st_uid == os.getuid():
                    yield path
            else:
                with contextlib.suppress(OSError):  # killed before it had a lock: it is empty
                    path.rmdir()


def _new(dst: Path, job: str) -> Unfinished:
    while True:
        path = Path(tempfile.mkdtemp(".partial", f".{dst.name}.", dst.parent))
        try:
            (path / _LOCK).touch(mode=0o600)
            (path / _FILES).mkdir()
        except FileNotFoundError:  # another process took it for one that was left
            continue
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        lock = _locked(path)
        if lock is None:  # no locks here: nobody may take it
            (path / _LOCK).unlink(missing_ok=True)
        return Unfinished(path, lock, job)


def _locked(path: Path) -> int | None:
    """The descriptor of a folder's lock, which this process then holds; None if another one does,
    or has removed it.
    """
    import fcntl  # imported here, since Windows does not have it

    lock = None
    with contextlib.suppress(OSError):
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), (path / _LOCK).lstat()):
            return lock
    if lock is not None:
        os.close(lock)
    return None


def sync(path: Path) -> None:
    """Syncs a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
