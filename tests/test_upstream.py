"""The patches for other projects in docs/upstream: they apply to the installed package, and the
tests that they bring pass on the patched one. nvFuser's wheel has no tests to patch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[1] / "docs" / "upstream"


def apply(patch: Path, installed: Path, folder: Path) -> list[str]:
    """Writes the files of the patch below the folder, patched, those that do not fit left out."""
    names = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), re.MULTILINE)
    for name in names:
        if (installed / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / name, folder / name)
    command = ["git", "apply", str(patch)]
    fitting = [
        name
        for name in names
        if not subprocess.run([*command, "--check", f"--include={name}"], cwd=folder).returncode
    ]
    subprocess.run([*command, *(f"--include={n}" for n in fitting)], cwd=folder, check=True)
    return fitting


def overlay(package: Path, into: Path, patched: dict[Path, Path]) -> None:
    """Links to all files of the package, but for those that are patched."""
    into.mkdir(parents=True)
    for entry in package.iterdir():
        if entry in patched:
            shutil.copy(patched[entry], into / entry.name)
        elif any(file.is_relative_to(entry) for file in patched):
            overlay(entry, into / entry.name, patched)
        else:
            (into / entry.name).symlink_to(entry)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "package"),
    [
        pytest.param("torch_broadcast", "torch", marks=pytest.mark.once),
        pytest.param("thunder_nvfp4_zeros", "thunder", marks=pytest.mark.thunder),
        pytest.param("thunder_derivative", "thunder", marks=pytest.mark.thunder),
    ],
)
def test_a_patch(name, package, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git applies the patch")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    origin, folder = Path(spec.origin).parent, tmp_path / "patched"
    folder.mkdir()
    fitting = apply(PATCHES / f"{name}.patch", origin.parent, folder)
    patched = {origin.parent / f: folder / f for f in fitting if (origin.parent / f).exists()}
    if not patched:
        pytest.skip(f"{name}.patch is for another version of {package}: make test-thunder")
    overlay(origin, tmp_path / "packages" / package, patched)
    (test,) = (f for f in fitting if Path(f).name.startswith("test_"))
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    # ranks that meet under the name of the machine depend on its network
    fixed = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [sys.executable, "-m", "pytest", test],
        cwd=folder,
        env=os.environ | fixed,
        check=True,
    )
