"""Makes an nvFuser wheel that was built for torch 2.10 load under torch 2.11, for checks on
machines that have only that.

    python benchmarks/nvfuser_shim.py nvfuser_cu130_torch210-*.whl /tmp/nvfuser
    LD_PRELOAD=/tmp/nvfuser/shim.so PYTHONPATH=/tmp/nvfuser python ...

torch 2.11 lacks one symbol of 2.10, the constructor of c10::MessageLogger, which only writes
warnings. The shim has a constructor of that name that says so and aborts: the class has grown, so
that none could be right. The CUDA libraries that the wheel brings are left out, and those of
torch's own packages are put in their place. Needs g++; nothing outside of the folder is written.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import files
from pathlib import Path

_SHIM = r"""
#include <cstdio>
#include <cstdlib>
extern "C" void _ZN3c1013MessageLoggerC1EPKciib(void*, const char* file, int line, int, bool) {
  std::fprintf(stderr, "nvFuser warns at %s:%d; this torch cannot show the message\n", file, line);
  std::abort();
}
"""
_LIBRARIES = {
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libcupti": "nvidia-cuda-cupti",
    "libcudart": "nvidia-cuda-runtime",
}


def unpack(wheel: Path, folder: Path) -> None:
    """The wheel's files in the folder, its CUDA libraries replaced by links to the installed
    ones.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            library = Path(name).name.split("-")[0].split(".")[0]
            if ".libs/" in name and library in _LIBRARIES:
                link = folder / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(_installed(library))
            else:
                archive.extract(name, folder)


def _installed(library: str) -> Path:
    """The library of that name in torch's CUDA packages."""
    found = [f for f in files(_LIBRARIES[library]) or [] if f.name.startswith(f"{library}.so.")]
    if not found:
        raise SystemExit(
            f"{_LIBRARIES[library]} has no {library}: install torch with CUDA from PyPI"
        )
    return Path(found[0].locate()).resolve()


def main(wheel: str, folder: str) -> None:
    """Unpacks the wheel and builds the shim."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    unpack(Path(wheel), root)
    compiler = shutil.which("g++") or sys.exit("g++ is not on PATH")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c++", "-o", root / "shim.so", "-"],
        input=_SHIM,
        text=True,
        check=True,
    )
    print(f"LD_PRELOAD={root / 'shim.so'} PYTHONPATH={root}")


if __name__ == "__main__":
    main(*sys.argv[1:])
