"""Cubins on CUDA devices: loaded once, launched on torch's current stream.

    function = load(path, "route", shared)                      # -> Function, for all devices of
        one architecture
    launch = Launch(function, blocks, threads, shared, programmatic_launch)
        launch(stream, params)                          # params: the address of an array with the
                                                        addresses of the parameters

Kernels report faults in words of pinned memory: faults.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from .. import options
from ..arch import AUTO, H200, RESERVED, Arch, find, like, named, shown, standing_in, tensor_rate
from ..errors import BuildError, OptionError, UnsupportedError
from . import nvrtc, timeline
from .driver import checked, driver, make_current, version_number

_STREAMS = 64  # how many a launch remembers
_MAPS = 4096  # how many a process remembers
_MAP_BYTES = 128
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_FUNC_LOAD = 12040  # the first driver that loads functions when asked
Function = Any  # the driver's handle of a kernel


def arch(index: int) -> Arch:
    """The GPU that kernels for a device are made for: the device, or what the option cuda_arch has
    it stand in for. UnsupportedError below compute capability 8.0; OptionError for a GPU that is
    unknown or newer than the device, and if the option has changed.
    """
    asked, (first, result) = options.current().cuda_arch, _arch(index)
    if asked != first:
        raise OptionError(
            f"option cuda_arch = {asked!r}, after kernels for {first!r} on cuda:{index}",
            expected="one value in a process",
            todo="set FUSION_MOE_CUDA_ARCH before the process starts",
        )
    return result


@cache
def _arch(index: int) -> tuple[str, Arch]:
    """The option cuda_arch when it is first needed, and the GPU that it stands for."""
    asked, result = options.current().cuda_arch, device_facts(index)
    return asked, result if asked == AUTO else standing_in(result, asked)


@cache
def device_facts(index: int) -> Arch:
    """The facts of a device. Its kernels are PTX, which the driver compiles, if NVRTC does not know
    its compute capability.
    """
    if why := _why_too_old(f"cuda:{index}", torch.cuda.get_device_capability(index)):
        raise UnsupportedError(
            why, todo="options.override(target='reference') computes in plain torch", where="cuda"
        )
    result = find(read_arch(index))
    return replace(result, code=nvrtc.code_for(result.capability))


def facts() -> Arch:
    """The GPU that programs are planned for: the one that the option cuda_arch names, else the
    current device, else an H200. Of a device only what torch knows: its name and kind.
    """
    if (asked := options.current().cuda_arch) != AUTO:
        return named(asked, "option cuda_arch", [AUTO])
    if not torch.cuda.is_available():
        return H200
    device_properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return like(
        device_properties.name,
        (device_properties.major, device_properties.minor),
        device_properties.multi_processor_count,
    )


def read_arch(index: int) -> Arch:
    """The facts that the driver reports about a device."""
    d, properties = driver(), torch.cuda.get_device_properties(index)

    def attribute(name: str) -> int:
        asked = getattr(d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(d.cuDeviceGetAttribute(asked, d.CUdevice(index)), name))

    bits_a_clock = 2 * attribute("GLOBAL_MEMORY_BUS_WIDTH")  # data on both clock edges
    capability, count = (properties.major, properties.minor), attribute("MULTIPROCESSOR_COUNT")
    return Arch(
        properties.name,
        capability,
        count,
        attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("L2_CACHE_SIZE"),
        1e3 * attribute("MEMORY_CLOCK_RATE") * bits_a_clock / 8,
        tensor_rate(properties.name, capability, count, 1e3 * attribute("CLOCK_RATE")),
        attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        attribute("MAX_THREADS_PER_MULTIPROCESSOR") // 32,
        attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
    )


def why_too_old() -> str:
    """Why kernels cannot run on the current device; empty if they can, if there is no device, or if
    they are only looked at, by the option cuda_arch.
    """
    return (
        _why_too_old("this GPU", torch.cuda.get_device_capability())
        if torch.cuda.is_available() and options.current().cuda_arch == AUTO
        else ""
    )


def _why_too_old(device: str, capability: tuple[int, int]) -> str:
    return (
        ""
        if capability >= (8, 0)
        else f"{device} has compute capability {shown(capability)}, kernels require 8.0 or higher"
    )


def index_of(device: torch.device) -> int:
    """The index of a CUDA device; that of the current one if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph; then nothing may be compiled
    or loaded.
    """
    return torch.cuda.is_current_stream_capturing()


# Launches -----------------------------------------------------------------------------------------


@cache
def load(path: Path, name: str, shared: int) -> Function:
    """A kernel of a cubin, which may use up to `shared` bytes of shared memory. BuildError if it
    does not load.
    """
    d, code = driver(), path.read_bytes()
    library = checked(d.cuLibraryLoadData(code, None, None, 0, None, None, 0), str(path))
    kernel = checked(d.cuLibraryGetKernel(library, name.encode()), str(path))
    timeline.add(name, library, code)
    if shared:  # with what a kernel declares, it may be more than it gets without asking
        most = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for device in range(torch.cuda.device_count()):
            checked(d.cuKernelSetAttribute(most, shared, kernel, d.CUdevice(device)), str(path))
    return d.CUfunction(int(kernel))


@cache
def place(function: Function, index: int) -> None:
    """Puts a kernel onto a device. Its first launch would, and wait for all kernels that run there:
    forever, if one of them waits for this one.
    """
    d = driver()
    with torch.cuda.device(index):
        make_current()
        placed = checked(d.cuKernelGetFunction(d.CUkernel(int(function))), "cuKernelGetFunction")
        if version_number() >= _FUNC_LOAD:
            checked(d.cuFuncLoad(placed), "cuFuncLoad")


def carveout(function: Function, index: int, blocks: int, shared: int) -> int:
    """The shared-memory carveout, in percent, for this many blocks of a kernel. shared: bytes that
    its launch requests.
    """
    nbytes = _attribute(function, index, "SHARED_SIZE_BYTES") + shared + RESERVED
    return -(-100 * blocks * nbytes // device_facts(index).shared_per_multiprocessor)


def check_room(
    function: Function, index: int, name: str, threads: int, shared: int, blocks: int = 1
) -> None:
    """BuildError if a kernel exceeds the limits of the GPU that the device stands in for, which
    would grant it more. blocks: how many of its blocks a multiprocessor is to have.
    """
    gpu = arch(index)
    if not gpu.code:
        return
    static, registers = (
        _attribute(function, index, asked) for asked in ("SHARED_SIZE_BYTES", "NUM_REGS")
    )
    if why := gpu.why_no_room(threads, static + shared, blocks, registers):
        raise BuildError(f"{blocks} blocks of {name} a multiprocessor: {why}", where="cuda")


def _attribute(function: Function, index: int, name: str) -> int:
    d = driver()
    asked = getattr(d.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    kernel, device = d.CUkernel(int(function)), d.CUdevice(index)
    return int(checked(d.cuKernelGetAttribute(asked, kernel, device), name))


class Launch:
    """One kernel with its launch sizes.

    programmatic_launch: whether it may start before the previous kernel has ended, for which it
    then waits itself. carveout: the shared-memory carveout, in percent of a multiprocessor's
    maximum; the rest is L1. None: the driver decides, and keeps that of a concurrent kernel, which
    may leave no L1 at all.
    """

    def __init__(
        self,
        function: Function,
        blocks: int,
        threads: int,
        shared: int,
        programmatic_launch: bool,
        carveout: int | None = None,
    ):
        self._function = function
        config = partial(_config, blocks, threads, shared, programmatic_launch, carveout)
        self._config = lru_cache(_STREAMS)(config)  # not shared between threads

    def __call__(self, stream: int, params: int) -> None:
        """params: the address of an array with the addresses of the kernel's parameters."""
        launch, how = driver().cuLaunchKernelEx, (self._config(stream), self._function, params, 0)
        (status,) = launch(*how)
        if int(status) == _NO_CONTEXT:
            make_current()
            (status,) = launch(*how)
        if status:
            checked((status,), "launch")

    def addresses(self) -> tuple[int, int]:
        """The address of the kernel, and that of a CUlaunchConfig without a stream."""
        return int(self._function), int(self._config(0).getPtr())


