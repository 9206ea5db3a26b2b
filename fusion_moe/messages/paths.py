"""Paths that a user names: what is wrong with one, by the file system alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError, OptionError

CONFIG, GGUF = "config.json", ".gguf"


def exists(path: Path) -> bool:
    """Whether there is something; False too for names that the system does not take, and where it
    does not let this user look.
    """
    with contextlib.suppress(OSError, ValueError):
        return path.exists()
    return False


def is_gguf(path: Path) -> bool:
    """Whether a path is a file of GGUF, by its name."""
    return path.suffix == GGUF and exists(path) and not path.is_dir()


def check_checkpoint(path: Path) -> None:
    """CheckpointError unless it is a directory with a configuration, or a file of GGUF."""
    if is_gguf(path) or exists(path / CONFIG):
        return
    todo = "name a model on this disk, or download one first: hf download NAME --local-dir DIR"
    if exists(path) and path.is_file():
        actual, todo = "it is a file", f"name its directory, {path.parent}"
    else:
        actual = f"no {CONFIG} in it" if exists(path) else "no such file or directory"
    raise CheckpointError(
        actual,
        expected=f"a directory with {CONFIG} and safetensors, or a file of GGUF",
        todo=todo,
        where=str(path),
    )


def check_writable(path: Path, what: str, ends: Iterable[str]) -> None:
    """OptionError unless something, "a report" for example, can be written to a file of this name:
    with one of the ends, in a folder that is there.
    """
    if not path.name.endswith(tuple(ends)):
        raise OptionError(f"{what} as {path.name}", expected=", ".join(ends), where=str(path))
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise OptionError(
            f"no folder {path.parent} to write to",
            expected="one that is there",
            todo="make it, or name another",
            where=str(path),
        )


def destination(dst: str | Path) -> Path:
    """A path to write a directory as, absolute and without symbolic links. CheckpointError if
    something is there already.
    """
    if "\0" in str(dst):
        raise CheckpointError(f"{str(dst)!r} as a destination", expected="a path without NUL")
    dst = Path(os.path.realpath(dst))
    if os.path.lexists(dst) and (not dst.is_dir() or any(dst.iterdir())):
        raise CheckpointError(
            "the destination exists", expected="a new path, or an empty directory", where=str(dst)
        )
    if os.path.ismount(dst):
        raise CheckpointError(
            "the destination is a mount point",
            expected="a path that a folder can be renamed to",
            todo="name a new folder inside of it",
            where=str(dst),
        )
    return dst


def check_file(path: Path, expected: str, where: str) -> None:
    """OptionError unless it is a file."""
    if not path.is_file():
        raise OptionError(f"no file {path}", expected=expected, where=where)
