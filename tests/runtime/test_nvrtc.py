"""NVRTC: how long it may take, and where its cubins are kept. What it compiles is tested with the
CUDA backend.
"""

from __future__ import annotations

import subprocess

import pytest

from fusion_moe import options
from fusion_moe.errors import BuildError
from fusion_moe.runtime import nvrtc

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
KERNEL = (
    "__global__ void k%d(float* x) { for (int i = 0; i < 100; i++) x[i] = x[i + 1] * %d.5f + "
    "sinf(x[i]); }\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """cache_dir of the test."""
    with options.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def build(kernels=1):
    return nvrtc.build(
        "".join(KERNEL % (i, i) for i in range(kernels)),
        name="k",
        arch="sm_90a",
        headers=nvrtc.Headers(),
    )


def test_a_compilation_that_takes_too_long_is_ended(folder):
    said = "k: NVRTC took more than 1 s; raise FUSION_MOE_COMPILE_SECONDS"
    with options.override(compile_seconds=1), pytest.raises(BuildError, match=said):
        build(2000)
    assert [p.suffix for p in folder.iterdir()] == [".lock"]
    with options.override(compile_seconds=100):
        assert build().read_bytes().startswith(b"\x7fELF")


def test_a_log_of_one_byte_is_read_into_memory_of_its_own():
    """Python shares bytes objects of length 1: NVRTC once wrote over all of b" "."""
    build()
    assert ord(b" ") == 32


def test_a_folder_without_space(folder):
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=700,size=4k", "small", folder], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        with pytest.raises(
            BuildError,
            match=r"k: the compiled kernel could not be written: .*No "
            r"space left on device; free some space",
        ):
            build()
        assert [p.suffix for p in folder.iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", folder], check=True)
