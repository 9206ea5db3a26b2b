"""Creates the virtual environment of the full lane, or prints in one line why there can be none
here.

    python tools/full_lane.py .venv-full

What is there already is kept. The packages are the Makefile's business.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.12", "3.10")  # nvFuser has wheels for these alone
LARGE = ("torch", "triton", "nvidia", "nvfuser_direct")
NEEDED_GB = 12  # 7.5 stay; while pip installs, the 4 that it downloads lie beside them


def why_not(folder: Path) -> str | None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "nvFuser has wheels for x86-64 Linux alone"
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        return f"{folder} is something else than a virtual environment"  # which would be cleared
    base = None
    if not any(works(folder / "bin" / "python", version, "pip") for version in VERSIONS):
        base = next(
            (
                python
                for version in VERSIONS
                for python in pythons(version)
                if works(python, version, "ensurepip, venv")
            ),
            None,
        )
        if base is None:
            return f"no Python {' or '.join(VERSIONS)} on PATH or in pyenv"
    installed = base is None and all(
        any(folder.glob(f"lib/python*/site-packages/{name}")) for name in LARGE
    )
    free_gb = (
        shutil.disk_usage(
            next(parent for parent in folder.resolve().parents if parent.exists())
        ).free
        / 1e9
    )
    if free_gb < NEEDED_GB and not installed:
        return (
            f"its installation in {folder} takes {NEEDED_GB} GB of disk, {free_gb:.1f} GB are free"
        )
    if base:
        print(f"creating {folder} with {base}", file=sys.stderr)
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
    return None


def pythons(version: str) -> Iterator[Path]:
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(
        pyenv.glob(f"versions/{version}.*/bin/python{version}"), key=numbers, reverse=True
    )


def numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def works(python: Path, version: str, modules: str) -> bool:
    """Asks it: pyenv has commands that only say that their version is not selected, Debian has
    Pythons without venv.
    """
    code = (
        f"import {modules}, sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
    )
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    if reason := why_not(Path(sys.argv[1])):
        print(reason)
