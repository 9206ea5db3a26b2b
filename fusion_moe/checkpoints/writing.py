"""Writes a directory that appears whole or not at all: until its files are synced to disk and
checked, they lie beside it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..messages import CONFIG, amount, destination, phase, warn_once
from ..messages.progress import progress
from .directory import INDEX, NAMED, OLDER_CONFIG, SINGLE, Directory
from .headers import Entry
from .shard import Step, shard_bytes_of, write_shard
from .unfinished import Unfinished, begin, sync

SHARD_BYTES = 5 * 10**9
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAKE_ROOM = "free some space and run it again"
_ELSEWHERE = "name a folder that this user may write to"
# what helps against an error of the system; where nothing is known to, nothing is advised
_TODO = {
    **dict.fromkeys(_FULL, _MAKE_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT), _ELSEWHERE),
    **dict.fromkeys((errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT), "run it again"),
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.EFBIG: "name a disk that takes files of this size; ulimit -f says what this shell allows",
}
ADAPTERS = "adapters"  # the folder in which a saved model has them
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


Configs = tuple[Mapping[str, Any], Mapping[str, Any] | None]


def write(
    dst: str | Path,
    source: Directory,
    steps: Sequence[Step],
    configs: Configs,
    *,
    shard_bytes: int = SHARD_BYTES,
    how: Sequence[object] = (),
    check: Callable[[Directory], object],
    dry_run: Callable[[Directory], object] | None = None,
) -> Path:
    """Writes the results of steps as the directory dst, with configurations, an index, and the
    source's other files (tokenizer and so on), but for hidden ones, other weights, and what lies in
    folders.

    configs: for config.json, and for hf_quant_config.json if there is to be one. how: what else the
    bytes depend on beside source, plan and configs: files that a killed process finished are kept
    where all of it is the same. check: called with
    the Directory before it gets its name; if it raises, there is no dst. dry_run: called with the
    Directory that there would be, and nothing is written. CheckpointError if dst exists already, is
    a mount point, or the disk is full; whatever is raised, nothing has dst's name. Returns dst,
    absolute and without symbolic links.
    """
    dst = destination(dst)
    copied = _to_copy(source)
    configs = {k: v for k, v in configs[0].items() if k != NAMED}, configs[1]
    shards = _shards(steps, shard_bytes)
    values = zip((CONFIG, OLDER_CONFIG, INDEX), (*configs, _index(shards)), strict=True)
    texts = {name: _json(value) for name, value in values if value is not None}
    needed = sum(shard_bytes_of(own) for own in shards.values())
    needed += sum(file.stat().st_size for file in copied) + sum(map(len, texts.values()))
    if dry_run is not None:
        if room := _too_small(next(p for p in dst.parents if p.exists()), needed):
            raise CheckpointError(room, todo=_MAKE_ROOM, where=str(dst))
        dry_run(_planned(dst, configs, shards))
        return dst
    with appearing(dst, needed, _job(source, shards, texts, how)) as unfinished:
        files, left = unfinished.files, [name for name in shards if name not in unfinished.finished]
        if len(left) < len(shards):
            phase(f"going on: {len(shards) - len(left)} of {len(shards)} files are written")
        for name in progress(left, f"writing files of {dst.name}", len(left)):
            write_shard(files / name, shards[name])
            unfinished.note(name)
        for other in copied:
            shutil.copyfile(other, files / other.name)
            sync(files / other.name)
        for name, text in texts.items():
            (files / name).write_text(text)
            sync(files / name)
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


def _to_copy(source: Directory) -> list[Path]:
    """The source's other files. CheckpointError for a link to a file elsewhere, config.json too: it
    may be any file of whoever writes, and its contents would be passed on with the copy. Hugging
    Face's cache, where all files are links, has them in `blobs`.
    """
    if source.path.is_file():  # of GGUF
        return []
    home = source.path.resolve()
    if (home / ADAPTERS / "adapter_config.json").exists():
        warn_once(f"{home / ADAPTERS}: these adapters are not written; copy the folder")
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
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": own for i, own in enumerate(groups, 1)}


def _index(shards: Mapping[str, Sequence[Step]]) -> dict[str, Any] | None:
    """The index of several shards, which one does not need."""
    if len(shards) == 1:
        return None
    shard_of = {p.name: name for name, own in shards.items() for step in own for p in step.planned}
    return {
        "metadata": {"total_size": sum(step.nbytes for entry in shards.values() for step in entry)},
        "weight_map": dict(sorted(shard_of.items())),
    }


# The file system ----------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Writes a file of JSON and syncs it to disk."""
    path.write_text(_json(value))
    sync(path)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _job(
    source: Directory, shards: Mapping[str, Sequence[Step]], texts: Mapping[str, str], how: object
) -> str:
    """What determines the bytes of all shards: the files that are read, by size and time; what is
    planned of them; the versions of what computes.
    """
    read = sorted({entry.file.resolve() for entry in source.tensors.values()})
    files = [(file, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in read]
    plan = {
        name: [(p.name, str(p.dtype), p.shape) for step in own for p in step.planned]
        for name, own in shards.items()
    }
    versions = [str(torch.__version__)]
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions.append(metadata.version("fusion_moe"))
    text = json.dumps([files, plan, dict(texts), how, versions], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def appearing(dst: Path, needed: int = 0, job: str = "") -> Iterator[Unfinished]:
    """A folder for the files of dst, which gets this name at the end of the block, or is removed if
    the block raises. The system's errors become CheckpointErrors. needed: bytes to have room for;
    job: as of `begin`, for what a killed process has finished.

    It lies in `.DST.….partial` beside dst, which only this user may read.
    """
    free = ""
    with contextlib.ExitStack() as undone:
        try:
            dst.parent.mkdir(parents=True, exist_ok=True)
            unfinished = begin(dst, job)
            undone.callback(unfinished.remove)
            needed -= sum(size for size, *_ in unfinished.finished.values())
            if room := _too_small(unfinished.files, needed):
                raise CheckpointError(f"not written: {room}", todo=_MAKE_ROOM, where=str(dst))
            free = amount(shutil.disk_usage(unfinished.files).free, "B")
            yield unfinished
            sync(unfinished.files)
            unfinished.files.rename(dst)
            sync(dst.parent)
        except OSError as error:
            actual = f"not written: {error.strerror or error}"
            if error.errno in _FULL:
                wanted = f"{_needs(needed)}, " if needed else ""
                actual = f"{actual}: {wanted}{free} free at first"
            todo = _TODO.get(error.errno or 0, "")
            raise CheckpointError(actual, todo=todo, where=str(dst)) from error
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
