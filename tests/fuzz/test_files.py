"""Directories of checkpoints changed at random. They are read, or refused in a sentence of ours,
soon and in little memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from typer.testing import CliRunner

from fusion_moe import options
from fusion_moe.checkpoints import convert, quantize
from fusion_moe.checkpoints.headers import read_header
from fusion_moe.cli.app import app
from fusion_moe.errors import CheckpointError, Error
from fusion_moe.lora.files.config import read_config

from . import NUMBERS, examples
from .case import REFERENCE
from .compare import outcome

pytestmark = [pytest.mark.once, pytest.mark.slow]

_TESTS = Path(__file__).parents[1]
MADE = [*sorted((_TESTS / "checkpoints" / "made").iterdir()), _TESTS / "lora" / "made"]
_SECONDS, _LONGEST = 60, 5000  # for all calls of a directory; characters of a message
_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    128,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    10**18,
    10**300,
    10**400,
    10**4000,
    0.5,
    1e308,
    -0.0,
)
_TEXTS = (
    "",
    "x" * 5000,
    "\x1b[2J\x9b\ud800\u202e",
    "a\nb",
    "../x.safetensors",
    "model.safetensors\0",
    "U8",
    "F32",
    "F8_E4M3",
    "BF16",
    "modelopt",
    "compressed-tensors",
    "mxfp4",
    "fp8",
    "a.experts.1000000000.up_proj",
    "a.experts.٣.w1.weight",
)


def _value(rng: Random) -> Any:
    """Any value of JSON, in particular of a kind that nobody expects."""
    deep: Any = 0
    for _ in range(rng.choice((1, 3, 40, 900))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    others = (
        None,
        True,
        False,
        float("nan"),
        float("inf"),
        [],
        {},
        [0] * 1000,
        [2**62, 0],
        [0, 2**62],
        [1, 1, 1, 1],
        deep,
    )
    return rng.choice((*_NUMBERS, *_TEXTS, *others))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value in one of JSON, outer ones first."""
    for key, inner in list(
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _places(inner)


def _changed(rng: Random, value: Any) -> str:
    """A value of JSON, changed in one place, as text. A name may be there twice."""
    places = list(_places(value))
    if not places or rng.random() < 0.05:
        return json.dumps(_value(rng))
    outer, key = rng.choice(places)
    way = rng.choice(("value", "value", "value", "copy", "copy", "gone", "name", "twice"))
    if way == "twice":
        return json.dumps(value).replace(
            "{", f"{{{json.dumps(str(key))}: {json.dumps(outer[key])}, ", 1
        )
    if way == "gone":
        del outer[key]
    elif way == "name" and isinstance(outer, dict):
        name = rng.choice((*_TEXTS, *map(str, outer)))
        outer[name] = outer.pop(key)
    else:
        other, at = rng.choice(places)
        outer[key] = copy.deepcopy(other[at]) if way == "copy" else _value(rng)
    return json.dumps(value)


def _json(rng: Random, file: Path) -> None:
    text = file.read_text(errors="surrogateescape")
    with contextlib.suppress(ValueError, RecursionError):  # what an earlier change made of it
        text = _changed(rng, json.loads(text))
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        text = (
            text[:at]
            + rng.choice(('"', "[", "{", "\\ud800", "1" * 5000, "[" * 10**5, "\0"))
            + text[at:]
        )
    file.write_text(text, errors="surrogatepass")


def _header(rng: Random, file: Path) -> None:
    """The header of a file of tensors, with the length that it has then, or another."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    with contextlib.suppress(ValueError, RecursionError):
        text = _changed(rng, json.loads(text)).encode()
    size = (
        len(text)
        if rng.random() < 0.9
        else rng.choice((0, 1, 8, 2**20, 2**31, 2**63, 2**64 - 1, length))
    )
    file.write_bytes(size.to_bytes(8, "little") + text + data[8 + length :])


def _bytes(rng: Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 10))):
        if data:
            data[rng.randrange(min(len(data), 1000))] = rng.randrange(256)
    file.write_bytes(
        data[: rng.choice((0, 7, 8, 100, len(data) - 1, len(data), len(data)))]
        + bytes(rng.choice((0, 0, 1, 1000)))
    )


def _kind(rng: Random, file: Path) -> None:
    """Another kind of file in place of one."""
    file.unlink()
    rng.choice(
        (
            lambda: os.mkfifo(file),
            lambda: file.symlink_to("/dev/zero"),
            lambda: file.symlink_to(file),
            lambda: file.symlink_to("nowhere"),
            lambda: file.symlink_to("/etc/passwd"),
            lambda: file.mkdir(),
            lambda: file.touch(),
            lambda: None,
            lambda: (file.touch(), os.truncate(file, 2**43)),
            lambda: file.symlink_to("/proc/self/mem"),
        )
    )()


def _beside(rng: Random, file: Path) -> None:
    """One file more, which is copied, or read in place of another."""
    name = rng.choice(
        (
            "model.safetensors",
            "model.safetensors.index.json",
            "hf_quant_config.json",
            "tokenizer.json",
            "a\x1b[2J.txt",
            "x" * 250,
        )
    )
    if not os.path.lexists(file.parent / name):
        rng.choice(
            (
                lambda: shutil.copyfile(file, file.parent / name),
                lambda: (file.parent / name).symlink_to("/etc/hostname"),
            )
        )()


def change(rng: Random, directory: Path) -> None:
    """Changes one thing in a directory."""
    file = rng.choice(sorted(directory.iterdir()))
    if not file.is_file() or file.stat().st_size > 10**8 or file.is_symlink():
        return
    ways: tuple[Callable[[Random, Path], None], ...] = (_bytes, _kind, _beside)
    often = _json if file.suffix == ".json" else _header
    rng.choice((*ways, *[often] * 9))(rng, file)


@pytest.fixture(scope="module", autouse=True)
def limits() -> Iterator[None]:
    """What takes more than 4 GiB raises a MemoryError, what takes too long a TimeoutError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 4 * 2**30
    handler = signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    with options.using(REFERENCE):
        yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def _too_long(*_: object) -> None:
    raise TimeoutError


@given(NUMBERS)
@examples(2)
def test_directories_are_read_or_refused(rng):
    with tempfile.TemporaryDirectory(prefix="files-") as folder:
        directory = Path(shutil.copytree(rng.choice(MADE), Path(folder) / "src"))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            change(rng, directory)
        check(directory)


def check(directory: Path) -> None:
    """Reads a directory in all ways: none leaves anything behind, each error is one of ours, short
    and printable.
    """
    dst = directory.with_name("dst")
    calls: dict[str, Callable[[], Any]] = {
        "inspect": lambda: _command("inspect", "--values", str(directory)),
        "inspect --json": lambda: _command("inspect", "--json", str(directory)),
        "convert": lambda: convert(directory, dst),
        "convert to dense": lambda: convert(directory, dst, to="dense"),
        "quantize": lambda: quantize(directory, dst),
        "read_config": lambda: read_config(directory),
        "read_header": lambda: read_header(directory / "adapter_model.safetensors"),
    }
    for name, call in calls.items():
        signal.alarm(_SECONDS)
        found = outcome(call)
        signal.alarm(0)
        if isinstance(found, Exception):
            assert isinstance(found, Error), f"{name} raises {found!r}"
            assert len(str(found)) <= _LONGEST, name
            assert str(found).isprintable(), name
        shutil.rmtree(dst, ignore_errors=True)
        assert [*directory.parent.iterdir()] == [directory], name


def _command(*arguments: str) -> None:
    """Runs a command, whose output must be printable; raises what it raises."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert all(line.isprintable() for line in result.output.split("\n"))


def test_a_file_that_is_larger_than_what_can_be_mapped(tmp_path):
    source = shutil.copytree(MADE[0], tmp_path / "src")
    os.truncate(next(source.glob("*.safetensors")), 2**43)
    check(source)


def test_what_is_not_of_ours_is_found(monkeypatch, tmp_path):
    """An error of another kind, a long message, and what is left behind."""
    source = shutil.copytree(MADE[0], tmp_path / "src")
    check(source)
    for wrong in (
        _raises(TypeError("oh")),
        _raises(CheckpointError("x" * 9999)),
        lambda src, dst, **how: (tmp_path / "left").touch(),
    ):
        monkeypatch.setattr(sys.modules[__name__], "convert", wrong)
        with pytest.raises(AssertionError, match="convert"):
            check(source)


def _raises(error: Exception) -> Callable[..., None]:
    def convert(src: Path, dst: Path, **how: Any) -> None:
        raise error

    return convert
