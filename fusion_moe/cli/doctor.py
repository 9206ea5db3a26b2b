"""fusion-moe doctor: what this machine runs, why not the rest, and what to do about it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
import typer
from rich.console import Console

from .. import __version__
from ..emit.nvfuser import library
from ..runtime import build, isa, nvrtc
from ..runtime.cuda import why_too_old
from .machine import has_cuda
from .output import FINE, PROBLEMS, Json, finish, table

PACKAGES = (
    "transformers", "safetensors", "cuda-bindings", "nvidia-cuda-nvrtc", "nvfuser-cu128-torch210", "lightning-thunder",
    "nvidia-modelopt", "compressed-tensors",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One thing that a machine may have. found: what, or why not; todo: what would change it."""

    name: str
    there: bool
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """versions: of packages, "" if one is not installed; runs: what multiplies by weights here."""

    versions: dict[str, str]
    checks: tuple[Check, ...]
    runs: str

    @property
    def exit_code(self) -> int:
        """1 where nothing is compiled, and all is computed in plain torch."""
        return FINE if self.runs else PROBLEMS

    def to_json(self) -> dict[str, Any]:
        """The fields of the classes here."""
        return {"schema": "fusion_moe.doctor/1", **asdict(self)}

    def print(self, console: Console) -> None:
        """What runs, what there is, versions."""
        console.print(
            self.runs or "problem: nothing can be compiled here, so everything is computed in plain torch, slowly", soft_wrap=True
        )
        console.print()
        rows = ((c.name, "yes" if c.there else "no", f"{c.found}; {c.todo}" if c.todo else c.found) for c in self.checks)
        console.print(table(("", "here", ""), rows))
        console.print()
        console.print(table(("package", "version"), ((name, version or "not installed") for name, version in self.versions.items())))


def doctor(context: typer.Context, json: Json = False) -> None:
    """What this machine runs: CPU, GPU, compilers, nvFuser, thunder, versions; why not the rest, and what to do."""
    finish(context, diagnosis, json)


def diagnosis() -> Diagnosis:
    """Looks at the machine; compiles nothing."""
    ours = {"python": platform.python_version(), "fusion_moe": __version__, "torch": torch.__version__}  # which says the build, too
    versions = ours | {name: _version(name) for name in PACKAGES}
    checks = (*_tiers(), _compiler(), _gpu(), _nvrtc(), _nvfuser(), _thunder(), _transformers())
    compiler = build.find_compiler()
    runs = f"CUDA kernels on {torch.cuda.get_device_name()}" if has_cuda() else f"C++ kernels for {isa.selected()}" if compiler else ""
    return Diagnosis(versions, checks, runs)


def _tiers() -> Iterator[Check]:
    for tier in isa.TIERS:
        there = tier in isa.available()
        lacks = isa.lacking(tier)
        yield Check(
            f"CPU, {tier}", there, "" if there else f"this CPU lacks {', '.join(lacks)}" if lacks else "the system does not allow tiles"
        )


def _compiler() -> Check:
    found = build.find_compiler()
    if found is None:
        return Check("C++ compiler", False, build.why_no_compiler())
    return Check("C++ compiler", True, f"{' '.join(found.command)}: {found.version.splitlines()[0]}")


def _gpu() -> Check:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return Check("GPU", False, f"torch {torch.__version__} is built without CUDA", "install a build of torch for CUDA")
        return Check("GPU", False, "torch finds no CUDA device", "look at what nvidia-smi says")
    major, minor = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory
    return Check("GPU", not why_too_old(), f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, {memory / 1e9:.0f} GB")


def _nvrtc() -> Check:
    why, _, todo = nvrtc.why_missing().partition("; ")
    return Check("NVRTC", not why, why or nvrtc.version(), todo)


def _nvfuser() -> Check:
    why, _, todo = library.why_missing().partition("; ")
    return Check("nvFuser", not why, why, todo)


def _thunder() -> Check:
    there = find_spec("thunder") is not None
    return Check(
        "thunder", there, "" if there else "not installed", "" if there else "pip install 'fusion_moe[thunder]' (torch before 2.13)"
    )


def _transformers() -> Check:
    there = find_spec("transformers") is not None
    return Check("transformers", there, "" if there else "not installed", "" if there else "pip install 'fusion_moe[models]'")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
