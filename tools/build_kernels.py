"""Builds the CPU's fixed kernels into fusion_moe/backends/cpu/shipped/: Hatchling's hook for wheels
and editable installs, and a program that says what it does, which pip would hide.

    python tools/build_kernels.py     # needs no package; the hook then finds them there

An install gets them for each built-in encoding of weights, and for quantizing, for the best kind of
this CPU; others are compiled when they are first used. What is distributed (make dist) has every
kind of CPU of the architecture, by KERNELS_FOR=all. The C++ that runs calls without Python fits one
release of torch: the one that is installed already, or those in NATIVE_FOR=FOLDER:FOLDER. Without a
C++ compiler there are none, and the wheel is pure Python: a compiler at the user's then builds them
at first use. HATCH_BUILD_NO_HOOKS=true leaves them out too.

CUDA kernels of common layers come only by CUBINS=FILE, which tools/build_cubins.py wrote.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program
    BuildHookInterface = object

# What CPUs have beyond their ISA level, as runtime/isa.py names it: kernels use it where it is.
CPUS = {
    "amx": ((),),
    "avx512": ((), ("avx512_bf16", "avx512_vnni"), ("avx512_bf16", "avx512_vnni", "avx512_fp16")),
    "avx2": ((),),
    "generic": ((),),
}


SECONDS = 4  # of a core, for a file
CUBINS = "fusion_moe/runtime/shipped/cubins.xz"


class KernelHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if (cubins := os.environ.get("CUBINS")) and version != "editable":
            build_data["force_include"][cubins] = CUBINS
        torches = [] if version == "editable" else _torches()  # its folder serves all torches
        if compile_all(Path(self.root), self.app.display_info, self.app.display_warning, torches):
            build_data["pure_python"] = False
            build_data["tag"] = (
                f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            )


def compile_all(
    root: Path,
    info: Callable[[str], object],
    warn: Callable[[str], object],
    torches: Sequence[Path] = (),
) -> bool:
    """Compiles what is wanted and not there, and removes what is there and not wanted. False
    without a compiler. torches: packages that calls without Python are wanted for.
    """
    build, isa, readers, messages, native_source = _modules(root)
    if build.find_compiler() is None or sys.platform != "linux":
        warn(
            f"no kernels for the CPU: {build.why_no_compiler()}. What this builds computes in "
            "plain torch, slowly, until there is one; python -m fusion_moe.env says so"
        )
        return False
    if os.environ.get("KERNELS_FOR") == "all":
        wanted = [
            (isa_level, having)
            for isa_level in isa.LEVELS
            if _runs_here(isa_level)
            for having in CPUS[isa_level]
        ]
    else:
        wanted = [(isa.available()[0], isa.features())]
    libraries = [
        (source, having) for isa_level, having in wanted for source in readers.packaged(isa_level)
    ]
    libraries += [(native_source.of_folder(torch), ()) for torch in torches]
    missing = sum(not source.came_with(having).is_file() for source, having in libraries)
    what = "compiling the CPU's kernels"
    if missing:
        isa_levels = ", ".join(dict.fromkeys(isa_level for isa_level, _ in wanted))
        info(f"{what}: {missing} files for {isa_levels}, about {_minutes(missing)} on idle cores")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(partial(_ship, build, warn), *zip(*libraries, strict=True))
        made = set(messages.progress(done, what, len(libraries)))
    for shipped in (readers.SHIPPED, native_source.SHIPPED)[: 2 if torches else 1]:
        for old in set(shipped.glob("*.so")) - made:
            old.unlink(missing_ok=True)
    return True


def _ship(build: Any, warn: Callable[[str], object], source: Any, having: Any) -> Path | None:
    """None, and a warning, for instructions that the compiler does not know: the package does
    without.
    """
    path = source.came_with(having)
    try:
        return path if path.is_file() else build.ship(source, having)
    except build.BuildError as error:
        warn(f"no {source.name} for CPUs of the ISA level {source.isa_level}: {error}")
        return None


def _torches() -> list[Path]:
    """The packages in the folders of NATIVE_FOR; without it, the one beside which pip installs: it
    builds apart from what is installed, by the same interpreter.
    """
    folders = os.environ.get("NATIVE_FOR") or sysconfig.get_path("platlib")
    packages = (Path(folder) / "torch" for folder in folders.split(":"))
    return [package for package in packages if (package / "version.py").is_file()]


def _minutes(files: int) -> str:
    seconds = files * SECONDS / (os.cpu_count() or 1)
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _runs_here(isa_level: str) -> bool:
    return isa_level == "generic" or os.uname().machine == "x86_64"


def _modules(root: Path) -> tuple[Any, ...]:
    """fusion_moe.runtime.build and .isa, fusion_moe.backends.cpu.readers, messages.progress and
    runtime.native_source, without the packages around them, which need torch.
    """
    for name in ("fusion_moe", *(f"fusion_moe.backends{n}" for n in ("", ".cpu", ".cxx"))):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
    modules = (
        importlib.import_module(f"fusion_moe.{name}")
        for name in (
            "runtime.build",
            "runtime.isa",
            "backends.cpu.readers",
            "messages.progress",
            "runtime.native_source",
        )
    )
    return tuple(modules)


if __name__ == "__main__":
    say = partial(print, file=sys.stderr, flush=True)
    compile_all(Path(__file__).resolve().parents[1], say, say)
