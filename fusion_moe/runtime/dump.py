"""Writes what is compiled to the folder of the option `dump`, for people to read; nothing if it is
not set.

        <target>-<12 digits>/                           a program: the digits are a digest of its
                                                        text and options
        0-translated.txt                its Fusion after each pass, in order
        segment0-grouped_gemm.txt       a segment as `split` returned it, why it begins there, its
                                        schedule and backend
        segment0-grouped_gemm-contracted.txt    the same as it was emitted, if that is another
                                                Fusion
        segment0-grouped_gemm.cpp       its source
        segments-avx2-<12 digits>.so    what was compiled or found in the cache when the program was
                                        called, and .cpp: all of its source. For CUDA .cubin, .cu,
                                        and .sass (the option cuda_debug)

A library that many programs share, such as the CPU's product, is in the folder of the first program
for which this process loaded it. An existing file is replaced by an equal one.
"""

from __future__ import annotations

import contextlib
import contextvars
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options
from ..errors import BuildError
from .store import key_of

if TYPE_CHECKING:  # what builds kernels imports this without torch
    from ..ir import Fusion
    from .kernel import Kernel

_DIGITS = 12
_into: contextvars.ContextVar[Path | None] = contextvars.ContextVar("fusion_moe_dump", default=None)


def program(
    stages: Sequence[tuple[str, Fusion]],
    kernels: Sequence[Kernel],
    target: str,
    with_: options.Options,
) -> Path | None:
    """Writes a program: its Fusion after each pass, by name, and its segments. Returns its folder;
    None if none is requested. BuildError if writing fails.
    """
    if not with_.dump:
        return None
    key = key_of(str(stages[0][1]), with_.key())[:_DIGITS]
    folder = Path(with_.dump).expanduser().absolute() / f"{target}-{key}"
    for i, (name, fusion) in enumerate(stages):
        _write(folder / f"{i}-{name}.txt", str(fusion))
    for i, kernel in enumerate(kernels):
        _segment(folder, f"segment{i}-{kernel.segment.kind}", kernel)
    return folder


def _segment(folder: Path, name: str, kernel: Kernel) -> None:
    segment = kernel.segment
    facts = {
        "begins here": segment.boundary,
        "schedule": segment.plan.schedule,
        "backend": kernel.backend,
        "no kernel": kernel.why,
    }
    head = "".join(f"# {title}: {text}\n" for title, text in facts.items() if text)
    _write(folder / f"{name}.txt", head + str(segment.fusion))
    if str(segment.plan.fusion) != str(segment.fusion):
        _write(folder / f"{name}-contracted.txt", str(segment.plan.fusion))
    if kernel.suffix:
        _write(folder / f"{name}{kernel.suffix}", kernel.source)


def into(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Inside the block, `binary` writes to this folder."""
    return options.during(_into, folder)


def binary(path: Path, source: str, suffix: str) -> None:
    """Copies a file of the store and its source to the folder of the program that is being called,
    if it has one.

    path: "name-<digits>.so"; only the first digits are kept.
    """
    if folder := _into.get():
        name, _, key = path.stem.rpartition("-")
        stem = f"{name}-{key[:_DIGITS]}"
        _write(folder / f"{stem}{suffix}", source)
        _write(folder / f"{stem}{path.suffix}", path.read_bytes())
        if path.suffix == ".cubin" and "sass" in options.words("cuda_debug"):
            command = [_nvdisasm(), "--print-code", "--print-line-info", str(path)]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            _write(folder / f"{stem}.sass", result.stdout)


@cache
def _nvdisasm() -> str:
    """The disassembler's path."""
    files: Any = ()
    with contextlib.suppress(metadata.PackageNotFoundError):
        files = metadata.distribution("nvidia-cuda-nvdisasm").files or ()
    there = (str(file.locate()) for file in files if file.name == "nvdisasm")
    if which := shutil.which("nvdisasm") or next(there, None):
        return which
    raise BuildError(
        "nvdisasm is not installed", todo="pip install nvidia-cuda-nvdisasm", where="cuda_debug"
    )


def _write(path: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as e:
        raise BuildError(
            f"what is compiled could not be written: {e}",
            todo="set FUSION_MOE_DUMP to another folder",
            where="dump",
        ) from e
