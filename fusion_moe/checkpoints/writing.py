"""Writes a directory that appears whole or not at all, and continues after an interruption.

Until then `.DST.partial` lies beside DST, with `plan`: a digest of what is written from what; and
`files`: the future DST. A shard is written under another name, synced to disk, and renamed, so that
one with its own name is whole; in the end `files` is renamed to DST. After a crash, ctrl-C or
kill -9 the next call with the same plan keeps these shards. `check` compares all of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, Error
from ..messages.progress import progress
from ..runtime import trust
from .directory import CONFIG, INDEX, OLDER_CONFIG, SINGLE, Directory
from .shard import Step, header_of, write_shard

SHARD_BYTES = 5 * 10**9
SPARE_BYTES = 64 * 2**20  # of free space to leave: for tokenizers and similar files
_FULL = (errno.ENOSPC, errno.EDQUOT)
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
) -> Path:
    """Writes the results of steps as the directory dst, with configurations, an index, and the
    source's other files (tokenizer and so on), but for hidden ones, other weights, and what lies in
    folders.

    configs: for config.json, and for hf_quant_config.json if there is to be one. check: called with
    the Directory before it gets its name; if it raises, there is no dst. CheckpointError if dst
    exists already, is a mount point, the disk is full, or another process is writing the same;
    whatever is raised, nothing incomplete has dst's name. Returns dst, absolute and without
    symbolic links.
    """
    dst = destination(dst)
    copied = _to_copy(source)
    shards = _shards(steps, shard_bytes)
    partial = dst.with_name(f".{dst.name}.partial")
    files = partial / "files"
    with readable_errors(dst, partial), _locked(partial), _removed_unless_it_can_go_on(partial):
        _begin(partial, files, _plan(source, shards, configs[0]))
        needed = sum(step.nbytes for step in steps) + sum(file.stat().st_size for file in copied)
        missing = needed - sum(file.stat().st_size for file in files.iterdir())
        free = shutil.disk_usage(partial).free
        if free < missing + SPARE_BYTES:
            found = f"{free / 1e9:.1f} GB free, {missing / 1e9:.1f} GB to write"
            raise OSError(errno.ENOSPC, found)
        for name, its in progress(shards.items(), f"writing files of {dst.name}", len(shards)):
            if not (files / name).exists():
                unfinished = partial / f"{name}.unfinished"
                try:
                    write_shard(unfinished, its)
                    unfinished.rename(files / name)
                finally:
                    unfinished.unlink(missing_ok=True)
        _write_rest(files, copied, shards, configs)
        check(Directory.open(files))
        files.rename(dst)
        sync(dst.parent)
        shutil.rmtree(partial, ignore_errors=True)
    return dst


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
        expected, todo = "a path that a folder can be renamed to", "name a new folder inside of it"
        raise CheckpointError(
            "the destination is a mount point", expected=expected, todo=todo, where=str(dst)
        )
    return dst


def _to_copy(source: Directory) -> list[Path]:
    """The source's other files. CheckpointError for a link to a file elsewhere, config.json too: it
    may be any file of whoever writes, and its contents would be passed on with the copy. Hugging
    Face's cache, where all files are links, has them in `blobs`.
    """
    home = source.path.resolve()
    places = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    found = [
        file for file in sorted(home.iterdir()) if file.is_file() and not file.name.startswith(".")
    ]
    others = [
        file
        for file in found
        if not file.name.endswith(_NOT_COPIED) and file.name not in (OLDER_CONFIG, INDEX)
    ]
    for file in others:
        if not any(file.resolve().is_relative_to(place) for place in places):
            todo = "put a copy of that file there, if it belongs to the model"
            raise CheckpointError(
                f"a link to {file.resolve()}",
                expected="files of the directory itself",
                todo=todo,
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


def _plan(
    source: Directory, shards: Mapping[str, Sequence[Step]], config: Mapping[str, Any]
) -> str:
    """A digest of what is written from what: the source's files with sizes and times, the headers,
    the configuration.
    """
    digest = hashlib.sha256()
    for file in sorted({entry.file for entry in source.tensors.values()}):
        stat = file.stat()
        digest.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name, steps in shards.items():
        digest.update(name.encode() + header_of(steps))
    digest.update(json.dumps(config, sort_keys=True).encode())
    return digest.hexdigest()


def _begin(partial: Path, files: Path, plan: str) -> None:
    """Makes the folder of files, or keeps an earlier call's if the plan is the same."""
    saved = partial / "plan"
    if not saved.exists() or saved.read_text() != plan:
        shutil.rmtree(files, ignore_errors=True)
        write_text(saved, plan)
    files.mkdir(exist_ok=True)


def _write_rest(
    files: Path,
    copied: Sequence[Path],
    shards: Mapping[str, Sequence[Step]],
    configs: Configs,
) -> None:
    """Writes everything except the shards."""
    for other in copied:
        shutil.copyfile(other, files / other.name)
        sync(files / other.name)
    texts = zip((CONFIG, OLDER_CONFIG, INDEX), (*configs, _index(shards)), strict=True)
    for name, value in texts:
        (files / name).unlink(missing_ok=True)
        if value is not None:
            write_text(files / name, json.dumps(value, indent=2) + "\n")
    sync(files)


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


def write_text(path: Path, text: str) -> None:
    """Writes a small file atomically and syncs it to disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.rename(path)


def sync(path: Path) -> None:
    """Syncs a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def readable_errors(dst: Path, partial: Path) -> Iterator[None]:
    """Turns the system's errors into CheckpointErrors."""
    try:
        yield
    except OSError as error:
        todo = "free some space and run it again" if error.errno in _FULL else "run it again"
        if error.errno == errno.ENAMETOOLONG:
            todo = "give it a shorter name"
        elif os.path.lexists(partial):
            todo += f", to go on where it stopped; {partial} has what is finished"
        raise CheckpointError(
            f"not written: {error.strerror or error}", todo=todo, where=str(dst)
        ) from error


@contextlib.contextmanager
def _removed_unless_it_can_go_on(partial: Path) -> Iterator[None]:
    """Removes the folder at the end of the block: on success, after an error that would recur, or
    if no shard is finished.
    """
    try:
        yield
    except Error:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if not any(partial.glob("files/*.safetensors")):
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Makes the folder, for this user alone, and locks it against other processes until the block
    or the process ends.

    CheckpointError for one that somebody else made or may write to: links in it would lead to other
    files.
    """
    import fcntl  # imported here, since Windows does not have it

    partial.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := trust.why_not(partial):
        todo = "remove it if it is not needed, or name another destination"
        raise CheckpointError(f"{partial} {why}", todo=todo, where="writing beside the destination")
    with os.fdopen(
        os.open(partial / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "w"
    ) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                "another process is writing it", todo="wait for it", where=str(partial)
            ) from None
        except OSError:  # the file system has no locks
            pass
        yield
