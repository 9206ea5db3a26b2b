"""What this machine runs, why not the rest, and what to do about it, for people and for bug
reports: `python -m fusion_moe.env`.

Nothing is compiled or downloaded, but the cache folder is created. The home folder is written as ~.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from . import __version__, backends, options, plugins, target
from .backends.cpu import readers
from .backends.cuda.heuristics import check_variant
from .errors import OptionError
from .plugins import Package
from .runtime import build, cuda, isa, native, nvrtc, shipped_cubins, store
from .runtime.cuda import why_too_old

PACKAGES = (
    "safetensors",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-modelopt",
    "compressed-tensors",
)


@dataclass(frozen=True)
class Check:
    """One thing that a machine may have. found: what, or why not; todo: what would change it."""

    name: str
    there: bool
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Environment:
    """versions: of packages, "" if one is not installed; options: those that differ from the
    defaults; runs: what multiplies by weights here, "" if nothing can be compiled and not all
    prebuilt products came: plain torch computes what they do not; problems: of options and of
    environment variables that look like one.
    """

    versions: dict[str, str]
    options: dict[str, str]
    checks: tuple[Check, ...]
    runs: str
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The findings as dicts, lists, strings and numbers, with a `schema` that changes if fields
        do: `fusion-moe doctor --json`.
        """
        return {"schema": "fusion_moe.env/1", **asdict(self)}

    def __str__(self) -> str:
        there = [
            (c.name, "yes" if c.there else "no", f"{c.found}; {c.todo}" if c.todo else c.found)
            for c in self.checks
        ]
        versions = [(name, version or "not installed") for name, version in self.versions.items()]
        options = [(name, value) for name, value in self.options.items()] or [
            ("all", "as by default")
        ]
        nothing = (
            "problem: nothing can be compiled here; plain torch computes everything but products "
            "that came with the package, slowly"
        )
        parts = [
            "\n".join(
                [self.runs or nothing, *(f"problem: {problem}" for problem in self.problems)]
            ),
            _columns(("", "here", ""), *there),
            _columns(("", "version"), *versions),
            _columns(("option", "value"), *options),
        ]
        return "\n\n".join(parts)


def environment() -> Environment:
    """Looks at the machine and creates the cache folder; compiles nothing."""
    # which says the build, too
    ours = {
        "python": platform.python_version(),
        "fusion_moe": __version__,
        "torch": torch.__version__,
    }
    packages = [package for ask in plugins.packages for package in ask()]
    names = (*PACKAGES, *(package.distribution for package in packages))
    versions = ours | {"system": platform.platform()} | {name: _version(name) for name in names}
    checks = (
        # by python -m that of the current folder, if it has one
        Check("package", True, str(Path(__file__).parent)),
        *_isa_levels(),
        _numa(),
        _compiler(),
        prebuilt := _prebuilt(),
        _native(),
        _gpu(),
        _nvrtc(),
        _cubins(),
        *map(_package, packages),
        _cache(),
    )
    checks = tuple(replace(check, found=_without_home(check.found)) for check in checks)
    runs = ""
    if has_cuda():
        runs = f"CUDA kernels on {torch.cuda.get_device_name()}"
    elif build.find_compiler():
        runs = f"C++ kernels for {_isa_level()}"
    elif prebuilt.there:
        runs = f"prebuilt C++ products for {_isa_level()}, plain torch around them: no C++ compiler"
    return Environment(versions, _changed_options(), checks, runs, tuple(_problems()))


def has_cuda() -> bool:
    """Whether CUDA kernels can be compiled and run here."""
    return torch.cuda.is_available() and not (nvrtc.why_missing() or why_too_old())


def _changed_options() -> dict[str, str]:
    now, usual = options.current(), options.Options()
    results = (
        (f.name, getattr(now, f.name))
        for f in fields(now)
        if getattr(now, f.name) != getattr(usual, f.name)
    )
    return {name: _without_home(str(value)) for name, value in results}


def _problems() -> Iterator[str]:
    """Names that no option has, and values that raise when they are first used: they are names,
    too.
    """
    yield from options.ignored()
    now = options.current()
    for look in (
        lambda: backends.find(now.target, torch.device("cpu")),
        isa.selected,
        lambda: check_variant(now.cuda_variant),
        cuda.facts,
    ):
        try:
            look()
        except OptionError as error:
            yield str(error)


