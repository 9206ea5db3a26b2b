"""Files on disk that are made once: found by a key of everything that they were made from, and
never seen incomplete.

    key = key_of(text, *flags) + ".so"
    path = get_or_make(key, make)       # make(path) writes the file if the store has no complete
                                        one

What makes it safe:
- A file is made in a temporary folder of its own and renamed into place, so no reader sees a part
  of it, and a killed process leaves only that folder. The next process to make a file removes it:
  if nobody holds the lock of its file, its maker is dead. No clock is used.
- Beside each file lies a digest of its key and content. A file that is damaged, truncated by a
  power cut, or that belongs to another key is made again.
- Whoever makes a file holds a lock (flock, which the system releases when its holder dies); others
  wait for it. If a file system has no locks, all make the file, and all results are right.
- Code is loaded from here, so nobody else may be able to write to the folder, to replace it, or to
  write to a file in it (trust.py). An unsafe folder is not used, an unsafe file is made again, and
  a warning says so. New files are private to this user, whatever the umask.

The folder is the option cache_dir; if it cannot be used, a temporary folder is used instead, and a
warning says so once.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from .. import options
from ..errors import BuildError
from ..messages.progress import saying_after
from ..messages.warn import warn_once
from . import transient, trust

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATIENCE = 10.0  # seconds of waiting for a lock before it is said for whom


def key_of(*parts: str | bytes) -> str:
    """A name that these parts determine, in this order: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
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
    _sweep(path.parent)
    with _locked(_lock_path(path)):
        if not _is_whole(path):
            _make(path, make)
    return path


def has(key: str) -> bool:
    """Whether `get_or_make` would find the file with this key, without making anything."""
    wanted = _wanted()
    return not _why_unsafe(wanted) and _is_whole(wanted / key)


def forget(path: Path) -> None:
    """Removes a file that turned out to be of no use, if `get_or_make` returned it; the next call
    makes it again.
    """
    if _digest_path(path).exists():
        for file in (path, _digest_path(path)):
            with contextlib.suppress(OSError):
                file.unlink()


def folder() -> Path:
    """The folder for new files: cache_dir, or a temporary one if that is unusable. OSError if there
    is none.
    """
    wanted = _wanted()
    why = _why_unusable(wanted)
    if not why:
        return wanted
    shared = Path(os.path.realpath(tempfile.gettempdir()), f"fusion_moe-{os.geteuid()}")
    chosen = _private_folder(os.getpid()) if _why_unusable(shared) else shared
    if why_not := _why_unusable(chosen):
        raise OSError(f"cache_dir {wanted} {why}, and the temporary folder {chosen} {why_not}")
    warn_once(
        f"cache_dir {wanted} {why}; using {chosen} for compiled kernels; set "
        "FUSION_MOE_CACHE_DIR to another folder"
    )
    return chosen


def why_unusable() -> str:
    """Why new files do not go to cache_dir, which is created if missing; "" if they do."""
    return _why_unusable(_wanted())


@contextlib.contextmanager
def as_build_error(where: str) -> Iterator[None]:
    """Turns the system's errors, where a kernel is written, into a BuildError."""
    try:
        yield
    except OSError as e:
        todo = (
            f"{'free some space, or ' if e.errno in _FULL else ''}set FUSION_MOE_CACHE_DIR to "
            "another folder"
        )
        todo = transient.TODO if e.errno in transient.ERRNOS else todo
        raise BuildError(
            f"the compiled kernel could not be written: {e}", todo=todo, where=where
        ) from e


# One file -----------------------------------------------------------------------------------------


def _make(path: Path, make: Callable[[Path], object]) -> None:
    prefix, suffix = f"{path.name}-", ".tmp"  # `_sweep` parses the name
    with tempfile.TemporaryDirectory(
        prefix=prefix, suffix=suffix, dir=path.parent, ignore_cleanup_errors=True
    ) as scratch:
        _set_mode(Path(scratch), 0o700)
        made, digest = Path(scratch, path.name), Path(scratch, "digest")
        make(made)
        _set_mode(made, 0o600)
        digest.write_bytes(_digest(path.name, made.read_bytes()))
        _set_mode(digest, 0o600)
        made.replace(path)  # no fsync: after a power cut, the digest does not match
        digest.replace(_digest_path(path))


