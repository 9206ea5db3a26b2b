"""The CPU's instruction sets, as ISA levels for which kernels are written, and the compiler flags
of each ISA level.

    isa.selected()                # "avx512": the best ISA level of this machine, or the one that
                                  # the option cpu_isa forces
    isa.compiler_flags("avx2")    # ("-mavx2", "-mfma", ...)

Every instruction set is named: `-march=native` means something else on every machine, and is
unreliable on virtual ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Collection
from functools import cache
from pathlib import Path

from .. import options
from ..errors import OptionError

_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vbmi")
_AMX = (*_AVX512, "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16")
# what defines each ISA level, by the names in /proc/cpuinfo; the best first
_NEEDS: dict[str, tuple[str, ...]] = {
    "amx": _AMX,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}
# what its kernels use beside that, if the CPU has it (`#ifdef __AVX512BF16__`)
_USES = {"avx512": ("avx512_bf16", "avx512_vnni", "avx512_fp16")}
LEVELS = tuple(_NEEDS)
# if it is not -m and the name
_FLAGS = {
    "bmi1": "-mbmi",
    "abm": "-mlzcnt",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}


def selected() -> str:
    """The ISA level to compile for and to run: the best one, or that of the option cpu_isa.
    OptionError if this machine does not have it.
    """
    wanted = options.current().cpu_isa
    return available()[0] if wanted == "auto" else require(wanted)


def require(isa_level: str) -> str:
    """The ISA level, if this machine can run it. OptionError if not."""
    if isa_level not in available():
        actual = (
            f"cpu_isa = {isa_level!r} is not supported by this CPU"
            if isa_level in LEVELS
            else f"cpu_isa = {isa_level!r}"
        )
        raise OptionError(
            actual, expected=f"'auto' or one of {', '.join(available())}", where="options"
        )
    return isa_level


@cache
def available() -> tuple[str, ...]:
    """The ISA levels that this machine can run, the best first; the last is always 'generic'."""
    return tuple(
        name
        for name, needs in _NEEDS.items()
        if features().issuperset(needs) and (name != "amx" or _may_use_tiles())
    )


def lacking(isa_level: str) -> tuple[str, ...]:
    """The features that this CPU lacks for an ISA level, as /proc/cpuinfo names them."""
    return tuple(name for name in _NEEDS[isa_level] if name not in features())


@cache
def features() -> frozenset[str]:
    """The instruction sets that the operating system lets programs use, as /proc/cpuinfo names
    them; none on other systems.
    """
    facts = cpuinfo()
    return frozenset(facts.get("flags", facts.get("Features", "")).split())


@cache
def cpuinfo() -> dict[str, str]:
    """What Linux says in /proc/cpuinfo of the first CPU; nothing on other systems."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        # reading hundreds of CPUs takes a while
        facts = (line.partition(":") for line in itertools.takewhile(str.strip, lines))
        return {name.strip(): value.strip() for name, _, value in facts}
    return {}


def compiler_flags(isa_level: str, having: Collection[str] | None = None) -> tuple[str, ...]:
    """The flags for g++ and clang++ that compile for an ISA level on a CPU with these features
    (default: this one's).
    """
    having = features() if having is None else having
    used = (name for name in _USES.get(isa_level, ()) if name in having)
    return tuple(
        _FLAGS.get(name, "-m" + name.replace("_", "")) for name in (*_NEEDS[isa_level], *used)
    )


def _may_use_tiles() -> bool:
    """Requests AMX's tile registers from Linux, which a process must do before using them; the
    answer holds for all its threads.
    """
    if os.uname().machine != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0
