"""The facts of this GPU, as its driver says them and as they are known, and another GPU that it
stands in for.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from fusion_moe import options
from fusion_moe.arch import AUTO, KNOWN, standing_in
from fusion_moe.errors import BuildError, OptionError
from fusion_moe.runtime import cuda, nvrtc

pytestmark = pytest.mark.gpu
# what a block of it sees: its compute capability, as PTX was compiled, and that blocks have run
KERNEL = """
extern "C" __global__ void __launch_bounds__(128) k(int* out) {
    extern __shared__ int memory[];
    memory[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = __CUDA_ARCH__ + memory[127];
}
"""


def test_what_is_known_of_this_gpu_is_what_its_driver_says():
    index = torch.cuda.current_device()
    read, name = cuda.read_arch(index), torch.cuda.get_device_name(index)
    if name not in KNOWN:
        assert cuda.device_facts(index) == read
        pytest.skip(f"{name} is not known: {read}")
    known = cuda.device_facts(index)
    assert known is KNOWN[name] or known == replace(KNOWN[name], code=known.code)
    assert read.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=0.05)
    assert read.tensor_rate == pytest.approx(known.tensor_rate, rel=0.15)  # at another clock
    assert (
        replace(
            read,
            name=known.name,
            memory_bandwidth=known.memory_bandwidth,
            tensor_rate=known.tensor_rate,
            code=known.code,
        )
        == known
    )


def test_it_is_what_torch_says():
    read, properties = cuda.read_arch(0), torch.cuda.get_device_properties(0)
    assert read.capability == (properties.major, properties.minor)
    assert read.multiprocessors == properties.multi_processor_count
    assert read.shared_per_multiprocessor == properties.shared_memory_per_multiprocessor
    assert read.shared_per_block == properties.shared_memory_per_block_optin


def test_it_is_used_as_the_option_says():
    asked, used = options.current().cuda_arch, cuda.arch(0)
    own = cuda.device_facts(0)
    assert used == (own if asked == AUTO else standing_in(own, asked))
    with (
        options.override(cuda_arch="8.0" if asked != "8.0" else AUTO),
        pytest.raises(OptionError, match="one value in a process"),
    ):
        cuda.arch(0)


@pytest.fixture(params=["8.0", "8.6", "8.9"])
def older(request, monkeypatch):
    """An older GPU that this one stands in for."""
    own = cuda.device_facts(0)
    if own.capability <= tuple(map(int, request.param.split("."))):
        pytest.skip(f"{own.name} is not newer")
    found = standing_in(own, request.param)
    monkeypatch.setattr(cuda, "arch", lambda index: found)
    return found


def loaded(gpu, shared: int):
    path = nvrtc.build(KERNEL, name="k", arch=gpu.nvrtc, headers=nvrtc.Headers())
    assert nvrtc.is_built(KERNEL, name="k", arch=gpu.nvrtc, headers=nvrtc.Headers())
    return cuda.load(path, "k", shared)


def test_ptx_of_an_older_gpu_runs_as_its_kernels_do(older):
    function = loaded(older, 1024)
    cuda.check_room(function, 0, "k", 128, 1024)
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    value = ctypes.c_void_p(out.data_ptr())
    params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    stream = torch.cuda.current_stream().cuda_stream
    cuda.Launch(function, 3, 128, 1024, older.programmatic_launch)(stream, ctypes.addressof(params))
    major, minor = older.capability
    assert out.tolist() == [100 * major + 10 * minor + 127] * 3


def test_what_the_older_gpu_has_no_room_for_is_refused(older):
    most = older.shared_per_block
    function = loaded(older, most)
    cuda.check_room(function, 0, "k", 128, most)
    with pytest.raises(BuildError, match="bytes of shared memory of a block"):
        cuda.check_room(function, 0, "k", 128, most + 1024)
    with pytest.raises(BuildError, match="17 blocks of k a multiprocessor: 2176 threads|17 blocks"):
        cuda.check_room(function, 0, "k", 128, 1024, 17)
