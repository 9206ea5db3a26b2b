"""The NUMA nodes from which the pages of weights come: interleaved over all nodes that this process
uses.

    found = spread()                          # Spread(nodes=(0, 1), why="")
        interleave(address, size, found.nodes)  # for new memory that was not written yet: its pages
        will come from these nodes
    located([address, address + PAGE])        # [0, 1], once they are written

Makes Linux' system calls with the standard library only. On other systems, and if a container
forbids the calls, pages come from the node of the thread that first writes them, and `spread` says
why.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
DEFAULT, INTERLEAVE = 0, 3
_POLICIES = (
    "default",
    "preferred",
    "bind",
    "interleave",
    "local",
    "preferred-many",
    "weighted-interleave",
)
_NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "move_pages": 239},
}
_NODES = Path("/sys/devices/system/node")
_STATUS, _MAPS = Path("/proc/self/status"), Path("/proc/self/maps")
_OPENMP = re.compile(r" (/\S*/lib(?:gomp|omp|iomp5)\S*)$", re.MULTILINE)
_MOST = 1024  # the most nodes that Linux can be built for
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_OF_ADDRESS = 2  # MPOL_F_ADDR
_MODE = (1 << 13) - 1  # the bits of a mode that are not flags


@dataclass(frozen=True)
class Spread:
    """nodes: those to interleave pages over; (): pages stay as they come, for the reason `why`.
    permitted: unless the system refuses.
    """

    nodes: tuple[int, ...]
    why: str = ""
    permitted: bool = True


def spread() -> Spread:
    """The nodes whose CPUs and memory this process may use, unless it already has a policy, such as
    one set by numactl.
    """
    if len(topology()) < 2:
        return Spread(
            (), "all memory is on one node" if topology() else "this system tells of no nodes"
        )
    nodes = usable()
    if not nodes:
        return Spread((), "no node has CPUs and memory for this process")
    if len(nodes) < 2:
        return Spread((), f"the CPUs and memory of this process are on {named(nodes)} alone")
    if why := _why_refused(nodes):
        return Spread(
            (), f"{named(nodes)}, but no permission to place pages: {why}", permitted=False
        )
    mode, bound = policy()
    if mode != DEFAULT:
        name = _POLICIES[mode] if mode < len(_POLICIES) else f"number {mode}"
        return Spread(
            (), f"this process has the policy {name}{f' of {named(bound)}' if bound else ''}"
        )
    return Spread(nodes)


def usable() -> tuple[int, ...]:
    """The nodes with CPUs and memory for this process: those of its threads, within its cpuset."""
    used, memory = cpus(), _allowed_memory()
    return tuple(
        node
        for node, own in topology().items()
        if own & used and (memory is None or node in memory)
    )


def cpus() -> Set[int]:
    """The CPUs on which threads of this process run. If OpenMP binds threads, this thread's
    affinity is only the CPU of its binding.
    """
    return _places() or os.sched_getaffinity(0)


@cache
def _places() -> frozenset[int]:
    """The CPUs of all OpenMP places (OMP_PLACES, OMP_PROC_BIND, GOMP_CPU_AFFINITY); empty if OpenMP
    binds no threads or is not loaded.
    """
    found = set[int]()
    with contextlib.suppress(OSError, AttributeError):  # no such library, or an OpenMP before 4.5
        for path in sorted(set(_OPENMP.findall(_MAPS.read_text()))):
            library = ctypes.CDLL(path)
            for place in range(library.omp_get_num_places()):
                each = (ctypes.c_int * library.omp_get_place_num_procs(place))()
                library.omp_get_place_proc_ids(place, each)
                found.update(each)
    return frozenset(found)


@cache
def topology() -> Mapping[int, frozenset[int]]:
    """The CPUs of each node that has memory; {} if the system does not say."""
    with contextlib.suppress(OSError):
        nodes = sorted(numbers((_NODES / "has_memory").read_text()))
        return {
            node: frozenset(numbers((_NODES / f"node{node}" / "cpulist").read_text()))
            for node in nodes
        }
    return {}


def _allowed_memory() -> set[int] | None:
    """The nodes of which the cpuset allows memory; None if unknown. Not read by get_mempolicy,
    which containers may forbid.
    """
    with contextlib.suppress(OSError):
        if found := re.search(r"^Mems_allowed_list:(.*)$", _STATUS.read_text(), re.MULTILINE):
            return numbers(found[1])
    return None


def numbers(text: str) -> set[int]:
    """ "0-2,5" -> {0, 1, 2, 5}, as Linux writes CPUs and nodes; an empty text gives an empty
    set.
    """
    runs = (run.split("-") for run in text.strip().split(",") if run)
    return {n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)}


def named(nodes: Iterable[int]) -> str:
    """ "node 0", "nodes 0, 1"."""
    each = [str(node) for node in nodes]
    return f"{'node' if len(each) == 1 else 'nodes'} {', '.join(each)}"


@cache
def _why_refused(nodes: Sequence[int]) -> str:
    """The system's answer to placing a page of memory and asking for its node; "" if it does
    both.
    """
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        held = ctypes.c_char.from_buffer(memory)
        try:
            interleave(ctypes.addressof(held), PAGE, nodes)
            policy(ctypes.addressof(held))
        except OSError as error:
            return str(error)
        finally:
            del held
    return ""


def interleave(address: int, size: int, nodes: Sequence[int]) -> None:
    """Interleaves the pages of memory that starts at a page over these nodes, large pages too.
    OSError if the system refuses.

    Existing pages stay where they are: Linux moves (MPOL_MF_MOVE) only those that are on none of
    the nodes.
    """
    start, length, most = ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_ulong(_MOST + 1)
    _call("mbind", start, length, ctypes.c_int(INTERLEAVE), _mask(nodes), most, ctypes.c_uint(0))


def policy(address: int | None = None) -> tuple[int, tuple[int, ...]]:
    """(mode, nodes) of the memory at an address, or of this thread. OSError if the system
    refuses.
    """
    mode, mask, flags = ctypes.c_int(), _mask(()), 0 if address is None else _OF_ADDRESS
    _call(
        "get_mempolicy",
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MOST + 1),
        ctypes.c_void_p(address),
        ctypes.c_ulong(flags),
    )
    return mode.value & _MODE, tuple(
        node for node in range(_MOST) if mask[node // _WORD] >> node % _WORD & 1
    )


def located(addresses: Sequence[int]) -> list[int]:
    """The node of the page at each address; a negative number if there is no page yet. OSError if
    the system refuses.
    """
    pages, found = (ctypes.c_void_p * len(addresses))(*addresses), (ctypes.c_int * len(addresses))()
    _call(
        "move_pages",
        ctypes.c_int(0),
        ctypes.c_ulong(len(addresses)),
        pages,
        None,
        found,
        ctypes.c_int(0),
    )
    return list(found)


def _mask(nodes: Iterable[int]) -> Any:
    mask = (ctypes.c_ulong * (_MOST // _WORD))()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    return mask


def _call(name: str, *arguments: Any) -> None:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(f"no {name} on {platform.machine()}")
    if _libc().syscall(ctypes.c_long(number), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    return library
