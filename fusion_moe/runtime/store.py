"""Files on disk that are made once: found by a key of everything that they were made from, and
never seen incomplete.

    key = key_of(text, *flags) + ".so"
    path = get_or_make(key, make)       # make(path) writes the file if the store has none

What makes it safe:
- A file is made in a temporary folder of its own, synchronized with the disk, and renamed into
  place, so no reader sees a part of it, and a killed process leaves only that folder. The next one
  to make the file removes it. No clock is used.
- Whoever makes a file holds a lock (flock, which the system releases when its holder dies); others
  wait for it. If a file system has no locks, all make the file, and all results are right.
- The lock's file says how long the file is. One that was cut since, by a bad disk or by hand, is
  made again: loading it would end the process.
- Code is loaded from here, so nobody else may be able to write to the folder, to replace it, or to
  write to a file in it (trust.py). An unsafe folder is not used, an unsafe file is made again, and
  a warning says so. New files are private to this user, whatever the umask.

The folder is the option cache_dir; if it cannot be used, a temporary folder is used instead, and a
warning says so once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import options
from ..errors import BuildError
from ..messages import warn_once
from . import trust


def key_of(*parts: str | bytes | memoryview) -> str:
    """A name that these parts determine, in this order: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)  # which may be large: no copy
    return digest.hexdigest()


def get_or_make(key: str, make: Callable[[Path], object]) -> Path:
    """The file with this key, a plain file name; `make(path)` writes it if there is none.

    make: may leave other files beside `path`, which are removed. If it raises, the error is raised
    here and no file is left. OSError if the disk is full or the system has no folder to write to;
    `as_build_error` turns it into a BuildError.
    """
    if has(key):
        return _wanted() / key
    path = folder() / key
    lock = path.with_name(f"{key}.lock")
    with _locked(lock) as held:
        if not _is_safe(path):
            for left in path.parent.glob(f"{key}-*.tmp") if held else ():  # of a killed process
                shutil.rmtree(left, ignore_errors=True)
            with whole(path) as result:
                make(result)
                with contextlib.suppress(PermissionError):  # a file system without modes
                    result.chmod(0o600)
                with result.open("rb") as file:
                    os.fsync(file.fileno())
                lock.write_text(str(result.stat().st_size))
    return path


def has(key: str) -> bool:
    """Whether `get_or_make` would find the file with this key, without making anything."""
    wanted = _wanted()
    return not _why_unsafe(wanted) and _is_safe(wanted / key)


def folder() -> Path:
    """The folder for new files: cache_dir, or a temporary one if that is unusable. OSError if there
    is none.
    """
    wanted = _wanted()
    why = why_unusable(wanted)
    if not why:
        return wanted
    other = Path(os.path.realpath(tempfile.gettempdir()), f"fusion_moe-{os.geteuid()}")
    if why_not := why_unusable(other):
        raise OSError(f"cache_dir {wanted} {why}, and the temporary folder {other} {why_not}")
    warn_once(
        f"cache_dir {wanted} {why}; using {other} for compiled kernels; set "
        "FUSION_MOE_CACHE_DIR to another folder"
    )
    return other


@contextlib.contextmanager
def as_build_error(where: str) -> Iterator[None]:
    """Turns the system's errors, where a kernel is written, into a BuildError."""
    try:
        yield
    except OSError as e:
        full = "free some space, or " if e.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise BuildError(
            f"the compiled kernel could not be written: {e}",
            todo=f"{full}set FUSION_MOE_CACHE_DIR to another folder",
            where=where,
        ) from e


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path to write a file to, which takes its place at `path` after the block: whole, or
    not at all after an error. What was written beside it is removed.
    """
    with tempfile.TemporaryDirectory(
        prefix=f"{path.name}-", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
    ) as scratch:
        result = Path(scratch, path.name)
        yield result
        result.replace(path)


def _is_safe(path: Path) -> bool:
    """Whether there is a file that nobody else can have written, as long as it was made."""
    try:
        why = trust.why_not(path) or _why_cut(path)
    except OSError:
        return False
    if why:
        warn_once(f"{path} {why}; rebuilding it")
    return not why


def _why_cut(path: Path) -> str:
    """Why a file is not what was made; "" where nobody noted how long that was."""
    size, lock = str(path.stat().st_size), path.with_name(f"{path.name}.lock")
    made = lock.read_text(errors="replace") if lock.exists() else ""
    return f"has {size} bytes, not {made} as when it was made" if made not in ("", size) else ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock against other processes and threads, until the block or the process ends. Yields
    whether it holds it: nobody does where a file system has no locks.
    """
    import fcntl  # imported here, since Windows does not have it

    # not readable by others: anyone who can open it can lock it
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        held = False
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        yield held
    finally:
        with contextlib.suppress(OSError):
            # closing is not enough if the process forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _wanted() -> Path:
    """cache_dir with links resolved: the folder that is checked is the one that is used, wherever a
    link points later.
    """
    return Path(os.path.realpath(Path(options.current().cache_dir).expanduser()))


def why_unusable(where: Path | None = None) -> str:
    """Why files must not be written to a folder, by default cache_dir, which is created if missing;
    "" if they can be.
    """
    folder = where or _wanted()
    try:
        for place in (*reversed(folder.parents), folder):
            if not place.is_dir():
                place.mkdir(mode=0o700, exist_ok=True)  # another process may create it meanwhile
    except OSError as e:
        return f"cannot be created ({e.strerror})"
    return _why_unsafe(folder) or (
        "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written"
    )


def _why_unsafe(folder: Path) -> str:
    """Why code must not be loaded from a folder."""
    try:
        return trust.why_not_folder(folder)
    except OSError as e:
        return f"cannot be accessed ({e.strerror})"
