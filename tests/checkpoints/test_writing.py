"""Directories appear whole or not at all, whatever is raised and however full the disk is."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cover import few
from files import MADE, change, copied, raw
from safetensors import safe_open

from fusion_moe.checkpoints import Directory, convert, writing
from fusion_moe.errors import CheckpointError
from fusion_moe.messages.units import amount

SRC = MADE / "ct-qwen3_moe"
SHARD = 8_000  # bytes: five files


def test_shards_index_and_other_files(tmp_path: Path) -> None:
    src = copied(SRC.name, tmp_path)
    (src / "tokenizer.json").write_text("{}")
    (src / "pytorch_model.bin").write_text("not copied")
    dst = convert(src, tmp_path / "dst", shard_bytes=SHARD)
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in dst.glob("*.safetensors"))
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) == 5
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in raw(dst).values())
    for file in files:  # the format by its own package
        with safe_open(dst / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {name for name, shard in index["weight_map"].items() if shard == file} == set(
                opened.keys()
            )
    assert (dst / "tokenizer.json").read_text() == "{}"
    assert not (dst / "pytorch_model.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [SRC.name, "dst"]


def test_an_interrupted_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard = writing.write_shard

    def interrupted(path: Path, steps: Any) -> None:
        if "00004" in path.name:
            raise KeyboardInterrupt
        write_shard(path, steps)

    monkeypatch.setattr(writing, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt, match="dst is not written, and nothing of it is left"):
        convert(SRC, tmp_path / "dst", shard_bytes=SHARD)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file of this process may become larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match="dst: not written: File too large; name a disk that takes files"
        ):
            convert(SRC, tmp_path / "dst")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits is written, to the last byte; else it is said how many are needed."""
    whole = sum(file.stat().st_size for file in convert(SRC, tmp_path / "whole").iterdir())
    free = SimpleNamespace(free=whole)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: free)
    assert convert(SRC, tmp_path / "dst").is_dir()
    free.free -= 1
    said = rf"none: not written: {amount(whole, 'B')} needed, .* free; free some space and run it"
    with pytest.raises(CheckpointError, match=said):
        convert(SRC, tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "whole"]


def test_a_disk_that_is_full_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a quota, or because others write too."""

    def full(path: Path, steps: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "write_shard", full)
    said = r"No space left on device: \d+(\.\d)? kB needed, .*B free at first; free some space"
    with pytest.raises(CheckpointError, match=said):
        convert(SRC, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_says_it_is_larger_than_the_disk(tmp_path: Path) -> None:
    """It takes no room in the source, and all there is in a copy."""
    src = copied(SRC.name, tmp_path)
    (src / "tokenizer.json").touch()
    os.truncate(src / "tokenizer.json", 2**43)
    with pytest.raises(
        CheckpointError,
        match=r"dst: not written: 8\.8 TB needed, .* free; free some space and run it again",
    ):
        convert(src, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == [src.name]


def killed(tmp_path: Path, what: str, after: int) -> Path:
    """Kills a process that writes dst once it has noted so many files; what is left of it."""
    code = f"""
import os, signal
from fusion_moe.checkpoints import convert, quantize, unfinished
note = unfinished.Unfinished.note
def counted(self, name):
    note(self, name)
    if len(self.finished) == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
