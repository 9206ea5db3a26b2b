"""How native.cpp is built against a torch. Imports none, since tools/build_kernels.py builds it
into wheels, for the releases of torch that it is given.

Why for each: torch's stable ABI (torch/csrc/stable, of 2.13 and of 2.15) has no way below autograd,
knows no tangents, and does not say whether a profiler runs. Headers and symbols of a release are
the same in its builds for CPUs and for each CUDA.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import build

TEXT = Path(__file__).with_name("native.cpp")
SHIPPED = TEXT.with_name("shipped")  # filled when the package is built
INCLUDE = TEXT.parent  # the folder of launch_plan.h


def of(torch: Path, version: str, commit: str) -> build.LibrarySource:
    """For the package torch in a folder, of a version and of the commit that it was built from."""
    release = version.partition("+")[0]  # without what it was built for
    return build.LibrarySource(
        TEXT.read_text(encoding="utf-8"),
        "native",
        "generic",
        (INCLUDE, torch / "include"),
        ("-std=c++20", "-O1", f'-DTORCH="{release} {commit}"', "-Wl,--no-as-needed"),
        SHIPPED,
        tuple([torch / "lib" / f"lib{name}.so" for name in ("torch_cpu", "c10")]),
    )


def of_folder(torch: Path) -> build.LibrarySource:
    """For the package torch in a folder, which says its version."""
    text = (torch / "version.py").read_text(encoding="utf-8")
    version, commit = (
        re.findall(rf"^{name} = '(.*)'$", text, re.MULTILINE)[0]
        for name in ("__version__", "git_version")
    )
    return of(torch, version, commit)
