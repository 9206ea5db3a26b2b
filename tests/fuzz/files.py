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
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from typer.testing import CliRunner

from fusion_moe import options
from fusion_moe.checkpoints import convert, quantize
from fusion_moe.checkpoints.headers import read_header
from fusion_moe.cli.app import app
from fusion_moe.errors import Error
from fusion_moe.nn.lora.files.config import read_config

from .case import REFERENCE
from .compare import outcome

_TESTS = Path(__file__).parents[1]
MADE = [*sorted((_TESTS / "checkpoints" / "made").iterdir()), _TESTS / "adapters" / "made"]
_SECONDS, _LONGEST = 20.0, 5000  # of processor time for a call; characters of a message
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
            data[min(int(rng.expovariate(1 / 200)), len(data) - 1)] = rng.randrange(256)
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


def wrong(directory: Path) -> str:
    """What is wrong with how a directory is read; "" if nothing is."""
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
        start = time.process_time()
        found = outcome(call)
        seconds = time.process_time() - start
        if isinstance(found, Exception) and not isinstance(found, Error):
            return f"{name} raises {type(found).__name__}: {str(found)[:200]}"
        if isinstance(found, Error) and (
            len(said := str(found)) > _LONGEST or not said.isprintable()
        ):
            return (
                f"{name} raises a message of {len(said)} characters, or with some that are not "
                f"printable: {said[:200]!r}"
            )
        if seconds > _SECONDS:
            return f"{name} takes {seconds:.0f} s"
        shutil.rmtree(dst, ignore_errors=True)
        if left := [path.name for path in directory.parent.iterdir() if path != directory]:
            return f"{name} leaves {left}"
    return ""


def _command(*arguments: str) -> str:
    """The output of a command; raises what it raises."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if not all(line.isprintable() for line in result.output.split("\n")):
        raise ValueError(f"not printable: {result.output!r}")
    return result.output


def judged(seed: int) -> tuple[str, str]:
    """What is wrong with the directory of a seed, "" if nothing is; and what was changed in it."""
    rng, source = Random(seed), MADE[seed % len(MADE)]
    with tempfile.TemporaryDirectory(prefix="files-") as folder, options.using(REFERENCE):
        directory = Path(shutil.copytree(source, Path(folder) / "src"))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            change(rng, directory)
        found = wrong(directory)
        return found, found and _difference(source, directory)


def _difference(source: Path, directory: Path) -> str:
    """Which files differ, and how they begin."""
    said = [source.name]
    for file in sorted(directory.iterdir()):
        plain = file.is_file() and not file.is_symlink()
        data = (
            file.read_bytes()[:2000]
            if plain and file.stat().st_size < 10**8
            else oct(file.lstat().st_mode)
        )
        if (
            not plain
            or not (source / file.name).exists()
            or data != (source / file.name).read_bytes()[:2000]
        ):
            said.append(f"{file.name!r}: {data!r}")
    return "\n".join(said)


def limit_memory(more: int = 4 * 2**30) -> None:
    """What takes more than so many bytes from now on raises a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY)
    )
