"""Calls without Python: C++ kernels for torch's dispatcher (native.cpp), which launch calls of
known specialization keys (native.cpp says what is in them).

    implement(LIBRARY, "route", body, "CompositeExplicitAutograd")      # in Python, which stays
    use()                                   # from now on C++ runs what it knows
    if wanted():                            # at the end of a call that Python ran:
        offer(numbers)                      # the launch plan of the next ones with its key

The library is loaded when weights are prepared or a compiled graph is first called. It fits one
release of torch: a wheel may have it for some (native_source.py), for others it is compiled, once
for each cache_dir. A process that does neither loads it at its second call, if it is there already
and no other thread runs. Without it Python runs all calls, the first as the thousandth: where there
is no compiler either, and with a torch whose headers are not those that native.cpp was written for.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import options
from ..errors import BuildError, Error
from ..messages import log, waiting
from . import build, native_source, precompile

FALLBACKS = "fusion_moe_python"  # the namespace of the Python implementations
_TORCH = Path(torch.__file__).parent


# What is implemented ------------------------------------------------------------------------------

# by operation names and dispatch keys
_kernels: dict[str, dict[str, tuple[Callable[..., Any], bool]]] = {}
_kept: list[torch.library.Library] = []


def implement(
    library: torch.library.Library,
    name: str,
    kernel: Callable[..., Any],
    key: str,
    *,
    with_keyset: bool = False,
) -> None:
    """library.impl(...) for an operation that C++ will implement too."""
    library.impl(name, kernel, key, with_keyset=with_keyset)
    _kernels.setdefault(name, {})[key] = kernel, with_keyset


def _implement_natively(native: ctypes.CDLL, namespace: str) -> None:
    fallbacks = torch.library.Library(FALLBACKS, "DEF")
    _kept.append(fallbacks)
    for name, kernels in _kernels.items():
        schema = getattr(getattr(torch.ops, namespace), name).default._schema
        fallbacks.define(str(schema).removeprefix(f"{namespace}::"))
        for key, (kernel, with_keyset) in kernels.items():
            fallbacks.impl(name, kernel, key, with_keyset=with_keyset)
        native.fusion_moe_implement(
            f"{namespace}::{name}".encode(),
            f"{FALLBACKS}::{name}".encode(),
        )


# The library --------------------------------------------------------------------------------------


_library: ctypes.CDLL | None = None
_recorded: int | None = None
_shared: dict[int, tuple[int, int, int]] = {}
_attempts = itertools.count()
_callers: set[int] = set()  # the threads whose calls Python has run while there was no library
_calls = itertools.count()  # of those
_is_lazy = True  # whether one of these calls may still load it


def wanted() -> bool:
    """Whether the launch plan of the call that just ran in Python is wanted."""
    if _library is not None:
        return bool(_library.fusion_moe_wanted())
    _callers.add(threading.get_ident())
    if _is_lazy and next(_calls) and threading.active_count() == len(_callers) == 1:
        _use_if_built()
    return False


def _use_if_built() -> None:
    global _is_lazy
    _is_lazy = False
    if is_built():
        use()


def offer(numbers: Sequence[int] | None) -> None:
    """Gives C++ the launch plan of the call that just ran, which was wanted; None: Python keeps
    running such calls.
    """
    if numbers is not None and _library is not None:
        _library.fusion_moe_offer((ctypes.c_longlong * len(numbers))(*numbers), len(numbers))


def why_not() -> str:
    """Why Python runs all calls; "" if C++ can run them."""
    if not options.current().native_calls:
        return "the option native_calls is off"
    return "" if is_built() or build.find_compiler() else build.why_no_compiler()


def is_built() -> bool:
    """Whether the library came with the package, or is compiled."""
    return build.is_built(_source())


def known() -> int:
    """How many specialization keys of calls run without Python."""
    return 0 if _library is None else int(_library.fusion_moe_known())


def use() -> None:
    """Has C++ run the calls of this process from now on, if it can. Only the first use tries: a
    failure is logged, and Python goes on.

    While torch gets new kernels for an operation, no other thread may call it: if one has called
    any before, Python goes on too.
    """
    if why_not() or next(_attempts):
        return
    try:
        if _callers - {threading.get_ident()}:
            raise BuildError(
                "other threads call fusion_moe already", todo="prepare_ before they do"
            )
        with waiting("compiling for calls without Python"):
            load()
    except Error as error:
        log.info("calls go through Python: %s", error)


def load() -> None:
    """Compiles the library if needed, and lets it run calls from now on. No other thread may be in
    a call. Raises BuildError.
    """
    global _library
    if _library is None:
        native = build.library(_source())
        native.fusion_moe_begin.argtypes = [ctypes.py_object] * 4
        native.fusion_moe_known.restype = ctypes.c_longlong
        native.fusion_moe_offer.argtypes = [ctypes.c_void_p, ctypes.c_longlong]
        native.fusion_moe_begin(*options.variable(), precompile.NOTED, None)
        native.fusion_moe_record.argtypes = [ctypes.c_void_p]
        native.fusion_moe_record(_recorded)
        native.fusion_moe_share.argtypes = [ctypes.c_longlong] * 4
        for handle, of_handle in _shared.items():
            native.fusion_moe_share(handle, *of_handle)
        _implement_natively(native, "fusion_moe")
        _library = native


def share(handle: int, table: int, count: int, owner: int) -> None:
    """Tells C++ the table of a handle (handles.py), by their addresses; a table at 0: none."""
    _shared[handle] = table, count, owner
    if _library is not None:
        _library.fusion_moe_share(handle, table, count, owner)


def record(layers: int | None) -> None:
    """Has C++ count calls: the address of what recorder/counts.py makes, which must live; None:
    it counts none.
    """
    global _recorded
    _recorded = layers
    if _library is not None:
        _library.fusion_moe_record(layers)


@cache
def _source() -> build.LibrarySource:
    return native_source.of(_TORCH, torch.__version__, torch.version.git_version or "")


# Addresses ----------------------------------------------------------------------------------------


def address(function: Any) -> int:
    """The address of a function in a library that ctypes has loaded."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@cache
def cuda_functions() -> tuple[int, int, int, int]:
    """The addresses of the driver's launch, of the function that makes tensor maps, of torch's
    function for the current stream, and of the one that says if it is captured.
    """
    driver, cuda = (
        ctypes.CDLL("libcuda.so.1"),
        ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cuda.so")),
    )
    return (
        address(driver.cuLaunchKernelEx),
        address(driver.cuTensorMapEncodeTiled),
        address(cuda.aoti_torch_get_current_cuda_stream),
        address(driver.cuStreamIsCapturing),
    )
