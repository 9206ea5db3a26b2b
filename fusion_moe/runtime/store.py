"""Files on disk that are made once: found by a key that says all that they were made from, and never seen half made.

    key = key_of(text, *flags) + ".so"
    path = get_or_make(key, make)          # make(path) writes the file, if the store has none that is whole

What makes it safe:
- A file is made in a folder of its own and renamed into place, so no reader sees a part of it, and a killed maker leaves nothing but
  that folder, which is swept later.
- Beside each file lies a digest of its key and content. A file that is damaged, was cut short by a power cut or belongs under another
  key is made again.
- A maker holds a lock (flock, which the system releases when its holder dies), the others wait for it. Where a file system has
  no locks, all make the file, and all are right.
- Code is loaded from here, so the folder must be one that nobody else can write to.

The folder is the option cache_dir; if it cannot be used, a temporary one is, and a warning says so once.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from .. import options

log = logging.getLogger("fusion_moe")
_STALE_SECONDS = 3600.0


def key_of(*parts: str | bytes) -> str:
    """A name for what these parts determine, in order: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def get_or_make(key: str, make: Callable[[Path], None]) -> Path:
    """The file of this key, a plain file name; `make(path)` writes it where there is none.

    make: may leave other files beside `path`, they are removed; what it raises is raised here and leaves no file.
    OSError where a folder is full or the system has no folder to write to.
    """
    wanted = Path(options.current().cache_dir).expanduser().absolute()
    if _is_whole(wanted / key) and not _why_unsafe(wanted):
        return wanted / key
    path = folder() / key
    with _locked(path.with_name(f"{key}.lock")):
        if not _is_whole(path):
            _make(path, make)
    return path


def folder() -> Path:
    """The folder that new files are written to: cache_dir, or a temporary one if that is of no use."""
    wanted = Path(options.current().cache_dir).expanduser().absolute()
    why = _why_unusable(wanted)
    if not why:
        return wanted
    shared = Path(tempfile.gettempdir(), f"fusion_moe-{os.geteuid()}")
    chosen = _private_folder(os.getpid()) if _why_unusable(shared) else shared
    _say_once(f"cache_dir {wanted} {why}; compiled kernels are kept in {chosen}; FUSION_MOE_CACHE_DIR names another folder")
    return chosen


# One file -----------------------------------------------------------------------------------------------------------


def _make(path: Path, make: Callable[[Path], None]) -> None:
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True) as scratch:
        made, digest = Path(scratch, path.name), Path(scratch, "digest")
        make(made)
        digest.write_bytes(_digest(path.name, made.read_bytes()))
        made.replace(path)  # no fsync: what a power cut leaves has the wrong digest
        digest.replace(_digest_path(path))


def _is_whole(path: Path) -> bool:
    """Whether the file is there, as it was made, and ours."""
    try:
        with path.open("rb") as file:
            ours = os.fstat(file.fileno()).st_uid in (0, os.geteuid())
            return ours and _digest_path(path).read_bytes() == _digest(path.name, file.read())
    except OSError:
        return False


def _digest(key: str, content: bytes) -> bytes:
    return key_of(key, content).encode()


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file against other processes and threads, until the block or the process ends."""
    import fcntl  # here, since Windows has none

    with path.open("ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough if the process forked meanwhile


def _sweep(folder: Path) -> None:
    """Removes what killed makers left long ago."""
    for left in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


# The folder ---------------------------------------------------------------------------------------------------------


def _why_unusable(folder: Path) -> str:
    """Why files are not to be written to a folder, which is made if it is not there; empty if they can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        return f"cannot be made ({e.strerror})"
    return _why_unsafe(folder) or ("" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written")


def _why_unsafe(folder: Path) -> str:
    """Why code is not to be loaded from a folder; empty if nobody but this user and root can change what is in it."""
    found = folder.stat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({found.st_uid})"
    if found.st_mode & 0o022:
        return f"can be written by other users (mode {found.st_mode & 0o777:o}; chmod 700 would do)"
    return ""


@cache
def _private_folder(process: int) -> Path:
    """A temporary folder of this process alone."""
    made = tempfile.mkdtemp(prefix="fusion_moe-")
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == process else None)
    return Path(made)


@cache
def _say_once(text: str) -> None:
    log.warning(text)
