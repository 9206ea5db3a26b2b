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
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..arch import Arch, find
from ..errors import BuildError, UnsupportedError

_FREE_SHARED = 48 * 1024  # bytes of shared memory that a block gets without asking
_RESERVED = 1024  # bytes of shared memory that the driver reserves for each block
_STREAMS = 64  # how many a launch remembers
_MAPS = 4096  # how many a process remembers
_MAP_BYTES = 128
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
Function = Any  # the driver's handle of a kernel


@cache
def arch(index: int) -> Arch:
    """The facts of a device. UnsupportedError below compute capability 8.0."""
    if why := _why_too_old(f"cuda:{index}", torch.cuda.get_device_capability(index)):
        raise UnsupportedError(
            why, todo="options.override(target='reference') computes in plain torch", where="cuda"
        )
    return find(read_arch(index))


def read_arch(index: int) -> Arch:
    """The facts that the driver reports about a device."""
    d, properties = _driver(), torch.cuda.get_device_properties(index)

    def attribute(name: str) -> int:
        asked = getattr(d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_checked(d.cuDeviceGetAttribute(asked, d.CUdevice(index)), name))

    bits_a_clock = 2 * attribute("GLOBAL_MEMORY_BUS_WIDTH")  # data on both clock edges
    return Arch(
        properties.name,
        (properties.major, properties.minor),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("L2_CACHE_SIZE"),
        1e3 * attribute("MEMORY_CLOCK_RATE") * bits_a_clock / 8,
        attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        attribute("MAX_THREADS_PER_MULTIPROCESSOR") // 32,
    )


def why_too_old() -> str:
    """Why kernels cannot run on the current device; empty if they can, or if there is no device."""
    return (
        _why_too_old("this GPU", torch.cuda.get_device_capability())
        if torch.cuda.is_available()
        else ""
    )


def why_no_wgmma() -> str:
    """Why kernels with wgmma cannot run on the current device; empty if they can, or if there is no
    device.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0):
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"this GPU has compute capability {major}.{minor}, kernels of training require 9.0"


def _why_too_old(device: str, capability: tuple[int, int]) -> str:
    return (
        ""
        if capability >= (8, 0)
        else (
            f"{device} has compute capability "
            f"{capability[0]}.{capability[1]}, kernels require 8.0 "
            "or higher"
        )
    )


def index_of(device: torch.device) -> int:
    """The index of a CUDA device; that of the current one if the device has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph; then nothing may be compiled
    or loaded.
    """
    return torch.cuda.is_current_stream_capturing()


# Memory of the host -------------------------------------------------------------------------------


def make_current(index: int) -> None:
    """Makes torch's context of a device that of this thread, if the thread has none: torch does so
    only in calls that need one.
    """
    d = _driver()
    if not int(_checked(d.cuCtxGetCurrent(), "context")):
        _checked(d.cuCtxSetCurrent(_context(index)), "context")


@cache
def _context(index: int) -> Any:
    d = _driver()
    _checked(d.cuInit(0), "context")
    return _checked(d.cuDevicePrimaryCtxRetain(d.CUdevice(index)), "context")


def pin(address: int, nbytes: int) -> int:
    """Pins memory of the host, which must have pages of its own, and maps it on all devices. The
    address that kernels read it at. BuildError if the driver refuses.
    """
    make_current(torch.cuda.current_device())
    d = _driver()
    flags = d.CU_MEMHOSTREGISTER_PORTABLE | d.CU_MEMHOSTREGISTER_DEVICEMAP
    _checked(d.cuMemHostRegister(address, nbytes, flags), "cuMemHostRegister")
    return int(_checked(d.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))


def unpin(address: int) -> None:
    """Undoes `pin`."""
    make_current(torch.cuda.current_device())
    _checked(_driver().cuMemHostUnregister(address), "cuMemHostUnregister")


# Launches -----------------------------------------------------------------------------------------


@cache
def load(path: Path, name: str, shared: int) -> Function:
    """A kernel of a cubin, which may use up to `shared` bytes of shared memory. BuildError if it
    does not load.
    """
    d = _driver()
    library = _checked(
        d.cuLibraryLoadData(path.read_bytes(), None, None, 0, None, None, 0), str(path)
    )
    kernel = _checked(d.cuLibraryGetKernel(library, name.encode()), str(path))
    if shared > _FREE_SHARED:
        most = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for device in range(torch.cuda.device_count()):
            _checked(d.cuKernelSetAttribute(most, shared, kernel, d.CUdevice(device)), str(path))
    return d.CUfunction(int(kernel))


def carveout(function: Function, index: int, blocks: int) -> int:
    """The shared-memory carveout, in percent, for this many blocks of a kernel whose launch
    requests none itself.
    """
    d = _driver()
    asked = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    nbytes = _checked(
        d.cuKernelGetAttribute(asked, d.CUkernel(int(function)), d.CUdevice(index)), "carveout"
    )
    return -(-100 * blocks * (nbytes + _RESERVED) // arch(index).shared_per_multiprocessor)


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
        launch, how = _driver().cuLaunchKernelEx, (self._config(stream), self._function, params, 0)
        (status,) = launch(*how)
        if int(status) == _NO_CONTEXT:
            make_current(torch.cuda.current_device())
            (status,) = launch(*how)
        if status:
            _checked((status,), "launch")

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
    d = _driver()
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
    d = _driver()
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
    """A tensor at an address, read in boxes: see map_numbers. For a tensor without elements, which
    no kernel reads, all bytes are zero.
    """
    if 0 in sizes:
        empty = ctypes.create_string_buffer(_MAP_BYTES)
        return TensorMap(empty, ctypes.addressof(empty))
    d, ((dtype,), how, _, strides, _) = _driver(), map_numbers(type, sizes, box)
    kinds = (
        d.CUtensorMapInterleave,
        d.CUtensorMapSwizzle,
        d.CUtensorMapL2promotion,
        d.CUtensorMapFloatOOBfill,
    )
    made = _checked(
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
    return TensorMap(made, int(made.getPtr()))


def stream(device: torch.device) -> int:
    """torch's current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


@cache
def _driver() -> Any:
    from cuda.bindings import driver  # imported at first use, since it is an extra

    return driver


def _checked(result: tuple[Any, ...], where: str) -> Any:
    status, *values = result
    if int(status):
        text = _driver().cuGetErrorString(status)[1].decode()
        raise BuildError(
            f"the CUDA driver: {text}",
            todo="install a driver at least as new as NVRTC",
            where=where,
        )
    return values[0] if values else None
