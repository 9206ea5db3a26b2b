"""ggml, llama.cpp's library of tensors, through its functions in C, on the CPU: what
cpu_ggml.py calls.

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=OFF" pip install llama-cpp-python==0.3.36    #
        compiles llama.cpp for this machine
    GGML_LIBRARIES=DIR python benchmarks/cpu_moe.py --peers                                 # or:
        libggml-base.so, libggml-cpu.so of DIR

With threads of its own, which poll for work, one token takes it a few percent less than with
OpenMP's, the default. To compile on another machine, ggml alone, say what the measured one has; one
with AMX, into build/bin:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf
        llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release
        -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF \\
        -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON
            -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=ON \\
        -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON
            '-DCMAKE_INSTALL_RPATH=$ORIGIN'
    cmake --build build --target ggml
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

# ggml's kinds of memory: rows as they are; eight of them interleaved
PLAIN, INTERLEAVED = "CPU", "CPU_REPACK"
# its numbers for them, in files too
_TYPES = {"f32": 0, "q4_0": 2, "q4_K": 12, "i32": 26, "bf16": 30, "mxfp4": 39, "nvfp4": 40}
_P, _I, _N, _Z, _S, _B = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_char_p,
    ctypes.c_bool,
)
_SMALL = 2**20  # bytes: what describes the tensors and operations of a graph


class _Memory(ctypes.Structure):
    _fields_ = (("size", _Z), ("start", _P), ("without_elements", _B))


class _Feature(ctypes.Structure):
    _fields_ = (("name", _S), ("value", _S))


_FUNCTIONS = {  # the result, then what it takes
    "base": {
        "version": (_S,),
        "type_name": (_S, _I),
        "blck_size": (_N, _I),
        "row_size": (_Z, _I, _N),
        "quantize_chunk": (_Z, _I, _P, _P, _N, _N, _N, _P),
        "init": (_P, _Memory),
        "free": (None, _P),
        "new_tensor": (_P, _P, _I, _I, ctypes.POINTER(_N)),
        "get_data": (_P, _P),
        "set_input": (None, _P),
        "set_output": (None, _P),
        "new_graph": (_P, _P),
        "build_forward_expand": (None, _P, _P),
        "cast": (_P, _P, _P, _I),
        "mul_mat_id": (_P, _P, _P, _P, _P),
        "swiglu_split": (_P, _P, _P, _P),
        "get_rows": (_P, _P, _P, _P),
        "repeat_4d": (_P, _P, _P, _N, _N, _N, _N),
        "mul": (_P, _P, _P, _P),
        "add": (_P, _P, _P, _P),
        "view_2d": (_P, _P, _P, _N, _N, _Z, _Z),
        "view_3d": (_P, _P, _P, _N, _N, _N, _Z, _Z, _Z),
        "gallocr_new": (_P, _P),
        "gallocr_free": (None, _P),
        "gallocr_alloc_graph": (_B, _P, _P),
        "threadpool_params_init": (None, _P, _I),
        "backend_cpu_buffer_type": (_P,),
        "backend_buft_name": (_S, _P),
        "backend_alloc_ctx_tensors_from_buft": (_P, _P, _P),
        "backend_buffer_get_base": (_P, _P),
        "backend_buffer_get_size": (_Z, _P),
        "backend_buffer_free": (None, _P),
        "backend_tensor_set": (None, _P, _P, _Z, _Z),
        "backend_graph_compute": (_I, _P, _P),
        "backend_reg_dev_get": (_P, _P, _Z),
        "backend_reg_get_proc_address": (_P, _P, _S),
        "backend_dev_supports_op": (_B, _P, _P),
    },
    "cpu": {
        "backend_cpu_init": (_P,),
        "backend_cpu_reg": (_P,),
        "backend_cpu_set_n_threads": (None, _P, _I),
        "backend_cpu_set_threadpool": (None, _P, _P),
        "threadpool_new": (_P, _P),
        "threadpool_pause": (None, _P),
    },
}


def _folder() -> Path:
    if told := os.environ.get("GGML_LIBRARIES"):
        return Path(told)
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("No module named 'llama_cpp', and GGML_LIBRARIES is not set")
    return Path(found.origin).parent / "lib"


@cache
def load() -> Any:
    """ggml: functions, by their names without ggml_; types, kinds of memory, features. ImportError
    where it is not installed.
    """
    g = SimpleNamespace()
    for part, functions in _FUNCTIONS.items():
        try:
            library = ctypes.CDLL(str(_folder() / f"libggml-{part}.so"))
            found = {name: getattr(library, f"ggml_{name}") for name in functions}
        except (OSError, AttributeError) as error:  # not there, or older than these functions
            raise ImportError(str(error)) from error
        for name, (result, *takes) in functions.items():
            found[name].restype, found[name].argtypes = result, takes
        vars(g).update(found)
    register = g.backend_cpu_reg()

    def listed(name: bytes, item: Any, of: int) -> Any:
        """What a function returns that has no symbol."""
        return ctypes.CFUNCTYPE(ctypes.POINTER(item), _P)(
            g.backend_reg_get_proc_address(register, name)
        )(of)

    g.backend, g.device = g.backend_cpu_init(), g.backend_reg_dev_get(register, 0)
    g.memory = {PLAIN: g.backend_cpu_buffer_type()}
    for kind in iter(
        iter(listed(b"ggml_backend_dev_get_extra_bufts", _P, g.device)).__next__, None
    ):
        g.memory[g.backend_buft_name(kind).decode()] = kind
    features = iter(listed(b"ggml_backend_get_features", _Feature, register))
    g.features = list(iter(lambda: (next(features).name or b"").decode(), ""))
    g.types = {
        name: number for name, number in _TYPES.items() if g.type_name(number) == name.encode()
    }
    return g


@cache
def _threads(count: int) -> int:
    """So many, which poll for work as ggml's do by default."""
    parameters = ctypes.create_string_buffer(1024)  # a mask of 512 CPUs, and five numbers
    load().threadpool_params_init(parameters, count)
    _pools.append(load().threadpool_new(parameters))
    return int(_pools[-1])


