"""The CPU backend's tiers that this machine runs, and programs compiled for one of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from fusion_moe import options
from fusion_moe.backends import TARGETS, emit
from fusion_moe.backends.cpu import join
from fusion_moe.compile import lower
from fusion_moe.ir.core import Fusion
from fusion_moe.runtime import isa
from fusion_moe.runtime.check import differences
from fusion_moe.runtime.program import Program
from tests.fuzz.batch import Batch

Key = TypeVar("Key", bound=Hashable)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EMULATION = Path(__file__).parent / "amx_emulated.h"
EMULATED = (
    "amx" not in isa.available() and "avx512" in isa.available() and "avx512_bf16" in isa.features()
)
THREADS = (1, 2, 3, 7, 16)
TIERS = ["amx"] * EMULATED + list(isa.available())
# of kernels without tiles: with AMX they are those of "avx512"
OF_VECTORS = [tier for tier in TIERS if tier != "amx"]


def of_file(path: Path) -> str:
    """The tier that a file of tests runs without --all, which is not the same for all files."""
    return OF_VECTORS[zlib.crc32(path.name.encode()) % len(OF_VECTORS)]


@contextmanager
def emulated_amx() -> Iterator[None]:
    """Where the CPU has AVX-512 but not AMX the tier's few instructions of its own are emulated,
    slowly: the rest of it runs as it is.
    """
    if not EMULATED:
        yield
        return
    # the cache looks at flags, not at what they include
    content = f"-DEMULATION={zlib.crc32(EMULATION.read_bytes())}"
    flags = (*isa.compiler_flags("avx512"), "-include", str(EMULATION), content)
    real = isa.compiler_flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isa, "available", lambda: tuple(TIERS))
        patch.setattr(
            isa,
            "compiler_flags",
            lambda tier, *args, **kwargs: flags if tier == "amx" else real(tier, *args, **kwargs),
        )
        yield


def program(fusion: Fusion, tier: str, joined: bool = False) -> Program:
    """A Fusion with kernels of the CPU backend; none may be the reference's for want of a kernel.
    joined: in one call.
    """
    with options.override(cpu_isa=tier):
        lowered = lower(fusion, TARGETS["cpu"], options.current())
        kernels = tuple(emit(s, TARGETS["cpu"]) for s in lowered.segments)
    assert not [k.why for k in kernels if k.segment.kind == "grouped_gemm" and k.why]
    kernels, entry = join(lowered.stages[-1][1], kernels) if joined else (kernels, None)
    assert joined == (entry is not None)
    return Program(lowered.stages, lowered.segments, kernels, TARGETS["cpu"], joined=entry)


def together(fusions: Mapping[Key, Fusion], tier: str) -> dict[Key, Program]:
    """The programs of several Fusions in one library: nine take twice the time of one, most of
    which is that of headers and templates.
    """
    made = {key: program(fusion, tier, joined=True) for key, fusion in fusions.items()}
    with options.override(cpu_isa=tier):
        assert Batch(list(made.values()), tier, ())._loaded
    return made


def small_integers(*shape: int, dtype=torch.bfloat16, seed: int = 0):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b, **kwargs):
    torch.testing.assert_close(a, b, equal_nan=True, **{"rtol": 0, "atol": 0, **kwargs})


def same_on_any_threads(compute: Callable[[], object]) -> None:
    """What is computed has the same bits on each number of threads, more than there are CPUs among
    them.
    """
    before, found = torch.get_num_threads(), []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            found.append(compute())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        same(other, found[0])


def check_segments(fusion: Fusion, tier: str, inputs, compiled: Program | None = None) -> None:
    """Each kernel against its own segment, on what the reference hands to it, as the option `check`
    compares them.

    compiled: the program of the Fusion, where it is compiled already.
    """
    compiled = compiled or program(fusion, tier, joined=True)
    env = fusion.bind(inputs)
    made = dict(zip(compiled.fusion.inputs, inputs, strict=True))
    for kernel in compiled.kernels:
        args = [made[v] for v in kernel.segment.fusion.inputs]
        want, found = kernel.segment.plan.fusion.evaluate(*args, sizes=env), kernel(args, env)
        assert not list(differences(kernel.segment.plan.fusion, args, found, want, "cpu"))
        made.update(zip(kernel.segment.fusion.outputs, want, strict=True))
