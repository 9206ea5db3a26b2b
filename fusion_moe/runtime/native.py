"""Calls without Python: C++ kernels for torch's dispatcher (native.cpp), which launch calls of
known forms.

    implement(LIBRARY, "route", body, "CompositeExplicitAutograd")      # in Python, which stays
        what runs a call of a new form
    if wanted():                                                        # at the end of such a call
        offer(descriptor)                                               # what C++ is to do for the
            next ones

The library is compiled against the installed torch, once for each cache_dir: in the background,
once there have been enough calls to make it worthwhile. It is loaded right after that. If other
Python threads are running, which may be in the middle of a call when torch gets new kernels, it is
loaded at the first call of the next process instead. Without a compiler, or if torch's headers are
not those that native.cpp was written for, Python runs all calls.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import options
from ..errors import BuildError, Error
from . import background, build, preparing
from .memory import Memory

log = logging.getLogger("fusion_moe")
SOURCE = Path(__file__).with_name("native.cpp")
TWINS = "fusion_moe_python"  # the namespace of the Python implementations
_AFTER = 256  # how many calls
_TORCH = Path(torch.__file__).parent
_BACKEND, _AUTOGRAD = "CompositeExplicitAutograd", "Autograd"


@dataclass(frozen=True)
class Descriptor:
    """What C++ does for calls of one form, in the format that native.cpp reads."""

    cuda: bool
    numbers: tuple[int, ...]


def counted(numbers: Sequence[int]) -> list[int]:
    """The number of numbers, followed by the numbers."""
    return [len(numbers), *numbers]


def arrays(inputs: int, made: Sequence[int], workspace: Memory) -> list[int]:
    """The beginning of a descriptor: the number of inputs, which output each array after them is,
    and the offsets of all others.
    """
    return [inputs, *counted(made), workspace.nbytes, *counted(workspace.offsets)]


def as_stored(tensors: Sequence[torch.Tensor], swapped: Sequence[int]) -> bool:
    """Whether tensors can be passed as they are in memory: contiguous; those at `swapped` with
    their last two dimensions swapped.
    """
    return all(
        (t.mT if i in swapped and t.dim() > 1 else t).is_contiguous() for i, t in enumerate(tensors)
    )


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
    twins = torch.library.Library(TWINS, "DEF")
    _kept.append(twins)
    for name, kernels in _kernels.items():
        schema = getattr(getattr(torch.ops, namespace), name).default._schema
        twins.define(str(schema).removeprefix(f"{namespace}::"))
        for key, (kernel, with_keyset) in kernels.items():
            twins.impl(name, kernel, key, with_keyset=with_keyset)
        native.fusion_moe_implement(
            f"{namespace}::{name}".encode(), f"{TWINS}::{name}".encode(), int(_AUTOGRAD in kernels)
        )


# The library --------------------------------------------------------------------------------------


class _State:
    """library: once loaded; calls: how many Python has run; started: the compilation; over: whether
    to try nothing further.
    """

    library: ctypes.CDLL | None = None
    calls = 0
    started: background.Started | None = None
    over = False


_state, _lock = _State(), threading.Lock()


def wanted() -> bool:
    """Whether the descriptor of the call that just ran in Python is wanted. Also advances compiling
    and loading the library.
    """
    if _state.library is not None:
        return bool(_state.library.fusion_moe_wanted())
    if not _state.over:
        _consider()
    return False


def offer(descriptor: Descriptor | None) -> None:
    """Gives C++ the descriptor of the call that just ran, which was wanted; None: Python keeps
    running such calls.
    """
    if descriptor is not None:
        numbers = (ctypes.c_longlong * len(descriptor.numbers))(*descriptor.numbers)
        _loaded().fusion_moe_offer(int(descriptor.cuda), numbers, len(numbers))


def why_not() -> str:
    """Why Python runs all calls; "" if C++ can run them."""
    if not options.current().native_calls:
        return "the option native_calls is off"
    try:
        return "" if build.find_compiler() else build.why_no_compiler()
    except BuildError as error:  # which may be over at the next call
        return str(error)


def is_built() -> bool:
    """Whether the library is compiled."""
    return build.is_built(**_source())


def known() -> int:
    """How many forms of calls run without Python."""
    return 0 if _state.library is None else int(_state.library.fusion_moe_known())


def _consider() -> None:
    """Loads the library if it is compiled: at the first call, or when no other thread can be in a
    call.
    """
    _state.calls += 1
    if _state.calls != 1 and _state.calls % _AFTER and _state.started is None:
        return
    with _lock:
        if _state.library is not None or _state.over or why_not():
            return
        if _state.calls == 1:
            _load_if_built()
        elif _state.started is None:
            _state.started = background.start([(("native", torch.__version__), _compile)])
        elif _state.started.done and not background.is_working():
            if threading.active_count() == 1:
                _load_if_built()
            _state.over = True


def _forget_started() -> None:
    """After a fork: no thread of the child goes on with what was started."""
    global _lock
    _lock = threading.Lock()
    _state.started = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_started)


def _load_if_built() -> None:
    try:
        if is_built():
            load()
    except Error as error:
        _give_up(error)


def _compile() -> None:
    try:
        build.build(**_source())
    except Error as error:
        _give_up(error)


def _give_up(why: Error) -> None:
    _state.over = True
    log.info("calls go through Python: %s", why)


def load() -> None:
    """Compiles the library if needed, and lets it run calls from now on. No other thread may be in
    a call. Raises BuildError.
    """
    if _state.library is None:
        native = build.load(**_source())
        native.fusion_moe_begin.argtypes = [ctypes.py_object] * 4
        native.fusion_moe_known.restype = ctypes.c_longlong
        native.fusion_moe_offer.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong]
        native.fusion_moe_begin(*options.variable(), preparing.NOTED, None)
        _implement_natively(native, "fusion_moe")
        _state.library = native


def _loaded() -> ctypes.CDLL:
    assert _state.library is not None
    return _state.library


@cache
def _source() -> dict[str, Any]:
    """The library's source and flags, as arguments of `build`."""
    libraries = _TORCH / "lib"
    version = f'-DTORCH="{torch.__version__} {torch.version.git_version}"'
    flags = (
        "-std=c++20",
        "-O1",
        f"-I{_TORCH / 'include'}",
        version,
        "-Wl,--no-as-needed",
        f"-L{libraries}",
        "-ltorch_cpu",
        "-lc10",
    )
    return {
        "text": SOURCE.read_text(encoding="utf-8"),
        "name": "native",
        "tier": "generic",
        "flags": flags,
    }


# Addresses ----------------------------------------------------------------------------------------


def address(function: Any) -> int:
    """The address of a function in a library that ctypes has loaded."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@cache
def cuda_functions() -> tuple[int, int, int]:
    """The addresses of the driver's launch, of torch's function for the current stream, and of the
    one that says if it is captured.
    """
    driver, cuda = (
        ctypes.CDLL("libcuda.so.1"),
        ctypes.CDLL(str(_TORCH / "lib" / "libtorch_cuda.so")),
    )
    return (
        address(driver.cuLaunchKernelEx),
        address(cuda.aoti_torch_get_current_cuda_stream),
        address(driver.cuStreamIsCapturing),
    )
