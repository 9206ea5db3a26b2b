"""Directories of safetensors files: what their headers say, and each way in which they can be
wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_calls import message, messages
from files import MADE, change, change_json, copied
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from fusion_moe.checkpoints import Directory, convert, method_of, stored_weights
from fusion_moe.checkpoints.directory import quantization_of, without_quantization
from fusion_moe.checkpoints.headers import read_header
from fusion_moe.errors import CheckpointError, UnsupportedError

SHARDED, SINGLE = "bf16-qwen3_moe", "modelopt-qwen3_moe"
INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00004.safetensors"


# those of bitsandbytes are shown as matrices: test_nf4.py
AS_IN_FILES = sorted(path.name for path in MADE.iterdir() if not path.name.startswith("bnb"))


@pytest.mark.parametrize("name", AS_IN_FILES)
def test_headers_and_tensors_are_those_that_safetensors_reads(name: str) -> None:
    directory = Directory.open(MADE / name)
    want = {
        key: t
        for file in sorted((MADE / name).glob("*.safetensors"))
        for key, t in load_file(file).items()
    }
    assert set(directory.tensors) == set(want)
    for key, t in want.items():
        entry, got = directory.tensors[key], directory.read(key)
        assert (entry.dtype, entry.shape, entry.nbytes) == (t.dtype, tuple(t.shape), t.nbytes)
        assert got.dtype == t.dtype
        assert torch.equal(
            got.view(torch.uint8) if t.dim() else got, t.view(torch.uint8) if t.dim() else t
        )


def test_configuration_of_quantization(tmp_path: Path) -> None:
    path = copied(SINGLE, tmp_path)
    whole = Directory.open(path).quantization
    assert (whole["quant_method"], whole["quant_algo"]) == ("modelopt", "NVFP4")
    change_json(path / "config.json", lambda c: c.pop("quantization_config"))
    older = Directory.open(path).quantization
    assert all(older[key] == whole[key] for key in ("quant_method", "quant_algo", "ignore"))
    (path / "hf_quant_config.json").unlink()
    assert Directory.open(path).quantization == {}


PLACES = [
    (part, key)
    for part in ("", "text_config", "llm_config")
    for key in ("quantization_config", "compression_config")
]


@pytest.mark.parametrize(("part", "key"), PLACES)
def test_where_a_configuration_may_say_it(part: str, key: str, tmp_path: Path) -> None:
    path, said = copied(SINGLE, tmp_path), Directory.open(MADE / SINGLE).quantization
    entry: dict[str, Any] = {"quantization_config": {}, "text_config": {"hidden_size": 64}}
    (entry.setdefault(part, {}) if part else entry)[key] = said
    change_json(path / "config.json", lambda c: c.update(entry))
    assert Directory.open(path).quantization == said
    rest = without_quantization(Directory.open(path).config)
    assert quantization_of(rest) == {}
    assert rest["text_config"] == {"hidden_size": 64}


def test_links_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    path = copied(SHARDED, tmp_path)
    for i, file in enumerate(sorted(path.iterdir())):
        file.rename(tmp_path / f"blob{i}")
        file.symlink_to(tmp_path / f"blob{i}")
    assert Directory.open(path).tensors.keys() == Directory.open(MADE / SHARDED).tensors.keys()


def test_an_index_of_files_that_are_gone(tmp_path: Path) -> None:
    """transformers leaves the index when it saves one file in place of shards."""
    path = copied(SHARDED, tmp_path)
    for shard in path.glob("*.safetensors"):
        shard.unlink()
    _both(path)
    assert list(Directory.open(path).tensors) == ["x"]


def test_tensors_that_the_index_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(SHARDED, tmp_path)
    change_json(path / INDEX, lambda index: index["weight_map"].pop("lm_head.weight"))
    assert Directory.open(MADE / SHARDED).tensors.keys() - Directory.open(path).tensors.keys() == {
        "lm_head.weight"
    }
    assert (
        "lm_head.weight (bfloat16 [32, 64]) is in model-00001-of-00004.safetensors but not in "
        "the index: left out"
    ) in caplog.text


def test_files_of_a_variant(tmp_path: Path) -> None:
    path = copied(SHARDED, tmp_path)
    _both(path)
    for names in (
        ["model.safetensors"],
        sorted(file.name for file in (MADE / SHARDED).glob("*.safetensors")),
    ):
        opened = Directory.open(path, names)
        assert {entry.file.name for entry in opened.tensors.values()} == {*names}


@pytest.mark.parametrize("size", [100, None], ids=["shorter", "as long"])
def test_files_that_change_while_they_are_open(size: int | None, tmp_path: Path) -> None:
    path = copied(SINGLE, tmp_path)
    directory, file = Directory.open(path), path / "model.safetensors"
    (first, *_), whole = directory.tensors, file.stat().st_size
    directory.read(first)
    if size is None:
        os.utime(file, (0, 0))
    else:
        os.truncate(file, size)
    with pytest.raises(CheckpointError, match=f"changed: from {whole:,} to {size or whole:,} byt"):
        directory.read(first)


def _truncate(path: Path) -> None:
    data = (path / FIRST).read_bytes()
    (path / FIRST).write_bytes(data[:-10])


def _cut_header(path: Path) -> None:
    (path / FIRST).write_bytes((path / FIRST).read_bytes()[:100])


def _both(path: Path) -> None:
    save_file({"x": torch.ones(1)}, path / "model.safetensors")


def _index(how: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda path: change_json(path / INDEX, how)


def _shard_name(name: str) -> Callable[[Path], None]:
    return _index(lambda index: index["weight_map"].update({"lm_head.weight": name}))


def _header(old: str, new: str) -> Callable[[Path], None]:
    def change_header(path: Path) -> None:
        data = (path / FIRST).read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].decode().replace(old, new, 1).encode()
        (path / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return change_header


def _again(file: Path, key: str) -> None:
    """Says an entry of a file of JSON twice."""
    before, found, after = file.read_text().partition(key)
    assert found
    file.write_text(f'{before}{key}: "x", {key}{after}')


def _pipe(file: str) -> Callable[[Path], None]:
    return lambda path: ((path / file).unlink(missing_ok=True), os.mkfifo(path / file))[1]


def _device(file: str) -> Callable[[Path], None]:
    return lambda path: (
        (path / file).unlink(missing_ok=True),
        (path / file).symlink_to("/dev/zero"),
    )[1]


def _pickled(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"")


def _gguf(path: Path) -> None:
    _pickled(path)
    (path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "truncated in the header": _cut_header,
    "empty": lambda path: (path / FIRST).write_bytes(b""),
    "missing shard": lambda path: (path / FIRST).unlink(),
    "missing index": lambda path: (path / INDEX).unlink(),
    "nothing": lambda path: [file.unlink() for file in path.glob("model*")],
    "missing config": lambda path: (path / "config.json").unlink(),
    "config is no JSON": lambda path: (path / "config.json").write_text("{"),
    "config is a list": lambda path: (path / "config.json").write_text("[]"),
    "whole and sharded": _both,
    "in the index alone": _index(lambda index: index["weight_map"].update({"extra.weight": FIRST})),
    "in another file": _index(
        lambda index: index["weight_map"].update(
            {"lm_head.weight": "model-00004-of-00004.safetensors"}
        )
    ),
    "no weight map": _index(lambda index: index.pop("weight_map")),
    "absolute": _shard_name("/etc/passwd.safetensors"),
    "outside": _shard_name("../model.safetensors"),
    "of another kind": _shard_name("model.bin"),
    "a number": _index(lambda index: index["weight_map"].update({"lm_head.weight": 1})),
    "unknown dtype": _header('"BF16"', '"BF17"'),
    "shape and bytes": _header("[32,64]", "[32,63]"),
    "negative shape": _header("[32,64]", "[-32,-64]"),
    "too large for strides, without elements": _header("[32,64]", f"[0,{2**62}]"),
    "a size of 4,000 digits": _header("[32,64]", f"[32,{'9' * 4000}]"),
    "metadata that are many": _header('{"format":"pt"}', f"[{'1,' * 10**4}1]"),
    "a name that clears the screen": _index(
        lambda index: index["weight_map"].update({"lm\x1b[2J\x9b\ud800": FIRST})
    ),
    "a shard that is a pipe": _pipe(FIRST),
    "a configuration that is a pipe": _pipe("config.json"),
    "a shard that never ends": _device(FIRST),
    "a configuration of a gigabyte": lambda path: os.truncate(path / "config.json", 10**9),
    "a configuration that is a folder": lambda path: (
        (path / "config.json").unlink(),
        (path / "config.json").mkdir(),
    ),
    "twice in a header": _header("lm_head.weight", "model.embed_tokens.weight"),
    "the same bytes twice in a header": _header(
        '"lm_head.weight":{',
        '"lm_head.weight":{"dtype":"BF16","shape":[64,32],'
        '"data_offsets":[0,4096]},"lm_head.weight":{',
    ),
    "a field twice in a header": _header('"shape":[32,64]', '"shape":[64,32],"shape":[32,64]'),
    "a text twice in a header": _header('{"format":"pt"}', '{"format":"pt","format":"np"}'),
    "twice in the index": lambda path: _again(path / INDEX, '"lm_head.weight"'),
    "twice in the configuration": lambda path: _again(path / "config.json", '"model_type"'),
    "twice below an entry of the configuration": lambda path: _again(
        path / "config.json", '"rope_theta"'
    ),
    "a quantization of no entries": lambda path: change_json(
        path / "config.json", lambda config: config.update(quantization_config="nvfp4")
    ),
    "a tensor in two files": lambda path: change(
        path,
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(1)}),
        "model-00004-of-00004.safetensors",
    ),
    "pickled": _pickled,
    "gguf": _gguf,
}


@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN)
def test_broken_directories(
    how: Callable[[Path], object], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = copied(SHARDED, tmp_path)
    how(path)
    golden(message(lambda: Directory.open(path).quantization))


@pytest.mark.parametrize(("dtype", "nbytes"), [("C64", 256), ("F6_E2M3", 24), ("F8_E4M3FNUZ", 32)])
def test_dtypes_that_only_safetensors_knows(dtype: str, nbytes: int, tmp_path: Path) -> None:
    """Such a file is whole."""
    header = {"a": {"dtype": dtype, "shape": [4, 8], "data_offsets": [0, nbytes]}}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes))
    with pytest.raises(UnsupportedError, match=f"of dtype {dtype}; expected one of F64.*; take"):
        read_header(file)


def test_no_directory(tmp_path: Path, golden: Callable[..., None]) -> None:
    (tmp_path / "model.safetensors").touch()
    golden(
        messages(
            {
                "nothing": lambda: Directory.open(tmp_path / "nowhere"),
                "no file of GGUF": lambda: Directory.open(tmp_path / "nowhere.gguf"),
                "a file": lambda: Directory.open(tmp_path / "model.safetensors"),
            }
        )
    )


@given(
    at=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    file=st.sampled_from([FIRST, INDEX, "config.json"]),
)
def test_any_byte_changed_is_an_error_or_the_same_names(
    tmp_path_factory: pytest.TempPathFactory, at: float, byte: int, file: str
) -> None:
    path = copied(SHARDED, tmp_path_factory.mktemp("flipped"))
    data = bytearray((path / file).read_bytes())
    size = 8 + int.from_bytes(data[:8], "little") if file == FIRST else len(data)
    data[int(at * size)] = byte
    (path / file).write_bytes(data)
    try:
        directory = Directory.open(path)
        assert stored_weights(directory.tensors, method_of(directory.quantization)) == {}
    except (CheckpointError, UnsupportedError):
        return
    assert directory.tensors.keys() == Directory.open(MADE / SHARDED).tensors.keys()


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    directory = Directory.open(path)
    return {
        name: w.shape
        for name, w in stored_weights(directory.tensors, method_of(directory.quantization)).items()
    }


QUANTIZED = st.sampled_from([SINGLE, "modelopt-gpt_oss", "ct-qwen3_moe-int4"])


@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), name=QUANTIZED)
def test_any_byte_changed_is_an_error_or_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, at: float, byte: int, name: str
) -> None:
    path = copied(name, tmp_path_factory.mktemp("flipped"))
    data = bytearray((path / "model.safetensors").read_bytes())
    data[int(at * (8 + int.from_bytes(data[:8], "little")))] = byte
    (path / "model.safetensors").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        assert shapes(path) == shapes(MADE / name)


@given(st.binary(max_size=200))
def test_any_bytes_as_a_header(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    file = tmp_path_factory.mktemp("any") / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError):
        read_header(file)


def test_headers_of_many_tensors(tmp_path: Path) -> None:
    parts = {"": ("U8", [1, 8], 8), "_scale": ("F8_E4M3", [1, 1], 1), "_scale_2": ("F32", [], 4)}
    experts = [f"model.layers.{layer}.mlp.experts.{e}" for layer in range(12) for e in range(70)]
    weights = [
        f"{expert}.{name}_proj.weight" for expert in experts for name in ("gate", "up", "down")
    ]
    shard_of = {}
    for i in range(4):
        header, end = {}, 0
        for weight in weights[i::4]:
            for part, (dtype, shape, size) in parts.items():
                header[weight + part] = {
                    "dtype": dtype,
                    "shape": shape,
                    "data_offsets": [end, end + size],
                }
                shard_of[weight + part] = f"model-{i}.safetensors"
                end += size
        text = json.dumps(header).encode()
        (tmp_path / f"model-{i}.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + bytes(end)
        )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shard_of}))
    (tmp_path / "config.json").write_text("{}")
    start = time.process_time()
    directory = Directory.open(tmp_path)
    assert len(stored_weights(directory.tensors, "modelopt")) == len(weights) == 2520
    assert time.process_time() - start < 2
    assert directory.read(weights[-1]).tolist() == [[0] * 8]


def test_config_may_name_the_file_of_weights(tmp_path: Path) -> None:
    """As transformers reads it: the entry goes before the usual names, here those of a broken
    file.
    """
    path = copied(SINGLE, tmp_path)
    want = Directory.open(path)
    (path / "model.safetensors").rename(path / "w.safetensors")
    (path / "model.safetensors").write_bytes(b"no safetensors")
    change_json(path / "config.json", lambda c: c.update(transformers_weights="w.safetensors"))
    found = Directory.open(path)
    assert found.tensors.keys() == want.tensors.keys()
    assert {entry.file.name for entry in found.tensors.values()} == {"w.safetensors"}
    shard_of = dict.fromkeys(want.tensors.keys() - {"model.norm.weight"}, "w.safetensors")
    (path / "w.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    index = "w.safetensors.index.json"
    change_json(path / "config.json", lambda c: c.update(transformers_weights=index))
    assert Directory.open(path).tensors.keys() == shard_of.keys()
    written = convert(path, tmp_path / "dense", to="dense")
    assert "transformers_weights" not in Directory.open(written).config


@pytest.mark.parametrize(
    "name", ["../w.safetensors", "/w.safetensors", "w.bin", 3, "", "none.safetensors", []]
)
def test_a_name_of_no_file_in_the_directory(tmp_path: Path, name: object) -> None:
    path = copied(SINGLE, tmp_path)
    change_json(path / "config.json", lambda c: c.update(transformers_weights=name))
    with pytest.raises(CheckpointError, match="transformers_weights"):
        Directory.open(path)