unfinished.Unfinished.note = counted
{what}
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.glob(".dst.*.partial")
    return left


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are written from here on."""
    names, write_shard = list[str](), writing.write_shard

    def counted(path: Path, steps: Any) -> None:
        names.append(path.name)
        write_shard(path, steps)

    monkeypatch.setattr(writing, "write_shard", counted)
    return names


def test_what_a_killed_process_finished_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same source and options alone, and only files that are as they were. The result is
    that of one process.
    """
    src = copied(SRC.name, tmp_path)
    whole = convert(src, tmp_path / "whole", shard_bytes=SHARD)
    same = f"convert({str(src)!r}, {str(tmp_path / 'dst')!r}, shard_bytes={SHARD})"
    left = killed(tmp_path, same, 3)
    assert len(list((left / "files").iterdir())) == 3
    (left / "files" / "model-00002-of-00005.safetensors").touch()  # changed by somebody
    (left / "files" / "model-00004-of-00005.safetensors").write_text("half of one")
    names = counting(monkeypatch)
    dst = convert(src, tmp_path / "dst", shard_bytes=SHARD)
    assert names == [f"model-0000{i}-of-00005.safetensors" for i in (2, 4, 5)]
    assert {f.name: f.read_bytes() for f in dst.iterdir()} == {
        f.name: f.read_bytes() for f in whole.iterdir()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [SRC.name, "dst", "whole"]


@pytest.mark.parametrize("other", few(["source", "dtype", "form", "shards"]))
def test_what_is_left_of_another_job_is_removed(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, dst = copied(SRC.name, tmp_path), tmp_path / "dst"
    shards = 9_000 if other == "shards" else SHARD
    to = "dense" if other != "form" else "modelopt"
    killed(tmp_path, f"convert({str(src)!r}, {str(dst)!r}, to='dense', shard_bytes={SHARD})", 2)
    if other == "source":
        os.utime(src / "model.safetensors")
    names = counting(monkeypatch)
    dtype = torch.bfloat16 if other == "dtype" else torch.float32
    convert(src, dst, to, dtype=dtype, shard_bytes=shards)
    assert len(names) == len(list(dst.glob("*.safetensors")))
    assert not list(tmp_path.glob(".*"))


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    """And names that only begin alike."""
    with writing.appearing(tmp_path / "dst") as one:
        (one.files / "a").write_text("one")
        other = tmp_path / ".dst.b.abcdefgh.partial"
        other.mkdir()
        (other / "lock").touch()
        convert(SRC, tmp_path / "dst")
        assert (one.files / "a").read_text() == "one"
        (tmp_path / "dst").rename(tmp_path / "first")
    assert (tmp_path / "dst" / "a").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "dst", "first"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_nobody_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="dst: not written: Permission denied"):
        convert(SRC, tmp_path / "dst")


def test_what_a_step_raises_leaves_nothing(tmp_path: Path) -> None:
    src = copied("mxfp4-gpt_oss", tmp_path)
    change(src, lambda tensors: tensors["model.layers.0.mlp.experts.down_proj_scales"].fill_(255))
    with pytest.raises(CheckpointError, match="512 NaN"):
        convert(src, tmp_path / "dst", shard_bytes=SHARD)
    assert [path.name for path in tmp_path.iterdir()] == [src.name]


def test_an_unfinished_directory_is_private(tmp_path: Path) -> None:
    """Whatever the umask is; the finished one is as the umask says."""
    before, seen = os.umask(0o002), []
    try:
        writing.write(
            tmp_path / "dst",
            Directory.open(SRC),
            [],
            ({}, None),
            check=lambda d: seen.append(d.path.parent.stat().st_mode & 0o777),
        )
    finally:
        os.umask(before)
    assert (seen, (tmp_path / "dst").stat().st_mode & 0o777) == ([0o700], 0o775)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_link_out_of_the_source(name: str, tmp_path: Path) -> None:
    """It may lead to any file of whoever converts, whose contents would be published with the
    model.
    """
    src = copied(SRC.name, tmp_path)
    (tmp_path / "secret").write_text((src / "config.json").read_text())
    (src / name).unlink(missing_ok=True)
    (src / name).symlink_to("../secret")
    with pytest.raises(
        CheckpointError,
        match=f"{name}: a link to {tmp_path}/secret; expected "
        "files of the directory itself; put a copy",
    ):
        convert(src, tmp_path / "dst")
    assert sorted(path.name for path in tmp_path.iterdir()) == [SRC.name, "secret"]


def test_links_inside_and_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    src = tmp_path / "models--a--b" / "snapshots" / "0123"
    src.parent.mkdir(parents=True)
    copied(SRC.name, tmp_path).rename(src)
    (src / "tokenizer.json").write_text("{}")
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for i, file in enumerate(sorted(src.iterdir())):
        file.rename(tmp_path / "models--a--b" / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    (src / "other.json").symlink_to("tokenizer.json")
    dst = convert(src, tmp_path / "dst")
    assert all(
        (dst / name).read_text() == "{}" and not (dst / name).is_symlink()
        for name in ("tokenizer.json", "other.json")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("d" * 250, "not written: File name too long; give it a shorter name"),
        ("d" * 400, "not written: File name too long; give it a shorter name"),
        ("d\0", r"d\\x00' as a destination; expected a path without NUL"),
        ("/", "/: the destination exists"),
    ],
)
def test_names_that_no_directory_can_have(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        convert(SRC, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_existing_directories(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert Directory.open(convert(SRC, tmp_path / "empty")).tensors
    with pytest.raises(CheckpointError, match="the destination exists"):
        convert(SRC, tmp_path / "empty")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_the_destination(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "folder").mkdir()
    (tmp_path / "dst").symlink_to(tmp_path / "folder")
    assert convert(SRC, tmp_path / "dst") == tmp_path / "folder"
    assert Directory.open(tmp_path / "dst").tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "folder"]


def test_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dst").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "dst")
    with pytest.raises(
        CheckpointError,
        match="dst: the destination is a mount point; .*; name a new folder inside of it$",
    ):
        convert(SRC, tmp_path / "dst")
    assert list(tmp_path.iterdir()) == [tmp_path / "dst"]
    assert Directory.open(convert(SRC, tmp_path / "dst" / "inside")).tensors


def test_one_matrix_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """64 MB in one file, in 64 pieces: as much more memory as a few of them need."""
    src = copied("modelopt-qwen3_moe", tmp_path)
    change(
        src,
        lambda tensors: tensors.update(
            {f"extra.{i}.weight": torch.ones(512, 1024, dtype=torch.bfloat16) for i in range(64)}
        ),
    )
    code = f"""
import resource
from fusion_moe.checkpoints import convert
def anonymous():
    status = open("/proc/self/status")
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
from fusion_moe.checkpoints import shard
before, most, plain = anonymous(), 0, shard._bytes
def watched(*args):
    global most
    most = max(most, anonymous())
    return plain(*args)
shard._bytes = watched
convert({str(src)!r}, {str(tmp_path / "dst")!r})
print(most - before)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    grown = int(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
        ).stdout
    )
    assert grown < 24_000  # kB
