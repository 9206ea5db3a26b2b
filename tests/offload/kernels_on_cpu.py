"""The kernels of offloaded experts, compiled for the CPU (cuda_on_cpu/)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from fusion_moe.backends.cpu.readers import KERNELS as CPU_KERNELS
from fusion_moe.offload.worker import KERNELS, SOURCE
from fusion_moe.runtime.build import find_compiler
from fusion_moe.runtime.native import INCLUDE

HERE = Path(__file__).parent / "cuda_on_cpu"
BACKENDS = Path(__file__).parents[1] / "backends" / "cuda_on_cpu"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """With all headers that need no PTX, beside what stands for the others."""
    made = tmp_path_factory.mktemp("kernels")
    more = SOURCE, CPU_KERNELS / "team.h", INCLUDE / "descriptor.h"
    for header in (*KERNELS.glob("*.cuh"), *more, *HERE.iterdir()):
        (made / header.name).write_text(header.read_text())
    return made


def compiled(folder: Path, name: str, text: str = "", *flags: str) -> Path:
    """A program of a text, or of a file in the folder."""
    compiler = find_compiler()
    assert compiler
    if text:
        (folder / f"{name}.cpp").write_text(text)
    usual = ["-std=c++20", "-O1", "-pthread", "-w", f"-I{folder}", f"-I{BACKENDS}"]
    command = [*compiler.command, *usual, *flags, f"{folder}/{name}.cpp", "-o", f"{folder}/{name}"]
    subprocess.run(command, check=True)
    return folder / name


def library(folder: Path, name: str, text: str = "") -> ctypes.CDLL:
    """A library, compiled once."""
    made = folder / name
    if not made.exists():
        compiled(folder, name, text, "-fPIC", "-shared")
    return ctypes.CDLL(str(made))
