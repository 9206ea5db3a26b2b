"""A directory of safetensors files, or a file of GGUF: its configuration, and the name, dtype,
shape and file of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError, in_one_line
from ..messages import CONFIG, GGUF, check_checkpoint, exists, is_gguf, warn_once
from .configurations import QUANTIZATION, TEXT_MODEL
from .gguf import read_gguf
from .headers import Entry, Read, Reads, Unread, read_header, read_json, shown
from .nf4 import unflattened
from .shared import given_to_each
from .split import split

OLDER_CONFIG = "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED = "transformers_weights"  # the entry of config.json that names another file, or its index
_FILE, _OF = ".safetensors", ".index.json"
_OTHERS = {
    "pytorch_model*.bin": "pickled tensors, which can run code when they are read",
    "*.pt": "pickled tensors",
    "*.pth": "pickled tensors",
}


@dataclass(frozen=True)
class Directory:
    """The result of `open`. config: config.json; tensors: by name, in the order of the files."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Entry]
    _opened: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)
    _made: Reads = field(default_factory=dict, repr=False, compare=False)  # not as in files

    @classmethod
    def open(cls, path: str | Path, files: Sequence[str] = ()) -> Directory:
        """Reads the configuration and all headers, no data. files: the names of those with the
        weights, if they are not the usual ones.

        path may be a file of GGUF: then as from `read_gguf`. CheckpointError for files or tensors
        that are missing, duplicated, truncated or broken, with file, tensor, found and expected;
        UnsupportedError for weights in other kinds of files.
        """
        path = Path(path)
        check_checkpoint(path)
        if is_gguf(path):
            config, tensors, reads = read_gguf(path)
            return cls(path, config, tensors, {}, reads)
        config, index = read_json(path / CONFIG), path / INDEX
        if files:
            entries = _of_files(path, files)
        elif config.get(NAMED) is not None:
            entries = _named(path, config[NAMED])
        else:
            entries = _sharded(path, index, config) if index.exists() else _single(path, config)
        result = cls(path, config, entries)
        tensors, reads = as_matrices(result.tensors, result.read, config)
        return replace(result, tensors=tensors, _made=reads)

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """The configuration's entries about quantization, flat, with "quant_method"; empty if there
        are none.

        From config.json, as `quantization_of`, else from hf_quant_config.json, which is all that
        older exports of ModelOpt have.
        """
        if entries := quantization_of(self.config):
            return entries
        older = self.path / OLDER_CONFIG
        return older_quantization(older) if older.exists() else {}

    def read(self, name: str) -> Tensor:
        """A tensor, memory mapped: its bytes are read when they are used, and writing to it does
        not change the file.
        """
        return self._made[name]() if name in self._made else self._of_file(name, "get_tensor")

    def slice(self, name: str) -> Any:
        """safetensors' slice of a tensor, which reads only the part that is indexed; of one that is
        not in a file as it is here, an object with the same methods.
        """
        if name in self._made:
            return Unread(self.tensors[name], self._made[name])
        return self._of_file(name, "get_slice")

    def _of_file(self, name: str, how: str) -> Any:
        file = self.tensors[name].file
        try:
            stat = file.stat()
            now = stat.st_size, stat.st_mtime_ns
            if file not in self._opened:
                self._opened[file] = safe_open(file, "pt"), now
            opened, then = self._opened[file]
            if now != then:  # reading what a mapped file has lost would end the process
                raise OSError(f"it was changed: from {then[0]:,} to {now[0]:,} bytes")
            return getattr(opened, how)(name)
        except (OSError, MemoryError, SafetensorError) as error:
            raise CheckpointError(
                f"{name}: {in_one_line(error)}",
                expected="the file as it was when its header was read",
                where=str(file),
            ) from None


def as_matrices(
    tensors: Mapping[str, Entry], read: Read, config: Mapping[str, Any]
) -> tuple[dict[str, Entry], Reads]:
    """The tensors of files with those in their place that schemes know: of NF4, of experts all in
    one tensor, and of several weights; and what reads these. Raises as `unflattened` and `split`.
    """
    reads = Reads()
    for change in (unflattened, partial(split, config=config), given_to_each):
        # by what was made before: a tensor may keep its name
        tensors, result = change(tensors, partial(_read_one, read, reads))
        reads = {**reads, **result}
    return dict(tensors), reads


def _read_one(read: Read, reads: Reads, name: str) -> Tensor:
    return reads[name]() if name in reads else read(name)


def _single(path: Path, config: Mapping[str, Any]) -> dict[str, Entry]:
    """The tensors of a directory without an index, or with one of files that are all gone."""
    if (path / SINGLE).exists():
        return {entry.name: entry for entry in read_header(path / SINGLE)}
    if files := sorted(path.glob(f"*{GGUF}")):
        raise UnsupportedError(
            f"{files[0].name}: GGUF", todo=f"name the file: {files[0]}", where=str(path)
        )
    for pattern, kind in _OTHERS.items():
        if files := sorted(path.glob(pattern)):
            raise UnsupportedError(
                f"{files[0].name}: {kind}",
                expected="safetensors",
                todo="take the checkpoint as safetensors",
                where=str(path),
            )
    shards = len(list(path.glob("*.safetensors")))
    of = f" of model_type {shown(config['model_type'])}" if "model_type" in config else ""
    raise CheckpointError(
        f"{shards} files of safetensors, no {INDEX}" if shards else f"no file of weights{of}",
        expected=f"{SINGLE}, or shards and {INDEX}",
        where=str(path),
    )


