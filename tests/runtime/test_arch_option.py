"""The option cuda_arch: which GPU kernels are made for. What a device stands for is computed by
arch.py (tests/test_arch.py), and run on one by tests/gpu.
"""

from __future__ import annotations

import pytest

from fusion_moe import options
from fusion_moe.arch import A100, H200, RTX_4090
from fusion_moe.errors import OptionError
from fusion_moe.runtime import cuda, nvrtc


@pytest.fixture
def on_an_h200(monkeypatch):
    monkeypatch.setattr(cuda, "device_facts", lambda index: H200)
    cuda._arch.cache_clear()
    yield
    cuda._arch.cache_clear()


def test_programs_are_planned_for_the_gpu_that_the_option_names():
    with options.override(cuda_arch="a100"):
        assert cuda.facts() is A100
    with options.override(cuda_arch="8.9"):
        assert cuda.facts().capability == RTX_4090.capability
    with (
        options.override(cuda_arch="Voodoo 2"),
        pytest.raises(OptionError, match="^option cuda_arch = 'Voodoo 2'; expected one of auto, "),
    ):
        cuda.facts()


def test_a_process_has_one_gpu_to_stand_in_for(on_an_h200):
    with options.override(cuda_arch="8.0"):
        assert cuda.arch(0).nvrtc == "compute_80,sm_90"
    with pytest.raises(
        OptionError, match="option cuda_arch = 'auto', after kernels for '8.0' on cuda:0"
    ):
        cuda.arch(0)


def test_a_newer_gpu_is_refused_each_time(on_an_h200):
    for _ in range(2):
        with options.override(cuda_arch="RTX 5090"), pytest.raises(OptionError, match="on H200"):
            cuda.arch(0)
    assert cuda.arch(0) is H200


@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
def test_gpus_that_nvrtc_does_not_know_get_ptx_of_the_newest_that_it_knows(monkeypatch):
    assert nvrtc.code_for((8, 0)) == ""
    monkeypatch.setattr(nvrtc, "_known", lambda: (80, 90, 120))
    assert nvrtc.code_for((9, 0)) == ""
    assert nvrtc.code_for((10, 3)) == "compute_90,sm_103"
    assert nvrtc.code_for((99, 0)) == "compute_120,sm_990"
