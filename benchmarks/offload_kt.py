"""Layers with kt-kernel's experts on the CPU beside ours on the GPU, where it is installed
(cpu_peers.py says how), for offload.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cpu_peers import KtKernel, KtLayer
from offload_layers import Direct
from torch import Tensor

from fusion_moe.encodings import ENCODINGS, Quantized
from fusion_moe.layouts.groups import ceil_to
from fusion_moe.offload.device import HostStorage
from fusion_moe.offload.worker import Worker

INT4 = "AMXInt4_MOE"  # by AVX-512 without AMX
# the fastest in results/cpu.md of those that take the sizes
KERNELS = {"nvfp4": [INT4], "mxfp4": ["AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"]}
ERROR = 0.35  # at most: that of int4 with a scale a row, and of activations in int8
PAUSE = 0.07  # s; its threads spin for up to 0.05, and ours too


class Kt:
    """Layers of a model, all experts of each of which are alike, by each of its kernels.
    ImportError where kt-kernel is not installed.
    """

    name = "kt-kernel"

    def __init__(self, stored: Sequence[HostStorage], tokens: int, of_token: int):
        kt = KtKernel(Worker.of_process().threads, ceil_to(tokens, 32), of_token)
        print(f"{self.name} {kt.version}", flush=True)
        self.there = torch.zeros(stored[0].experts, dtype=torch.bool)  # the GPU's, which it skips
        self.layers = [
            {kernel: self._layer(kt, kernel, storage) for kernel in KERNELS[storage.format]}
            for storage in stored
        ]

    def _layer(self, kt: KtKernel, kernel: str, storage: HostStorage) -> KtLayer:
        gate_up, down = (_weights(storage, name) for name in ("gate_up", "down"))
        if kernel != INT4:
            return kt.fp4(kernel, gate_up, down, self.there)
        gate_up, down = (q.of(t[:1] for t in q) for q in (gate_up, down))
        return kt.int4(kernel, gate_up, down, self.there, storage.experts)

    def steps(self, layer: int, gpu: Direct, x: Tensor, w: Tensor) -> dict[str, Step]:
        """Those of a layer for tensors like these, until the next number of experts is there."""
        self.there[:] = torch.arange(len(self.there)) < gpu.there
        return {n: Step(kt, gpu, x, w) for n, kt in self.layers[layer].items()}


class Step:
    """A layer as SGLang has it: activations go to the host on a stream of their own, where host
    functions begin the CPU's experts and wait for them; the GPU's are multiplied meanwhile.
    """

    def __init__(self, kt: KtLayer, gpu: Direct, x: Tensor, w: Tensor):
        self.gpu, self.pool, self.tokens = gpu, kt.pool, torch.tensor([len(x)]).int()
        dtypes = torch.int64, torch.float32, x.dtype, x.dtype
        self.ids, self.w, self.x, self.made = (
            torch.zeros(t.shape, dtype=dtype, pin_memory=x.is_cuda)
            for t, dtype in zip((w, w, x, x), dtypes, strict=True)
        )
        self.task = kt.task(self.tokens, self.ids, self.w, self.x, self.made)
        self.slots = torch.arange(gpu.storage.experts, device=x.device)
        self.slots[gpu.there :] = -1  # no expert
        self.side: Any = torch.cuda.Stream() if x.is_cuda else None

    def __call__(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        if self.side is None:
            self._copy(x, ids, w)
            self.pool.submit(self.task)
            y = self.gpu.plain(x, self.slots[ids], w)
            self.pool.sync()
            return y + self.made
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self._copy(x, ids, w)
            self.pool.submit_with_cuda_stream(self.side.cuda_stream, self.task)
        y = self.gpu.plain(x, self.slots[ids], w)
        with torch.cuda.stream(self.side):
            self.pool.sync_with_cuda_stream(self.side.cuda_stream)
            made = self.made.to(x.device, non_blocking=True)
        main.wait_stream(self.side)
        return y + made

    def _copy(self, x: Tensor, ids: Tensor, w: Tensor) -> None:
        for to, t in (self.x, x), (self.ids, ids), (self.w, w):
            to.copy_(t, non_blocking=True)


def is_right(name: str, found: Tensor, want: Tensor) -> bool:
    """Whether a step computes the layer, as far as its format lets it; else it is left out."""
    error = float((found.float() - want.float()).norm() / want.float().norm())
    if not error <= ERROR:
        print(f"{name} is left out: {error:.3f} of the result is wrong", flush=True)
    return error <= ERROR


def _weights(storage: HostStorage, name: str) -> Quantized:
    parts = (t for n, t in storage.tensors.items() if n.startswith(f"{name}["))
    return Quantized(*parts, encoding=ENCODINGS[storage.format])