def _named(path: Path, name: Any) -> dict[str, Entry]:
    """The tensors of the file that config.json names, or of the files of that index."""
    where = f"{path / CONFIG}: {NAMED}"
    if not (isinstance(name, str) and _is_inside(name) and name.endswith((_FILE, f"{_FILE}{_OF}"))):
        raise CheckpointError(
            shown(name),
            expected=f"the name of a file {_FILE} or {_FILE}{_OF} inside of the directory",
            where=where,
        )
    if not (path / name).is_file():
        raise CheckpointError(
            f"{name} is not there", expected="the file that config.json names", where=where
        )
    if name.endswith(_FILE):
        return {entry.name: entry for entry in read_header(path / name)}
    return _indexed(path, path / name, read_index(path / name)["weight_map"])


def _sharded(path: Path, index: Path, config: Mapping[str, Any]) -> dict[str, Entry]:
    """The tensors of a directory with an index. An index of files that are all gone does not count
    if there is a single file.
    """
    shard_of = read_index(index)["weight_map"]
    shards = list(dict.fromkeys(shard_of.values()))
    if SINGLE not in shards and (path / SINGLE).exists():
        if any(exists(path / shard) for shard in shards):
            raise CheckpointError(
                f"{SINGLE} beside an index of other files",
                expected="one or the other",
                where=str(path),
            )
        # transformers leaves the index when it saves one file over shards
        return _single(path, config)
    return _indexed(path, index, shard_of)


def _of_files(path: Path, files: Sequence[str]) -> dict[str, Entry]:
    """The tensors of these files: those that the index of the files names, if there is one."""
    for index in sorted(path.glob("model.safetensors.index*.json")):
        if {*(shard_of := read_index(index)["weight_map"]).values()} == {*files}:
            return _indexed(path, index, shard_of)
    return {entry.name: entry for file in files for entry in read_header(path / file)}


def _indexed(path: Path, index: Path, shard_of: Mapping[str, str]) -> dict[str, Entry]:
    """The tensors that an index names, each in its file. Others in the files are left out, with a
    warning.
    """
    tensors: dict[str, Entry] = {}
    left_out: list[Entry] = []
    shards = [*dict.fromkeys(shard_of.values())]
    if missing := [shard for shard in shards if not exists(path / shard)]:
        raise CheckpointError(
            f"{missing[0]} is not there{_and_more(missing)}",
            expected="every file that the index names",
            todo="download it again",
            where=str(index),
        )
    for shard in shards:
        for entry in read_header(path / shard):
            if (listed := shard_of.get(entry.name, shard)) != shard:
                raise CheckpointError(
                    f"{entry.name} in {shard}, by the index in {listed}",
                    expected="each tensor in one file, the one that the index names",
                    where=str(index),
                )
            if entry.name in shard_of:
                tensors[entry.name] = entry
            else:
                left_out.append(entry)
    if left_out:
        warn_once(
            f"{index}: {left_out[0]} is in {left_out[0].file.name} but not in the "
            f"index{_and_more(left_out)}: left out"
        )
    if absent := shard_of.keys() - tensors.keys():
        name = min(absent)
        raise CheckpointError(
            f"{name} is not in {shard_of[name]}{_and_more(absent)}",
            expected="every tensor of the index in its file",
            where=str(index),
        )
    return tensors


def read_index(index: Path) -> dict[str, Any]:
    """An index with its `weight_map`, the file of each tensor. CheckpointError without one, or with
    a file elsewhere.
    """
    entries = read_json(index)
    shard_of = entries.get("weight_map")
    if (
        not isinstance(shard_of, dict)
        or not shard_of
        or not all(isinstance(name, str) for name in shard_of.values())
    ):
        raise CheckpointError(
            "no weight_map", expected="weight_map: the file of each tensor", where=str(index)
        )
    for shard in dict.fromkeys(shard_of.values()):
        if not (_is_inside(shard) and shard.endswith(_FILE)):
            raise CheckpointError(
                f"a shard {shown(shard)}",
                expected="names of safetensors files inside of the directory",
                where=str(index),
            )
    return entries


def _is_inside(name: str) -> bool:
    """Whether a file's name is that of one in the directory, or in a folder there."""
    parts = PurePosixPath(name)
    odd = "\\" in name or "\0" in name
    return not (odd or parts.is_absolute() or ".." in parts.parts) and parts.suffix != ""


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says about quantization, of the whole model or of its text model; {} if
    nothing. CheckpointError for anything else than an object.
    """
    parts = (config, *(config.get(name) for name in TEXT_MODEL))
    for part in (part for part in parts if isinstance(part, Mapping)):
        for key in QUANTIZATION:
            if not isinstance(entry := part.get(key) or {}, dict):
                raise CheckpointError(
                    f"{key} {shown(entry)}", expected="an object with quant_method", where=CONFIG
                )
            if entry:
                return entry
    return {}


def architectures_of(config: Mapping[str, Any], where: str = "") -> tuple[str, ...]:
    """The classes that a config.json names, in transformers' words; CheckpointError if it names
    anything else.
    """
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise CheckpointError(
            f"architectures {shown(classes)}", expected="a list of names of classes", where=where
        )
    return tuple(classes)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the entries that `quantization_of` reads."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION}
    return kept | {
        name: without_quantization(kept[name])
        for name in TEXT_MODEL
        if isinstance(kept.get(name), Mapping)
    }


def older_quantization(file: Path) -> dict[str, Any]:
    """What a hf_quant_config.json says, as a quantization_config would."""
    entries = read_json(file).get("quantization")
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"quantization is {shown(entries)}",
            expected="an object with quant_algo",
            where=str(file),
        )
    return {"quant_method": "modelopt", "ignore": entries.get("exclude_modules", []), **entries}


def _and_more(names: Any) -> str:
    return f", nor are {len(names) - 1} more" if len(names) > 1 else ""
