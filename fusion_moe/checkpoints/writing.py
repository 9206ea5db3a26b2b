"""Writes a directory that appears whole or not at all: until its files are synced to disk and
checked, they lie beside it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..messages.progress import progress
from ..messages.units import amount
from .directory import CONFIG, INDEX, OLDER_CONFIG, SINGLE, Directory
from .headers import Entry
from .shard import Step, write_shard

SHARD_BYTES = 5 * 10**9
SPARE_BYTES = 64 * 2**20  # of free space to leave: for tokenizers and similar files
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "free some space and run it again"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


Configs = tuple[Mapping[str, Any], Mapping[str, Any] | None]


def write(
    dst: str | Path,
    source: Directory,
    steps: Sequence[Step],
    configs: Configs,
    *,
    shard_bytes: int = SHARD_BYTES,
    check: Callable[[Directory], object],
    dry_run: Callable[[Directory], object] | None = None,
) -> Path:
    """Writes the results of steps as the directory dst, with configurations, an index, and the
    source's other files (tokenizer and so on), but for hidden ones, other weights, and what lies in
    folders.

    configs: for config.json, and for hf_quant_config.json if there is to be one. check: called with
    the Directory before it gets its name; if it raises, there is no dst. dry_run: called with the
    Directory that there would be, and nothing is written. CheckpointError if dst exists already, is
    a mount point, or the disk is full; whatever is raised, nothing has dst's name. Returns dst,
    absolute and without symbolic links.
    """
    dst = destination(dst)
    copied = _to_copy(source)
    shards = _shards(steps, shard_bytes)
    needed = sum(step.nbytes for step in steps) + sum(file.stat().st_size for file in copied)
    needed += SPARE_BYTES
    if dry_run is not None:
        if room := _too_small(next(p for p in dst.parents if p.exists()), needed):
            raise CheckpointError(room, todo=_MAKE_ROOM, where=str(dst))
        dry_run(_planned(dst, configs, shards))
        return dst
    with appearing(dst, needed) as files:
        for name, its in progress(shards.items(), f"writing files of {dst.name}", len(shards)):
            write_shard(files / name, its)
        for other in copied:
            shutil.copyfile(other, files / other.name)
            sync(files / other.name)
        texts = zip((CONFIG, OLDER_CONFIG, INDEX), (*configs, _index(shards)), strict=True)
        for name, value in texts:
            if value is not None:
                write_json(files / name, value)
        check(Directory.open(files))
    return dst


def _planned(dst: Path, configs: Configs, shards: Mapping[str, Sequence[Step]]) -> Directory:
    """What `Directory.open(dst)` would be."""
    tensors = (
        Entry(p.name, p.dtype, p.shape, dst / file)
        for file, steps in shards.items()
        for step in steps
        for p in step.planned
    )
    return Directory(dst, configs[0], {tensor.name: tensor for tensor in tensors})


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


def _to_copy(source: Directory) -> list[Path]:
    """The source's other files. CheckpointError for a link to a file elsewhere, config.json too: it
    may be any file of whoever writes, and its contents would be passed on with the copy. Hugging
    Face's cache, where all files are links, has them in `blobs`.
    """
    if source.path.is_file():  # of GGUF
        return []
    home = source.path.resolve()
    places = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    others = [
        file
        for file in sorted(home.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and not file.name.endswith(_NOT_COPIED)
        and file.name not in (OLDER_CONFIG, INDEX)
    ]
    for file in others:
        if not any(file.resolve().is_relative_to(place) for place in places):
            raise CheckpointError(
                f"a link to {file.resolve()}",
                expected="files of the directory itself",
                todo="put a copy of that file there, if it belongs to the model",
                where=str(file),
            )
    return [file for file in others if file.name != CONFIG]


def _shards(steps: Sequence[Step], shard_bytes: int) -> dict[str, list[Step]]:
    """The steps of each file, in order: as many as fit, at least one."""
    groups: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        if groups[-1] and size + step.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(step)
        size += step.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": its for i, its in enumerate(groups, 1)}


def _index(shards: Mapping[str, Sequence[Step]]) -> dict[str, Any] | None:
    """The index of several shards, which one does not need."""
    if len(shards) == 1:
        return None
    shard_of = {p.name: name for name, its in shards.items() for step in its for p in step.planned}
    return {
        "metadata": {"total_size": sum(step.nbytes for its in shards.values() for step in its)},
        "weight_map": dict(sorted(shard_of.items())),
    }


# The file system ----------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON and syncs it to disk."""
    path.write_text(json.dumps(value, indent=2) + "\n")
    sync(path)


def sync(path: Path) -> None:
    """Syncs a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def appearing(dst: Path, needed: int = 0) -> Iterator[Path]:
    """A folder for the files of dst, which gets this name at the end of the block, or is removed if
    the block raises. The system's errors become CheckpointErrors. needed: bytes to have room for.

    It lies in `.DST.….partial` beside dst, which only this user may read.
    """
    free = ""
    with contextlib.ExitStack() as undone:
        try:
            dst.parent.mkdir(parents=True, exist_ok=True)
            partial = tempfile.mkdtemp(".partial", f".{dst.name}.", dst.parent)
            undone.callback(shutil.rmtree, partial, ignore_errors=True)
            if room := _too_small(Path(partial), needed):
                raise CheckpointError(f"not written: {room}", todo=_MAKE_ROOM, where=str(dst))
            free = amount(shutil.disk_usage(partial).free, "B")
            files = Path(partial, "files")
            files.mkdir()
            yield files
            sync(files)
            files.rename(dst)
            sync(dst.parent)
        except OSError as error:
            found, todo = f"not written: {error.strerror or error}", "run it again"
            if error.errno in _FULL:
                wanted = f"{_needs(needed)}, " if needed else ""
                found, todo = f"{found}: {wanted}{free} free at first", _MAKE_ROOM
            elif error.errno == errno.ENAMETOOLONG:
                todo = "give it a shorter name"
            raise CheckpointError(found, todo=todo, where=str(dst)) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped: {dst} is not written, and nothing of it is left"
            ) from None


def _too_small(folder: Path, needed: int) -> str:
    """What is wrong if a folder's disk has no room for so many bytes, else ""."""
    free = shutil.disk_usage(folder).free
    return f"{_needs(needed)}, {amount(free, 'B')} free" if free < needed else ""


def _needs(needed: int) -> str:
    return f"{amount(needed, 'B')} needed"
