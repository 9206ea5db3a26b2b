"""Hatchling's hook that builds the CPU's fixed kernels into the wheel:
fusion_moe/backends/cpu/shipped/.

A wheel gets them for each built-in encoding of weights and every kind of CPU of this architecture,
an editable install for this CPU alone. Without a C++ compiler it gets none, and is pure Python: a
compiler at the user's then builds them at first use. HATCH_BUILD_NO_HOOKS=true leaves them out too.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What CPUs have beyond their tier, as runtime/isa.py names it: kernels use it where it is.
CPUS = {
    "amx": ((),),
    "avx512": ((), ("avx512_bf16", "avx512_vnni"), ("avx512_bf16", "avx512_vnni", "avx512_fp16")),
    "avx2": ((),),
    "generic": ((),),
}


class KernelHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build, isa, readers, messages = _modules(Path(self.root))
        if build.find_compiler() is None or sys.platform != "linux":
            self.app.display_warning("no C++ compiler for the CPU's kernels: the package gets none")
            return
        if version == "editable":
            wanted = [(tier, isa.features()) for tier in isa.available()]
        else:
            wanted = [
                (tier, having) for tier in isa.TIERS if _runs_here(tier) for having in CPUS[tier]
            ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            libraries = [
                (readers.library_source(tier, encoding), having)
                for tier, having in wanted
                for encoding in readers.BUILT_IN
            ]
            what = "compiling the CPU's kernels"
            self.app.display_info(f"{what}: {len(libraries)} files")
            done = pool.map(partial(self._ship, build), *zip(*libraries, strict=True))
            made = set(messages.progress(done, what, len(libraries)))
        for old in set(readers.SHIPPED.glob("*.so")) - made:
            old.unlink(missing_ok=True)
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )

    def _ship(self, build: Any, source: Any, having: Any) -> Path | None:
        """None, and a warning, for instructions that the compiler does not know: the package does
        without.
        """
        path = source.came_with(having)
        try:
            return path if path.is_file() else build.ship(source, having)
        except build.BuildError as error:
            self.app.display_warning(f"no kernels for CPUs of the tier {source.tier}: {error}")
            return None


def _runs_here(tier: str) -> bool:
    return tier == "generic" or os.uname().machine == "x86_64"


def _modules(root: Path) -> tuple[Any, ...]:
    """fusion_moe.runtime.build and .isa, fusion_moe.backends.cpu.readers and messages.progress,
    without the packages around them, which need torch.
    """
    for name in ("fusion_moe", "fusion_moe.backends", "fusion_moe.backends.cpu"):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
    modules = (
        importlib.import_module(f"fusion_moe.{name}")
        for name in ("runtime.build", "runtime.isa", "backends.cpu.readers", "messages.progress")
    )
    return tuple(modules)
