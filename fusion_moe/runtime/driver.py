"""The CUDA driver: its calls with their errors, contexts, and machine code from PTX."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from ..errors import BuildError

_OLDER_THAN_PTX = 222  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION


@cache
def driver() -> Any:
    """The functions of CUDA's driver, by cuda-python. BuildError without it."""
    from cuda.bindings import driver  # imported at first use, since it is an extra

    return driver


def checked(result: tuple[Any, ...], where: str) -> Any:
    """What a call returned: nothing, a value, or several; BuildError with the driver's word for
    what went wrong.
    """
    status, *values = result
    if int(status):
        text = driver().cuGetErrorString(status)[1].decode()
        raise BuildError(
            f"the CUDA driver: {text}",
            todo="install a driver at least as new as NVRTC",
            where=where,
        )
    return values[0] if len(values) == 1 else tuple(values)


def make_current() -> None:
    """Makes torch's context of the current device that of this thread, if the thread has none:
    torch does so only in calls that need one.
    """
    d = driver()
    if not int(checked(d.cuCtxGetCurrent(), "context")):
        checked(d.cuCtxSetCurrent(_context(torch.cuda.current_device())), "context")


@cache
def _context(index: int) -> Any:
    d = driver()
    checked(d.cuInit(0), "context")
    return checked(d.cuDevicePrimaryCtxRetain(d.CUdevice(index)), "context")


@cache
def version_number() -> int:
    """The version of CUDA that the driver supports, as 13000."""
    return int(checked(driver().cuDriverGetVersion(), "driver"))


def version() -> str:
    """The version of the driver's CUDA, as "13.0"."""
    return f"{version_number() // 1000}.{version_number() % 1000 // 10}"


def link(ptx: bytes, where: str) -> bytes:
    """The machine code that the driver makes of PTX for the current device. BuildError if the PTX
    is newer than the driver.
    """
    make_current()
    d = driver()
    state = checked(d.cuLinkCreate(0, [], []), where)
    try:
        kind = d.CUjitInputType.CU_JIT_INPUT_PTX
        (status,) = d.cuLinkAddData(state, kind, ptx, len(ptx), where.encode(), 0, [], [])
        if int(status) == _OLDER_THAN_PTX:
            actual = ptx.partition(b".version ")[2].split(maxsplit=1)[0].decode()
            raise BuildError(
                f"PTX {actual} is newer than the driver, which is of CUDA {version()}",
                expected=f"NVRTC of CUDA {version()} or older",
                todo=f"update the driver, or pip install 'nvidia-cuda-nvrtc=={version()}.*'",
                where=where,
            )
        checked((status,), where)
        address, size = checked(d.cuLinkComplete(state), where)
        return ctypes.string_at(int(address), int(size))
    finally:
        d.cuLinkDestroy(state)