def _config(
    blocks: int,
    threads: int,
    shared: int,
    programmatic_launch: bool,
    carveout: int | None,
    stream: int,
) -> Any:
    d = driver()
    kinds, attributes = d.CUlaunchAttributeID, []
    c = d.CUlaunchConfig()
    c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ = (
        blocks,
        1,
        1,
        threads,
        1,
        1,
    )
    c.sharedMemBytes, c.hStream = shared, stream
    if programmatic_launch:
        attribute = d.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if carveout is not None:
        attribute = d.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        attribute.value.sharedMemCarveout = carveout
        attributes.append(attribute)
    c.attrs, c.numAttrs = attributes, len(attributes)
    return c


@dataclass(frozen=True)
class TensorMap:
    """A tensor map, which describes a tensor to the tensor memory accelerator. address: of the 128
    bytes that a kernel takes.
    """

    memory: Any
    address: int


def map_numbers(type: str, sizes: tuple[int, ...], box: tuple[int, ...]) -> list[list[int]]:
    """How a contiguous tensor is read in swizzled boxes of 128 bytes in the fastest dimension,
    zeros outside of the tensor, in the driver's numbers: the type; how; sizes; strides, box.

    sizes, box: the fastest dimension first. type: "bf16", "f16" or "u8".
    """
    d = driver()
    dtypes, itemsize = d.CUtensorMapDataType, 1 if type == "u8" else 2
    dtype = {
        "bf16": dtypes.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f16": dtypes.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "u8": dtypes.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }[type]
    how = (
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    strides = [itemsize * prod(sizes[: i + 1]) for i in range(len(sizes) - 1)]  # bytes
    return [[int(dtype)], [*map(int, how)], [*sizes], strides, [*box]]


@lru_cache(_MAPS)
def tensor_map(address: int, type: str, sizes: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """The descriptor by which TMA copies boxes of a tensor on the GPU to shared memory. address: of
    its first element; type, sizes, box: as for `map_numbers`. All bytes are zero for a tensor
    without elements, which no kernel reads.
    """
    if 0 in sizes:
        empty = ctypes.create_string_buffer(_MAP_BYTES)
        return TensorMap(empty, ctypes.addressof(empty))
    d, ((dtype,), how, _, strides, _) = driver(), map_numbers(type, sizes, box)
    kinds = (
        d.CUtensorMapInterleave,
        d.CUtensorMapSwizzle,
        d.CUtensorMapL2promotion,
        d.CUtensorMapFloatOOBfill,
    )
    result = checked(
        d.cuTensorMapEncodeTiled(
            d.CUtensorMapDataType(dtype),
            len(sizes),
            address,
            [d.cuuint64_t(n) for n in sizes],
            [d.cuuint64_t(n) for n in strides],
            [d.cuuint32_t(n) for n in box],
            [d.cuuint32_t(1)] * len(sizes),
            *(kind(number) for kind, number in zip(kinds, how, strict=True)),
        ),
        f"a tensor map of {sizes} in boxes of {box}",
    )
    return TensorMap(result, int(result.getPtr()))


def stream(device: torch.device) -> int:
    """torch's current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))
