"""The C++ compiles for another architecture, as its generic tier: what a compiler for aarch64 makes of it. None of it is run."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from fusion_moe import ops, options
from fusion_moe.compile import compile_fusion
from fusion_moe.emit import cpu
from fusion_moe.formats import quantize
from fusion_moe.ir.core import Fusion
from fusion_moe.runtime import bandwidth, build
from fusion_moe.target import TARGETS

KERNELS = Path(cpu.__file__).parent / "kernels"
AARCH64, RELOCATABLE = 183, 1  # in the head of an ELF file
MISSING = "no C++ compiler for aarch64: install g++-aarch64-linux-gnu, or pip install ziglang"


def compilers() -> list[tuple[str, ...]]:
    """Those that may be here."""
    found = [(path,) for name in ("aarch64-linux-gnu-g++",) if (path := shutil.which(name))]
    found += [(path, "--target=aarch64-linux-gnu") for name in ("clang++",) if (path := shutil.which(name))]
    zig = importlib.util.find_spec("ziglang") is not None
    return found + ([(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")] if zig else [])


@cache
def compiler() -> tuple[str, ...] | None:
    """The first that finds the C++ library of its target."""
    with tempfile.TemporaryDirectory() as folder:
        found = (c for c in compilers() if compiled(c, "#include <algorithm>\nint x;\n", Path(folder)).returncode == 0)
        return next(found, None)


def compiled(command: tuple[str, ...], source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the compiler says; the object file is `made.o` in the folder."""
    (folder / "source.cpp").write_text(source, encoding="utf-8")
    flags = [flag for flag in build.BASE_FLAGS if flag != "-shared"]
    told = [*command, *flags, f"-I{KERNELS}", "-c", "source.cpp", "-o", "made.o"]
    return subprocess.run(told, cwd=folder, capture_output=True, text=True)


def check(source: str, folder: Path) -> None:
    """That the source becomes an object file of aarch64."""
    if compiler() is None:
        pytest.skip(MISSING)
    done = compiled(compiler(), source, folder)
    assert done.returncode == 0, done.stderr
    kind, machine = struct.unpack_from("<HH", (folder / "made.o").read_bytes(), 16)
    assert (kind, machine) == (RELOCATABLE, AARCH64)


def fusion_of(name: str, *args: object) -> Fusion:
    call = ops.bind(ops.SPECS[name], args, {})
    return ops.fusion_of(name, ops.eager_types(call), call.others)


def expert_mlp() -> Fusion:
    gate_up, down = quantize(torch.ones(4, 64, 64)), quantize(torch.ones(4, 64, 32))
    x, ids, w = torch.zeros(5, 64).bfloat16(), torch.zeros(5, 2).long(), torch.zeros(5, 2)
    return fusion_of("expert_mlp", x, ids, w, *gate_up, *down)


FUSIONS = {"expert_mlp": expert_mlp, "nvfp4_quantize": lambda: fusion_of("nvfp4_quantize", torch.zeros(4, 64, 32))}


@pytest.mark.parametrize("file", [KERNELS / "product.cpp", bandwidth._SOURCE], ids=lambda file: file.name)
def test_fixed_kernels(file, tmp_path):
    check(file.read_text(encoding="utf-8"), tmp_path)


@pytest.mark.compiler
@pytest.mark.parametrize("name", FUSIONS)
def test_generated_kernels(name, tmp_path):
    with options.override(cpu_isa="generic") as switches:
        kernels = compile_fusion(FUSIONS[name](), TARGETS["cpu"], switches).kernels
    assert {kernel.backend for kernel in kernels} == {"cpu"}
    for kernel in kernels:
        check(kernel.source, tmp_path)