_pools: list[int] = []


class Tensors:
    """Some of ggml's tensors, in a context that goes with this object. Operations are methods, by
    its names.
    """

    def __init__(self) -> None:
        self._context = load().init(_Memory(_SMALL, None, True))
        finalize(self, load().free, self._context)

    def new(self, dtype: str, *sizes: int) -> int:
        """A tensor without memory; innermost size first."""
        return int(
            load().new_tensor(
                self._context, load().types[dtype], len(sizes), (_N * len(sizes))(*sizes)
            )
        )

    def place(self, kind: str) -> None:
        """Gives memory of a kind to all that there are, on large pages where the system has them,
        as ours has.
        """
        g = load()
        memory = g.backend_alloc_ctx_tensors_from_buft(self._context, g.memory[kind])
        finalize(self, g.backend_buffer_free, memory)
        start = -(-g.backend_buffer_get_base(memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = g.backend_buffer_get_base(memory) + g.backend_buffer_get_size(memory) - start
        ctypes.CDLL(None).madvise(_P(start), _Z(max(0, size)), mmap.MADV_HUGEPAGE)

    def graph(self, *results: int) -> int:
        """What computes some, in this order."""
        graph = load().new_graph(self._context)
        for result in results:
            load().build_forward_expand(graph, result)
        return int(graph)

    def __getattr__(self, operation: str) -> Callable[..., int]:
        return partial(getattr(load(), operation), self._context)


def view(tensor: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The elements of a tensor that has memory, which must live longer."""
    size = prod(shape) * dtype.itemsize
    return torch.frombuffer(
        (ctypes.c_char * size).from_address(load().get_data(tensor)), dtype=dtype
    ).view(*shape)


def compute(graph: int, threads: int) -> None:
    """Runs a graph whose tensors have memory."""
    g = load()
    g.backend_cpu_set_n_threads(g.backend, threads)
    g.backend_cpu_set_threadpool(g.backend, _threads(threads))
    if status := g.backend_graph_compute(g.backend, graph):
        raise RuntimeError(f"ggml_backend_graph_compute: status {status}, expected 0")


def rest() -> None:
    """Lets its threads sleep until the next call. OpenMP's do so by themselves, some milliseconds
    after one.
    """
    for pool in _pools:
        load().threadpool_pause(pool)
