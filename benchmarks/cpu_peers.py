"""4-bit products of other packages on the CPU, where installed: for `python benchmarks/cpu_moe.py --peers`."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_moe.runtime import pages

Peer = Callable[[tuple[Tensor, ...]], object]  # one tensor of rows for each expert


def onnxruntime(experts: int, n: int, k: int, threads: int) -> Peer:
    """MatMulNBits of n x k with int8 activations (accuracy level 4) and blocks of 32, its fastest; a session for each expert.

    ImportError without the packages onnx and onnxruntime.
    """
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    weights = {
        "B": np.random.default_rng(0).integers(0, 256, (n, k // 32, 16), dtype=np.uint8),
        "scales": np.full(n * (k // 32), 0.01, dtype=np.float32),
    }
    node = helper.make_node(
        "MatMulNBits", ["A", "B", "scales"], ["Y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=32, accuracy_level=4
    )
    rows, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size]) for name, size in (("A", k), ("Y", n)))
    graph = helper.make_graph([node], "product", [rows], [result], [numpy_helper.from_array(w, name) for name, w in weights.items()])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its threads would take the CPUs of the others' turns
    sessions = [ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]) for _ in range(experts)]

    def run(parts: tuple[Tensor, ...]) -> list[object]:
        arrays = [part.float().numpy() for part in parts]
        return [session.run(None, {"A": a}) for session, a in zip(sessions, arrays, strict=False)]

    return run


_GGML_F32, _GGML_I32, _GGML_NVFP4 = 0, 26, 40
_GGML_OVERHEAD = 2**20  # bytes, for a graph and a few tensors beside their elements


class _GgmlMemory(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("start", ctypes.c_void_p), ("without_elements", ctypes.c_bool))


@cache
def _ggml() -> dict[str, Any]:
    """ggml's functions that are used here. ImportError without the package llama-cpp-python, or where its ggml has no NVFP4."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise ImportError("No module named 'llama_cpp'")
    base, cpu = (ctypes.CDLL(str(Path(found.origin).parent / "lib" / f"libggml-{part}.so")) for part in ("base", "cpu"))
    base.ggml_type_name.restype = ctypes.c_char_p
    if base.ggml_type_name(_GGML_NVFP4) != b"nvfp4":
        raise ImportError("this ggml has no NVFP4")
    p, i, sizes = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)
    takes = {
        "init": (base, p, [_GgmlMemory]), "new_tensor": (base, p, [p, i, i, sizes]), "get_data": (base, p, [p]),
        "mul_mat_id": (base, p, [p, p, p, p]), "new_graph": (base, p, [p]), "build_forward_expand": (base, None, [p, p]),
        "backend_cpu_init": (cpu, p, []), "backend_cpu_set_n_threads": (cpu, None, [p, i]), "backend_graph_compute": (base, i, [p, p]),
    }  # fmt: skip
    functions = {}
    for name, (library, result, arguments) in takes.items():
        function = functions[name] = getattr(library, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


class _GgmlTensors:
    """Tensors of ggml in memory of ours, which goes with this object; what ggml keeps beside them is small."""

    def __init__(self, elements: int):
        self.memory = pages.empty((elements + _GGML_OVERHEAD,), torch.uint8)
        self.context = _ggml()["init"](_GgmlMemory(self.memory.numel(), self.memory.data_ptr(), False))
        self.tensors: list[int] = []

    def new(self, dtype: int, sizes: Sequence[int], size: int) -> Tensor:
        """The bytes of one more of the tensors; innermost size first."""
        made = _ggml()["new_tensor"](self.context, dtype, len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))
        self.tensors.append(made)
        start = _ggml()["get_data"](made) - self.memory.data_ptr()
        return self.memory[start : start + size]


def ggml(experts: int, n: int, k: int, threads: int) -> Peer:
    """MUL_MAT_ID of NVFP4 weights, which rounds activations to int8 (q8_0), as in llama.cpp.

    ImportError without the package llama-cpp-python, or where its ggml has no NVFP4.
    """
    f = _ggml()
    backend = f["backend_cpu_init"]()
    f["backend_cpu_set_n_threads"](backend, threads)
    weights = _GgmlTensors(experts * n * k // 64 * 36)
    blocks = weights.new(_GGML_NVFP4, (k, n, experts), experts * n * k // 64 * 36).view(-1, 36)  # four block scales, 64 codes
    blocks.random_(0, 256)[:, :4].random_(0x20, 0x70)

    @cache
    def graph(used: int, rows: int) -> tuple[_GgmlTensors, Tensor, int]:
        count = used * rows
        tensors = _GgmlTensors(count * (k + n + 1) * 4)
        activations = tensors.new(_GGML_F32, (k, 1, count), count * k * 4).view(torch.float32).view(count, k)
        tensors.new(_GGML_I32, (1, count), count * 4).view(torch.int32).copy_(torch.arange(used).repeat_interleave(rows))
        made = f["new_graph"](tensors.context)
        f["build_forward_expand"](made, f["mul_mat_id"](tensors.context, *weights.tensors, *tensors.tensors))
        return tensors, activations, made

    def run(parts: tuple[Tensor, ...]) -> None:
        _, activations, made = graph(len(parts), len(parts[0]))
        torch.cat(parts, out=activations)
        f["backend_graph_compute"](backend, made)

    return run


def installed(experts: int, n: int, k: int, threads: int) -> dict[str, Peer]:
    """The peers that are installed, by name; says which are not."""
    found = {}
    for peer in (onnxruntime, ggml):
        try:
            found[peer.__name__] = peer(experts, n, k, threads)
        except ImportError as error:
            print(f"peer {peer.__name__}: {error}")
    return found
