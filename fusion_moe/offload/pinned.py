"""Memory of the host that GPUs read and write: tensors on pages of their own, pinned.

storage = pinned(tensor)       # a tensor of `pages.empty`, 2 MiB or more; PinError if refused
storage.address                # at which kernels find it; unpinned when `storage` is no more
staging = Staging({"rows": 4096, "ids": 64})    # memory of our own, pinned
staging.addresses["rows"]                       # on the GPU; staging.tensors["rows"]: u8
copy([(to, source, nbytes)], stream)            # between addresses of any memory
"""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections.abc import Iterable, Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..errors import BuildError, PinError
from ..layouts import ceil_to
from ..runtime.driver import checked, driver, make_current

_LINE = 256  # bytes: what arrays of a staging begin at multiples of


class Pinned:
    """A contiguous CPU tensor, pinned for as long as this lives: at once, since the GPU's copy
    engine copies nothing that lies in two pinned pieces. PinError if that is refused.

    address: of its first byte, for kernels.
    """

    def __init__(self, t: Tensor, pin: bool = True):
        self.tensor = t
        self.address = t.data_ptr()
        if not pin:
            return
        try:
            self.address = pin_memory(self.address, t.nbytes)
        except BuildError as error:
            raise _refused(t.nbytes, error) from None
        self._undo = weakref.finalize(self, _unpin, t.data_ptr(), os.getpid())


_all: WeakValueDictionary[tuple[int, int], Pinned] = WeakValueDictionary()


def pinned(t: Tensor) -> Pinned:
    """The pinned form of a tensor's memory, one for all who pin the same, which the driver pins
    once.
    """
    key = t.data_ptr(), t.nbytes
    entry = _all.get(key)
    if entry is None:
        entry = _all[key] = Pinned(t)
    return entry


class Staging:
    """Zeros of our own memory, which child processes share: a fork copies no pages of it.

    tensors: u8, by name; addresses: of the same on the GPU.
    """

    def __init__(self, sizes: Mapping[str, int], pin: bool = True):
        offsets, end = {}, 0
        for name, nbytes in sizes.items():
            offsets[name], end = end, end + ceil_to(nbytes, _LINE)
        memory = mmap.mmap(-1, max(ceil_to(end, mmap.PAGESIZE), mmap.PAGESIZE))
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._pinned = Pinned(self.memory, pin)
        self.tensors = {
            name: self.memory[offset : offset + sizes[name]] for name, offset in offsets.items()
        }
        self.addresses = {name: self._pinned.address + offset for name, offset in offsets.items()}


def _unpin(address: int, process: int) -> None:
    if os.getpid() == process:
        unpin_memory(address)


def pin_memory(address: int, nbytes: int) -> int:
    """Pins memory of the host, which must have pages of its own, and maps it on all devices. The
    address that kernels read it at. BuildError if the driver refuses.
    """
    make_current()
    d = driver()
    flags = d.CU_MEMHOSTREGISTER_PORTABLE | d.CU_MEMHOSTREGISTER_DEVICEMAP
    checked(d.cuMemHostRegister(address, nbytes, flags), "cuMemHostRegister")
    return int(checked(d.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))


def unpin_memory(address: int) -> None:
    """Releases memory that `pin_memory` pinned."""
    make_current()
    checked(driver().cuMemHostUnregister(address), "cuMemHostUnregister")


def copy(copies: Iterable[tuple[int, int, int]], stream: int) -> None:
    """Begins copies (to, from, bytes) between addresses of any memory, without what torch does for
    each, which takes the host longer than a small expert takes PCIe.
    """
    make_current()
    run = driver().cuMemcpyAsync
    for to, source, nbytes in copies:
        checked(run(to, source, nbytes, stream), "cuMemcpyAsync")


def _refused(wanted: int, error: BuildError) -> PinError:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return PinError(
        f"{wanted / 2**30:.1f} GiB of RAM could not be pinned: {error.found}; ulimit -l is {limit}",
        todo="raise the limit (ulimit -l unlimited; in containers --ulimit memlock=-1), or offload "
        "fewer experts",
    )
