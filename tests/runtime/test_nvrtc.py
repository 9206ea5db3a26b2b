"""NVRTC. What it compiles is tested with the CUDA backend."""

from __future__ import annotations

import pytest

from fusion_moe import options
from fusion_moe.runtime import nvrtc

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
KERNEL = "__global__ void k(float* x) { x[0] = sinf(x[1]); }"


def test_a_log_of_one_byte_is_read_into_memory_of_its_own(tmp_path):
    """Python shares bytes objects of length 1: NVRTC once wrote over all of b" "."""
    with options.override(cache_dir=str(tmp_path)):
        nvrtc.build(KERNEL, name="k", arch="sm_90a", headers=nvrtc.Headers())
    assert ord(b" ") == 32
