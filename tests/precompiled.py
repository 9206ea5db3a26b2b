"""What kernels of the CPU include first, compiled once for all of them: a compiler spends a third
of its time for a small one on it. And, without `--all`, -O0 in place of -O3: a third of the rest.
They are linked with empty libraries: to look through those of C++ takes as long as to compile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fusion_moe import options
from fusion_moe.backends.cpu.launch import KERNELS
from fusion_moe.runtime import build, store

# Nothing that kernels without it would not include: one that forgets a header must not compile here
# either.
FIRST = '#include "product.h"\n#include "rows.h"\n'
LEVEL, O3 = "KERNELS_OF_TESTS", "-O3"  # in the environment: what stands for it
# What g++ would link with; libc and libm are not empty, since symbols have several versions there.
EMPTY = "libstdc++.so.6", "libgomp.so.1", "libgcc_s.so.1"
INTRINSICS = "#include <immintrin.h>\n"  # of all tiers but "generic"
FOLDER = options.current().cache_dir  # not that of a test


def level() -> str:
    """With which kernels are compiled."""
    return os.environ.get(LEVEL, O3)


@cache
def use() -> None:
    """Has kernels that this process and its forks compile begin so. What they are called in caches
    stays, where the code is the same; names end with another level.
    """
    real, version = build._compile, cache(build._version)
    name = build.LibrarySource.file

    def file(source: build.LibrarySource, compiler: build.Compiler) -> str:
        usual = Path(name(source, compiler))
        if level() == O3 or KERNELS not in source.include:
            return usual.name
        return f"{usual.stem}{level()}{usual.suffix}"

    def compile_(command: Sequence[str], source: build.LibrarySource, path: Path) -> None:
        if KERNELS in source.include:
            command = [level() if flag == O3 else flag for flag in command]
        # what is included before it, as emulated instructions are, would be left out
        first = KERNELS in source.include and "-include" not in command
        if first and "Free Software Foundation" in version((command[0],)):
            header = _header(tuple(command), "" if source.isa_level == "generic" else INTRINSICS)
            # gcc takes one if nothing stands before it
            sanitized = any(flag.startswith("-fsanitize") for flag in command)
            linked = () if sanitized else _libraries(command[0])  # those of sanitizers too
            command = [command[0], "-include", str(header), *command[1:], *linked]
        real(command, source, path)

    build.LibrarySource.file, build._compile = file, compile_  # type: ignore[method-assign]


@cache
def _header(command: tuple[str, ...], intrinsics: str) -> Path:
    """The header that gcc replaces by what it made of it under the same flags."""
    text = intrinsics + FIRST
    headers = (part for header in build._headers(text, [KERNELS]) for part in header)
    key = store.key_of(text, *headers, build._version(command[:1]), *command)
    with options.override(cache_dir=FOLDER):
        header = store.get_or_make(f"{key}.h", lambda path: path.write_text(text))
        store.get_or_make(
            f"{key}.h.gch",
            lambda path: build._run([*command, "-x", "c++-header", str(header), "-o", str(path)]),
        )
    return header


@cache
def _libraries(compiler: str) -> tuple[str, ...]:
    """Flags that link with libraries of no symbols, whose names are those that are loaded."""
    version = build._version((compiler,))
    empty = [compiler, "-shared", "-nostdlib", "-x", "c++", os.devnull]

    def made(name: str) -> Path:
        key = store.key_of(name, compiler, version)
        return store.get_or_make(
            f"{key}.so",
            lambda path: build._run([*empty, f"-Wl,-soname,{name}", "-o", str(path)]),
        )

    with options.override(cache_dir=FOLDER):
        return ("-nodefaultlibs", "-Wl,--no-as-needed", *map(str, map(made, EMPTY)), "-lm", "-lc")
