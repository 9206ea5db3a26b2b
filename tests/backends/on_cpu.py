"""C++ of ours, compiled for the CPU and called: CUDA's too, where headers stand for what is PTX
(cuda_on_cpu/).
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from fusion_moe.runtime.build import find_compiler

HERE = Path(__file__).parent / "cuda_on_cpu"


def copy(folder: Path, *sources: Path) -> None:
    """Headers there include what stands for others, not what lies beside them."""
    for path in sources:
        (folder / path.name).write_text(path.read_text())


def compiled(folder: Path, text: str = "", *flags: str, name: str = "made") -> Path:
    """A program of a text, or of the file of this name in the folder."""
    compiler = find_compiler()
    assert compiler
    if text:
        (folder / f"{name}.cpp").write_text(text)
    usual = ["-std=c++20", "-O1", "-pthread", "-w", f"-I{folder}", f"-I{HERE}"]
    command = [*compiler.command, *usual, *flags, f"{folder}/{name}.cpp", "-o", f"{folder}/{name}"]
    subprocess.run(command, check=True)
    return folder / name


def library(folder: Path, text: str = "", *flags: str, name: str = "made") -> ctypes.CDLL:
    """A library, compiled once."""
    made = folder / name
    if not made.exists():
        compiled(folder, text, "-fPIC", "-shared", "-ffp-contract=off", *flags, name=name)
    return ctypes.CDLL(str(made))


def pointer(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
