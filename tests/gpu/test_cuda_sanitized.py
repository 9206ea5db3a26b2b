"""The CUDA backend's kernels under compute-sanitizer: they stay in their memory, wait for each
other, read what was written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def sanitizer() -> str:
    """The program, on the PATH, beside nvcc, or where CUDA is usually installed; skips where it is
    in none of these.
    """
    nvcc = shutil.which("nvcc")
    folders = [
        os.environ.get("PATH", os.defpath),
        "/usr/local/cuda/bin",
        *([str(Path(nvcc).resolve().parent)] if nvcc else []),
    ]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if not found:
        pytest.skip("compute-sanitizer is not installed; it is a part of the CUDA toolkit")
    return found


FP8 = pytest.param("fp8", marks=pytest.mark.needs("wgmma"))
PARTS = ["training", "loops", "linear", "tiled", "mma", "wide", FP8, "adapters", "copies"]
# and with the kernels of other GPUs
PARTS += ["routers", "training 8.0", "adapters 8.0", "fp8 8.9"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_clean(tool, part, request):
    part, _, arch = part.partition(" ")
    few = [] if request.config.getoption("--all") else ["--few"]
    script = Path(__file__).parent / "cuda_sanitized.py"
    # memory past the end of a tensor is nobody's
    one_allocation_each = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment = {**os.environ, **one_allocation_each, "PYTHONPATH": os.pathsep.join(sys.path)}
    if arch:
        environment["FUSION_MOE_CUDA_ARCH"] = arch
    # cuda-bindings asks the driver for functions that it does not have
    own_errors = ["--error-exitcode", "1", "--report-api-errors", "no"]
    command = [sanitizer(), "--tool", tool, *own_errors, sys.executable, str(script), part, *few]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device or virtual machine")
    assert (done.returncode, "\nclean\n" in f"\n{done.stdout}") == (0, True), (
        done.stdout + done.stderr
    )
