"""The kernels of offloaded experts, to be compiled for the CPU (cuda_on_cpu/)."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_cpu import copy

from fusion_moe.backends.cpu.readers import KERNELS as CPU_KERNELS
from fusion_moe.backends.cuda.launch import KERNELS as CUDA_KERNELS
from fusion_moe.offload.worker import KERNELS, SOURCE
from fusion_moe.runtime.native_source import INCLUDE

# encodings: of each number of bits of codes and of scales one, and those that GPUs read most
SOME = ["nvfp4", "mxfp4", "int4", "uint4_64", "nf4", "mxfp8", "fp8", "int8_32"]
HERE = Path(__file__).parent / "cuda_on_cpu"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """With all headers that need no PTX, beside what stands for the others."""
    made = tmp_path_factory.mktemp("kernels")
    more = (
        SOURCE,
        CPU_KERNELS / "thread_pool.h",
        INCLUDE / "launch_plan.h",
        CUDA_KERNELS / "combine.cuh",
    )
    copy(made, *KERNELS.glob("*.cuh"), *more, *HERE.iterdir())
    return made
