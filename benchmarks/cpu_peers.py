"""Other people's 4-bit products on the CPU, where they are installed: for `python benchmarks/cpu_moe.py --peers`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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


def installed(experts: int, n: int, k: int, threads: int) -> dict[str, Peer]:
    """The peers that are installed, by name; says which are not."""
    found = {}
    for peer in (onnxruntime,):
        try:
            found[peer.__name__] = peer(experts, n, k, threads)
        except ImportError as error:
            print(f"peer {peer.__name__}: {error}")
    return found