def _is_whole(path: Path) -> bool:
    """Whether the file exists, is complete, and cannot be changed by anybody else."""
    content, digest = _trusted(path), _trusted(_digest_path(path))
    return content is not None and digest == _digest(path.name, content)


def _trusted(path: Path) -> bytes | None:
    """The content of a file in a trusted folder; None if there is none, or somebody else may have
    written it.
    """
    try:
        if why := trust.why_not_file(path):
            warn_once(f"{path} {why}; rebuilding it")
            return None
        return path.read_bytes()
    except OSError:
        return None


def _digest(key: str, content: bytes) -> bytes:
    return key_of(key, content).encode()


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _set_mode(path: Path, mode: int) -> None:
    """Sets the mode, whatever the umask has made of it."""
    # a file system without modes: the mode that it shows is checked
    with contextlib.suppress(OSError):
        path.chmod(mode)


# Locks --------------------------------------------------------------------------------------------


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a lock against other processes and threads, until the block or the process ends. Yields
    whether it holds it.

    wait: whether to wait while another holds it. If a file system has no locks, nobody holds one.
    """
    import fcntl  # imported here, since Windows does not have it

    file = _open_lock(path)
    try:
        yield _took(file, path, wait)
    finally:
        with contextlib.suppress(OSError):
            # closing is not enough if the process forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _took(file: int, path: Path, wait: bool) -> bool:
    """Takes a lock, and writes into its file who has it. Returns whether it did."""
    import fcntl

    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                return False
            with saying_after(
                _PATIENCE,
                lambda: (
                    f"waiting for {_holder(file)}, which makes {path.stem}; end it if it is stopped"
                ),
            ):
                fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    return True


def _holder(file: int) -> str:
    return os.pread(file, 200, 0).decode(errors="replace") or "another process"


def _open_lock(path: Path) -> int:
    """Opens a lock file. A file that somebody else put there, who might hold its lock forever, is
    replaced.
    """
    with contextlib.suppress(FileNotFoundError):
        if why := trust.why_not_file(path):
            warn_once(f"{path} {why}; rebuilding it")
            path.unlink()
    # not readable by others either: anyone who can open it can lock it
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _set_mode(path, 0o600)
    return file


def _sweep(folder: Path) -> None:
    """Removes what killed processes left: a living one holds the lock of the file that it makes."""
    for left in folder.glob("*.tmp"):
        lock = _lock_path(folder / left.name.rpartition("-")[0])
        if lock.exists():
            with contextlib.suppress(OSError), _locked(lock, wait=False) as held:
                if held:
                    shutil.rmtree(left, ignore_errors=True)


# The folder ---------------------------------------------------------------------------------------


def _wanted() -> Path:
    """cache_dir with links resolved: the folder that is checked is the one that is used, wherever a
    link points later.
    """
    return Path(os.path.realpath(Path(options.current().cache_dir).expanduser()))


def _why_unusable(folder: Path) -> str:
    """Why files must not be written to a folder, which is created if missing; empty if they can
    be.
    """
    try:
        _make_folder(folder)
    except OSError as e:
        return f"cannot be created ({e.strerror})"
    return _why_unsafe(folder) or (
        "" if os.access(folder, os.W_OK | os.X_OK) else "cannot be written"
    )


def _make_folder(folder: Path) -> None:
    """Creates the folder and its parents with the right modes, which mkdir would leave to the
    umask.
    """
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        _set_mode(folder, 0o700)
    except FileExistsError:
        if not folder.is_dir():  # another process may have created it meanwhile
            raise


def _why_unsafe(folder: Path) -> str:
    """Why code must not be loaded from a folder."""
    try:
        return trust.why_not_folder(folder)
    except OSError as e:
        return f"cannot be accessed ({e.strerror})"


@cache
def _private_folder(process: int) -> Path:
    """A temporary folder that only this process uses."""
    made = os.path.realpath(tempfile.mkdtemp(prefix="fusion_moe-"))
    atexit.register(
        lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == process else None
    )
    return Path(made)
