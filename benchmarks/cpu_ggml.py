"""Layers by ggml, as llama.cpp computes them, for `python benchmarks/cpu_moe.py --peers`;
ggml_library.py says how to install it.

With 4-bit weights it rounds activations to int8, with a scale for each 32 of them (Q4_K: for each
256). Its products in AMX's tiles take one matrix (MUL_MAT), not those of experts (MUL_MAT_ID), so
that these run on AVX-512.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from weakref import finalize

import ggml_library as ggml
import torch
from torch import Tensor

from fusion_moe.encodings import Quantized, dequantize
from fusion_moe.runtime.host_memory import bandwidth

# x bf16 [T, H], ids int64 [T, k], w f32 [T, k] -> [T, H]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def blocks(q: Quantized) -> Tensor:
    """NVFP4 or MXFP4 -> uint8 [E, N, bytes of a row] as ggml has them: the same numbers, without
    NVFP4's scale of a matrix.

    MXFP4: the scale of 32 elements, then their codes. NVFP4: the scales of four times 16, then
    their codes. Of the codes of one scale, those of the first half are the low nibbles.
    """
    codes, scales, together = (
        q[0],
        q[1].view(torch.uint8),
        {"mxfp4": 1, "nvfp4": 4}[q.encoding.name],
    )
    of_one = codes.shape[2] // scales.shape[2]  # bytes
    made = torch.empty(
        *scales.shape[:2], scales.shape[2] // together, together * (1 + of_one), dtype=torch.uint8
    )
    for block, c, s in zip(made, codes, scales, strict=True):
        first, second = torch.stack((c & 15, c >> 4), -1).view(*s.shape, 2, of_one).unbind(2)
        block[..., :together] = s.view(len(s), -1, together)
        block[..., together:] = (first | second << 4).view(len(s), -1, together * of_one)
    return made.flatten(2)


def integers(q: Quantized, dtype: str) -> Tensor:
    """These weights, rounded to another of ggml's types by its own function -> uint8 [E, N, bytes
    of a row]; alike experts once.
    """
    g, (experts, n, k), seen = ggml.load(), q.shape, dict[int, int]()
    made, rows = (
        torch.empty(experts, n, g.row_size(g.types[dtype], k), dtype=torch.uint8),
        -(-n // bandwidth.cpus()),
    )
    with ThreadPoolExecutor() as pool:
        for e in range(experts):
            if (like := seen.setdefault(hash(q[0][e].numpy().tobytes()), e)) != e:
                made[e] = made[like]
                continue
            w = dequantize(q.of(part[e] for part in q))
            quantize = partial(g.quantize_chunk, g.types[dtype], w.data_ptr(), made[e].data_ptr())
            list(
                pool.map(
                    lambda i, quantize=quantize: quantize(i * k, min(rows, n - i), k, None),
                    range(0, n, rows),
                )
            )
    return made


class Ggml:
    """Whole layers as llama.cpp computes them (its build_moe_ffn, gate and up in one tensor), on as
    many threads as torch has when called.

    Layers keep copies of their weights in memory of ggml's, which has activations in float32: a
    graph first casts those given, in bf16; a layer's result is float32, and there until the next
    call. ImportError where it is not installed.
    """

    name = "ggml"
    workers: Sequence[int] = ()  # of one thread: it is the calling one

    def __init__(self) -> None:
        features = [
            f
            for f in ("AVX2", "AVX512", "AVX512_VNNI", "AMX_INT8", "OPENMP")
            if f in ggml.load().features
        ]
        self.version = f"{ggml.load().version().decode()} ({', '.join(features)})"

    def rest(self) -> None:
        """Lets its threads sleep until the next call. OpenMP's do so by themselves, some
        milliseconds after one.
        """
        ggml.rest()

    def layers(
        self, dtype: str, kind: str, copies: Sequence[tuple[Quantized, Quantized]]
    ) -> list[Layer]:
        """Layers of copies of the same gate_up [E, 2I, H] and down [E, H, I], in a type of ggml's
        and a kind of its memory.

        RuntimeError or ValueError for what it does not take.
        """
        g = ggml.load()
        if dtype not in g.types or kind not in g.memory:
            raise RuntimeError(
                f"this ggml has types {', '.join(g.types)}, memory "
                f"{', '.join(g.memory)}; expected {dtype} and {kind}"
            )
        for q in copies[0]:
            if q.shape[2] % (size := g.blck_size(g.types[dtype])):
                raise ValueError(f"rows of {q.shape[2]}, expected a multiple of {size} for {dtype}")
        made = _Layers(dtype, kind, copies[0], len(copies))
        return [partial(made, copy) for copy in range(len(copies))]


class _Layers:
    """Layers with the same weights, each with its copy; activations are in the same place, as those
    of a model's layers are.
    """

    def __init__(self, dtype: str, kind: str, matrices: tuple[Quantized, Quantized], copies: int):
        g, self._sizes, exact = ggml.load(), matrices[1].shape, dtype == matrices[0].encoding.name
        elements = [blocks(q) if exact else integers(q, dtype) for q in matrices]
        scales = [q[2] for q in matrices if exact and len(q) > 2]  # NVFP4's, of each matrix
        self._tensors, self._weights, self._graphs, self._rooms = (
            list[ggml.Tensors](),
            list[list[int]](),
            {},
            dict[tuple[int, int], int](),
        )
        for _ in range(copies):
            t, of_scales = ggml.Tensors(), ggml.Tensors()
            weights = [t.new(dtype, *q.shape[::-1]) for q in matrices] + [
                of_scales.new("f32", 1, len(scale)) for scale in scales
            ]
            t.place(kind)
            if scales:
                of_scales.place(ggml.PLAIN)
            for weight, q in zip(weights, matrices, strict=False):
                product = t.mul_mat_id(weight, t.new("f32", q.shape[2], 1, 1), t.new("i32", 1, 1))
                if not g.backend_dev_supports_op(g.device, product):
                    raise RuntimeError(
                        f"no products of {dtype} in {kind}, {q.shape[1]} x {q.shape[2]}"
                    )
            for weight, values in zip(weights, elements + scales, strict=True):
                g.backend_tensor_set(weight, values.data_ptr(), 0, values.nbytes)
            self._tensors += [t, of_scales]
            self._weights.append(weights)

    def __call__(self, copy: int, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        key = (copy, *ids.shape)
        if key not in self._graphs:
            self._graphs[key] = self._graph(*key)
        graph, into, of_ids, of_w, y = self._graphs[key]
        ctypes.memmove(into, x.data_ptr(), x.nbytes)
        of_ids.copy_(ids)
        of_w.copy_(w)
        ggml.compute(graph, torch.get_num_threads())
        return y

    def _graph(self, copy: int, tokens: int, slots: int) -> tuple[int, int, Tensor, Tensor, Tensor]:
        """A graph, where its x goes, ids and w; what it makes."""
        (experts, hidden, inner), t, g = self._sizes, ggml.Tensors(), ggml.load()
        x, ids, w = inputs = (
            t.new("bf16", hidden, 1, tokens),
            t.new("i32", slots, tokens),
            t.new("f32", 1, slots, tokens),
        )
        weights, scales = self._weights[copy][:2], self._weights[copy][2:]

        def product(which: int, rows: int) -> int:
            made = t.mul_mat_id(weights[which], rows, ids)
            return (
                t.mul(made, t.get_rows(t.repeat_4d(scales[which], 1, experts, tokens, 1), ids))
                if scales
                else made
            )

        gate_up = product(0, t.cast(x, g.types["f32"]))
        halves = [
            t.view_3d(gate_up, inner, slots, tokens, 8 * inner, 8 * inner * slots, 4 * inner * half)
            for half in range(2)
        ]
        each = t.mul(product(1, t.swiglu_split(*halves)), w)
        of_slots = [
            t.view_2d(each, hidden, tokens, 4 * hidden * slots, 4 * hidden * slot)
            for slot in range(slots)
        ]
        *_, y = accumulate(of_slots, t.add)
        for tensor in inputs:
            g.set_input(tensor)
        g.set_output(y)
        graph = t.graph(each, *of_slots, y)  # llama.cpp's order
        if (tokens, slots) not in self._rooms:
            self._rooms[tokens, slots] = g.gallocr_new(g.memory[ggml.PLAIN])
            finalize(self, g.gallocr_free, self._rooms[tokens, slots])
        if not g.gallocr_alloc_graph(self._rooms[tokens, slots], graph):
            raise MemoryError("ggml_gallocr_alloc_graph: no memory for a graph")
        self._tensors.append(t)
        of_ids, of_w = (
            ggml.view(ids, torch.int32, tokens, slots),
            ggml.view(w, torch.float32, tokens, slots),
        )
        return graph, g.get_data(x), of_ids, of_w, ggml.view(y, torch.float32, tokens, hidden)
