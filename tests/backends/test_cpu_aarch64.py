"""The C++ for another architecture, as its generic tier: a compiler for aarch64 takes it, and under
an emulator it computes what it means.

It was never run on such a machine.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from fusions import fusion_of_call

from fusion_moe import options
from fusion_moe.backends import TARGETS, cpu
from fusion_moe.backends.cpu import readers
from fusion_moe.compile import compile_fusion
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.ir.binding import storage_shape
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.types import DTYPES
from fusion_moe.runtime import build
from fusion_moe.runtime.host_memory import bandwidth
from fusion_moe.runtime.kernel import Kernel
from fusion_moe.runtime.program import Program

MAIN = Path(__file__).with_name("cross_main.cpp").read_text(encoding="utf-8")
FIXED = {
    encoding: readers.library_source("generic", encoding).text for encoding in readers.BUILT_IN
}
BANDWIDTH = bandwidth._SOURCE.read_text(encoding="utf-8")
AARCH64, RELOCATABLE = 183, 1  # in the head of an ELF file
MISSING = "no C++ compiler for aarch64: install g++-aarch64-linux-gnu, or pip install ziglang"
NO_EMULATOR = (
    "no emulator of aarch64, or no compiler that links for it: install qemu-user-static "
    "and g++-aarch64-linux-gnu"
)


# The compiler -------------------------------------------------------------------------------------


def compilers() -> list[tuple[str, ...]]:
    """Those that may be here."""
    found = [(path,) for name in ("aarch64-linux-gnu-g++",) if (path := shutil.which(name))]
    found += [
        (path, "--target=aarch64-linux-gnu")
        for name in ("clang++",)
        if (path := shutil.which(name))
    ]
    zig = importlib.util.find_spec("ziglang") is not None
    return found + (
        [(sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")] if zig else []
    )


@cache
def compiler() -> tuple[str, ...] | None:
    """The first that finds the C++ library of its target."""
    with tempfile.TemporaryDirectory() as folder:
        return next(
            (
                c
                for c in compilers()
                if not compiled(c, "#include <algorithm>\nint x;\n", Path(folder)).returncode
            ),
            None,
        )


def compiled(
    command: Sequence[str], source: str, folder: Path, name: str = "made"
) -> subprocess.CompletedProcess[str]:
    """What the compiler says of a source; it makes an object file `name`.o in the folder."""
    (folder / f"{name}.cpp").write_text(source, encoding="utf-8")
    flags = [flag for flag in build.BASE_FLAGS if flag != "-shared"]
    return run(
        [*command, *flags, f"-I{readers.KERNELS}", "-c", f"{name}.cpp", "-o", f"{name}.o"], folder
    )


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def check(source: str, folder: Path) -> None:
    """That the source becomes an object file of aarch64."""
    if compiler() is None:
        pytest.skip(MISSING)
    done = compiled(compiler(), source, folder)
    assert done.returncode == 0, done.stderr
    kind, machine = struct.unpack_from("<HH", (folder / "made.o").read_bytes(), 16)
    assert (kind, machine) == (RELOCATABLE, AARCH64)


# The programs -------------------------------------------------------------------------------------


def expert_mlp_args() -> list[torch.Tensor]:
    """Rows for two of four experts: some with many, some with one, some with none."""
    g = torch.Generator().manual_seed(0)
    gate_up, down = (
        quantize(torch.randn(4, *shape, generator=g), NVFP4) for shape in ((64, 80), (80, 32))
    )
    ids = torch.tensor([[0, 2]] * 18 + [[2, 3]])
    return [
        torch.randn(len(ids), 80, generator=g).bfloat16(),
        ids,
        torch.rand(ids.shape, generator=g),
        *gate_up,
        *down,
    ]


CALLS = {
    "expert_mlp": expert_mlp_args,
    "nvfp4_quantize": lambda: [torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))],
}


def program_of(fusion: Fusion) -> Program:
    with options.override(cpu_isa="generic") as switches:
        program = compile_fusion(fusion, TARGETS["cpu"], switches)
    assert {kernel.backend for kernel in program.kernels} == {cpu.NAME}
    return program


@pytest.mark.parametrize("source", [*FIXED.values(), BANDWIDTH], ids=[*FIXED, "bandwidth"])
def test_fixed_kernels(source, tmp_path):
    check(source, tmp_path)


@pytest.mark.compiler
@pytest.mark.parametrize("name", CALLS)
def test_generated_kernels(name, tmp_path):
    for kernel in program_of(fusion_of_call(name, *CALLS[name]())).kernels:
        check(kernel.source, tmp_path)


# Emulated -----------------------------------------------------------------------------------------


@cache
def emulator() -> str | None:
    """What runs programs of aarch64, where the compiler links such."""
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if found is None or compiler() is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        built = (
            not compiled(compiler(), "int main() {}\n", Path(folder)).returncode
            and not link(Path(folder), "made").returncode
        )
        return found if built and run([found, "./program"], Path(folder)).returncode == 0 else None


def link(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return run(
        [*compiler(), "-static", "-fopenmp", *(f"{name}.o" for name in names), "-o", "program"],
        folder,
    )


@pytest.mark.compiler
@pytest.mark.parametrize("name", CALLS)
def test_emulated(name, tmp_path):
    if emulator() is None:
        pytest.skip(NO_EMULATOR)
    for object, source in (("product", FIXED["nvfp4"]), ("main", MAIN)):
        assert compiled(compiler(), source, tmp_path, object).returncode == 0
    args = CALLS[name]()
    program = program_of(fusion_of_call(name, *args))
    env = program.fusion.bind(args)
    made = dict(zip(program.fusion.inputs, args, strict=True))
    for kernel in program.kernels:
        assert compiled(compiler(), kernel.source, tmp_path, "segment").returncode == 0
        assert link(tmp_path, "segment", "product", "main").returncode == 0
        inputs = [made[v] for v in kernel.segment.fusion.inputs]
        found, wanted = (
            emulated(kernel, inputs, env, tmp_path),
            kernel.segment.plan.fusion.evaluate(*inputs, sizes=env),
        )
        made.update(zip(kernel.segment.fusion.outputs, found, strict=True))
        for got, want in zip(found, wanted, strict=True):
            if want.dtype in (torch.float32, torch.bfloat16):
                eps = torch.finfo(want.dtype).eps
                torch.testing.assert_close(
                    got, want, rtol=max(eps, 32 * 2.0**-23), atol=1e-6 * float(want.abs().max())
                )
            else:
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def emulated(
    kernel: Kernel, inputs: Sequence[torch.Tensor], env: Mapping[str, int], folder: Path
) -> list[torch.Tensor]:
    """The outputs of the kernel on these inputs, from the program in a folder."""
    source = kernel.launch.source
    made = [
        torch.empty(storage_shape(v.type, env), dtype=DTYPES[v.type.dtype]) for v in source.memory
    ]
    numbers, arrays = (
        [env[s] for s in source.fusion.symbols],
        [bytes_of(t) for t in (*inputs, *made)],
    )
    parts = [struct.pack("<q", len(array)) + array for array in arrays]
    (folder / "in").write_bytes(
        struct.pack(f"<{len(numbers) + 2}q", len(numbers), *numbers, len(parts)) + b"".join(parts)
    )
    done = run([emulator(), "./program", "in", "out"], folder)
    assert done.returncode == 0, done.stderr
    with (folder / "out").open("rb") as out:
        arrays = [out.read(len(array)) for array in arrays]
    for t, array in zip(made, arrays[len(inputs) :], strict=True):
        t.copy_(torch.frombuffer(bytearray(array), dtype=t.dtype).view(t.shape))
    held = dict(zip((*source.fusion.inputs, *source.memory), (*inputs, *made), strict=True))
    return [held[v] for v in source.fusion.outputs]


def bytes_of(t: torch.Tensor) -> bytes:
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
