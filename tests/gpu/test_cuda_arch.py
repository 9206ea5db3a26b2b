"""The facts of this GPU, as its driver says them and as they are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_moe.arch import KNOWN
from fusion_moe.runtime import cuda

pytestmark = pytest.mark.gpu


def test_what_is_known_of_this_gpu_is_what_its_driver_says():
    index = torch.cuda.current_device()
    read, name = cuda.read_arch(index), torch.cuda.get_device_name(index)
    if name not in KNOWN:
        assert cuda.arch(index) == read
        pytest.skip(f"{name} is not known: {read}")
    known = cuda.arch(index)
    assert known is KNOWN[name]
    assert read.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=0.05)
    assert (
        replace(
            read, name=known.name, memory_bandwidth=known.memory_bandwidth, measured=known.measured
        )
        == known
    )


def test_it_is_what_torch_says():
    read, properties = cuda.read_arch(0), torch.cuda.get_device_properties(0)
    assert read.capability == (properties.major, properties.minor)
    assert read.multiprocessors == properties.multi_processor_count
    assert read.shared_per_multiprocessor == properties.shared_memory_per_multiprocessor
    assert read.shared_per_block == properties.shared_memory_per_block_optin