def _isa_level() -> str:
    """What C++ kernels are compiled for; of an option that is wrong, what they would be without
    it.
    """
    with suppress(OptionError):
        return isa.selected()
    return isa.available()[0]


def _isa_levels() -> Iterator[Check]:
    for isa_level in isa.LEVELS:
        there = isa_level in isa.available()
        lacks = isa.lacking(isa_level)
        yield Check(
            f"CPU, {isa_level}",
            there,
            ""
            if there
            else f"this CPU lacks {', '.join(lacks)}"
            if lacks
            else "the system does not allow tiles",
        )


def _numa() -> Check:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes < 2:
        return Check("NUMA", False, "all memory is on one node")
    todo = "to read weights from all of them: numactl --interleave=all"
    return Check("NUMA", True, f"{nodes} nodes", todo)


def _compiler() -> Check:
    compiler = build.find_compiler()
    if compiler is None:
        return Check("C++ compiler", False, build.why_no_compiler())
    return Check(
        "C++ compiler", True, f"{' '.join(compiler.command)}: {compiler.version.splitlines()[0]}"
    )


def _prebuilt() -> Check:
    """Products that came with the package, for this CPU: those of a wheel that was built without a
    compiler are none.
    """
    isa_level = _isa_level()
    came = sum(readers.came(isa_level, encoding) for encoding in readers.BUILT_IN)
    if came == len(readers.BUILT_IN):
        return Check("prebuilt products", True, f"{came}, for {isa_level}")
    text = f"{came} of {len(readers.BUILT_IN)} for {isa_level} came with this installation"
    if build.find_compiler():
        return Check("prebuilt products", False, f"{text}; others are compiled when first used")
    todo = "install a C++ compiler, or a wheel that was built with one"
    return Check("prebuilt products", False, f"{text}: plain torch computes others", todo)


def _native() -> Check:
    if why := native.why_not():
        return Check("calls without Python", False, why)
    return Check(
        "calls without Python",
        True,
        "from a process's second call on"
        if native.is_built()
        else "once prepare_ or a compiled graph compiles them; until then calls go through Python",
    )


def _gpu() -> Check:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Check(
                "GPU",
                False,
                f"torch {torch.__version__} is built without CUDA",
                "install a build of torch for CUDA",
            )
        return Check("GPU", False, "torch finds no CUDA device", "look at what nvidia-smi says")
    capability, memory = (
        torch.cuda.get_device_capability(),
        torch.cuda.get_device_properties(0).total_memory,
    )
    text = (
        f"{torch.cuda.get_device_name()}, compute capability "
        f"{'.'.join(map(str, capability))}, {memory / 1e9:.0f} GB"
    )
    never = why_too_old() or target.never_run(backends.TARGETS["cuda"], capability)
    return Check("GPU", not why_too_old(), f"{text}; {never}" if never else text)


def _nvrtc() -> Check:
    why, _, todo = nvrtc.why_missing().partition("; ")
    return Check("NVRTC", not why, why or nvrtc.version(), todo)


def _cubins() -> Check:
    """Kernels for CUDA that came with the package."""
    came = shipped_cubins.archive(shipped_cubins.ARCHIVE)
    if why := came.why_not:
        return Check("prebuilt CUDA kernels", False, f"{why}; all are compiled when first used")
    text = f"by NVRTC {came.nvrtc}, for Hopper and layers of {', '.join(came.layers)}"
    return Check("prebuilt CUDA kernels", True, text)


def _package(package: Package) -> Check:
    why, _, todo = package.why_missing.partition("; ")
    return Check(package.name, not why, why, todo)


def _cache() -> Check:
    folder = Path(options.current().cache_dir).expanduser()
    if why := store.why_unusable():
        return Check(
            "cache",
            False,
            f"{folder} {why}; a temporary folder is used",
            "set FUSION_MOE_CACHE_DIR to another folder",
        )
    return Check(
        "cache", True, f"{folder}: {sum(len(files) for *_, files in os.walk(folder))} files"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _without_home(text: str) -> str:
    """Bug reports are public; the name of a home folder is often a person's."""
    try:
        home = str(Path.home())
    except RuntimeError:  # a user without one
        return text
    return text.replace(home, "~") if home != "/" else text


def _columns(*rows: tuple[str, ...]) -> str:
    """Rows of equally many cells; the last column is as wide as it likes."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join(
            [*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    print(environment())
