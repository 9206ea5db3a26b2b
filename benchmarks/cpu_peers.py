"""Layers of KTransformers on the CPU, where it is installed, for cpu_moe.py, cpu_training.py and
offload.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_moe.encodings import Quantized, dequantize

# x bf16 [T, H], ids int64 [T, k], w f32 [T, k] -> bf16 [T, H]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
Factors = tuple[Tensor, ...]  # bf16 A [E, r, K] and B [E, N, r] of gate_up, then of down
# x, ids, w of a layer, dy bf16 [T, H] -> the gradients of x, of w and of factors
TrainingStep = Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]


@dataclass(frozen=True)
class KtLayer:
    """A layer whose weights are loaded: a `Layer`."""

    pool: Any
    moe: Any
    slots: int

    def task(self, tokens: Tensor, ids: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Any:
        """What the pool takes, now or by the host functions of a stream. tokens: int32 [1]. All
        tensors are read and written when it runs.
        """
        addresses = [t.data_ptr() for t in (ids, w, x, y)]
        return self.moe.forward_task(tokens.data_ptr(), self.slots, *addresses, False)

    def __call__(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y, tokens = torch.empty_like(x), torch.tensor([len(x)], dtype=torch.int32)
        self.pool.submit(self.task(tokens, ids, w, x, y))
        self.pool.sync()
        return y


class KtKernel:
    """Whole layers by KTransformers' kernels, all experts on the CPU, with one pool of threads.

        pip install --no-deps --target DIR kt-kernel==0.7.2     # its dependencies would replace
                                                                torch; then PYTHONPATH=DIR
        pip install gguf safetensors                            # which importing it takes

    Layers are made and called through its extension, as its own benchmarks do. Its KTMoEWrapper
    would add what a layer needs that waits for a GPU: copies of activations, memory that CUDA pins.
    Layers keep copies of their weights, in an order of their own. ImportError where it, or what it
    imports, is not installed.
    """

    name = "kt-kernel"

    def __init__(self, threads: int, most_tokens: int, slots: int):
        import kt_kernel

        extension = kt_kernel.kt_kernel_ext
        self.variant = kt_kernel.__cpu_variant__  # "amx", "avx512_bf16", ..., "avx2"
        self.version = f"{kt_kernel.__version__} ({self.variant})"
        self._moe, self._most_tokens, self._slots = extension.moe, most_tokens, slots
        workers = extension.WorkerPoolConfig()
        workers.subpool_count, workers.subpool_numa_map, workers.subpool_thread_count = (
            1,
            [0],
            [threads],
        )
        self._pool = extension.CPUInfer(workers)

    @property
    def workers(self) -> list[int]:
        """The threads that compute, by their names. Another one spins until they are done.
        ValueError for none.
        """
        threads = Path("/proc/self/task").iterdir()
        if not (
            found := [int(t.name) for t in threads if (t / "comm").read_text().startswith("numa_")]
        ):
            raise ValueError("kt-kernel has no threads named numa_...")
        return found

    def rest(self) -> None:
        """Its threads sleep by themselves, at most 0.05 s after a call."""

    def has(self, kernel: str) -> bool:
        """Whether the variant for this CPU has a class of kernels."""
        return hasattr(self._moe, kernel)

    def fp4(
        self, kernel: str, gate_up: Quantized, down: Quantized, elsewhere: Tensor | None = None
    ) -> KtLayer:
        """NVFP4 or MXFP4 weights; the scale of a block becomes one bf16, as its loader of
        checkpoints makes it. elsewhere: as in `int4`.
        """
        config, parts = self._config(down, elsewhere), _parts(gate_up, down)
        _set_fp4(config, parts)
        return self._loaded(kernel, config)

    def lora(
        self, kernel: str, gate_up: Quantized, down: Quantized, factors: Factors, alpha: float
    ) -> TrainingStep:
        """Forward and backward of such weights, frozen, with adapters, of which gate and up have
        the same A.
        """
        (a, b, down_a, down_b), (experts, hidden, inner) = factors, down.shape
        gate_b, up_b = (half.contiguous() for half in b.chunk(2, 1))
        loras, order, parts = (
            (a, gate_b, a, up_b, down_a, down_b),
            torch.arange(experts),
            _parts(gate_up, down),
        )
        config = self._moe.MOESFTConfig()
        (
            config.expert_num,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
        ) = experts, self._slots, hidden, inner
        config.max_len, config.pool, config.lora_rank, config.lora_alpha = (
            self._most_tokens,
            self._pool.backend_,
            a.shape[1],
            alpha,
        )
        config.max_cache_depth, config.swiglu_limit, config.physical_to_logical_map = (
            1,
            _NO_LIMIT,
            order.data_ptr(),
        )
        _set_fp4(config, parts)
        layer = getattr(self._moe, kernel)(config)
        self._wait(layer.load_weights_task())
        layer.update_lora_weights(*(t.data_ptr() for t in loras))
        return partial(self._train, layer, loras)

    def _train(
        self, layer: Any, loras: Factors, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor
    ) -> list[Tensor]:
        y, dx, dw, grads = (
            torch.empty_like(x),
            torch.empty_like(x),
            torch.empty_like(w),
            [torch.zeros_like(t) for t in loras],
        )
        tokens = torch.tensor([len(x)], dtype=torch.int32)
        forward = layer.forward_sft_task(
            tokens.data_ptr(), self._slots, *(t.data_ptr() for t in (ids, w, x, y)), True
        )
        self._wait(forward)
        self._wait(layer.backward_task(*(t.data_ptr() for t in (dy, dx, *grads, dw)), 0, 0, 0))
        gate_a, gate_b, up_a, up_b, down_a, down_b = grads
        return [dx, dw, gate_a + up_a, torch.cat((gate_b, up_b), 1), down_a, down_b]

    def _wait(self, task: Any) -> None:
        self._pool.submit(task)
        self._pool.sync()

    def int4(
        self,
        kernel: str,
        gate_up: Quantized,
        down: Quantized,
        elsewhere: Tensor | None = None,
        copies: int = 1,
    ) -> KtLayer:
        """int4 weights with a scale for each row, which it makes of these weights in bf16; it
        rounds activations to int8. elsewhere: bool [E], the experts that it skips, which may change
        between calls. copies: how many experts have the weights of a single one.
        """
        config = self._config(down, elsewhere, copies)
        weights = [
            (w.expand(copies, -1, -1) if copies > 1 else w).contiguous()
            for w in (*_bf16(gate_up).chunk(2, 1), _bf16(down))
        ]
        config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in weights)
        return self._loaded(kernel, config)

    def bf16(self, kernel: str, gate_up: Quantized, down: Quantized) -> Layer:
        """These weights in bf16, without scales."""
        config = self._config(down)
        weights = [w.contiguous() for w in (*_bf16(gate_up).chunk(2, 1), _bf16(down))]
        config.gate_projs, config.up_projs, config.down_projs = map(_addresses, weights)
        config.gate_scales = config.up_scales = config.down_scales = [[0] * config.expert_num]
        return self._loaded(kernel, config)

    def _config(self, down: Quantized, elsewhere: Tensor | None = None, copies: int = 1) -> Any:
        experts, hidden, inner = down.shape
        config = self._moe.MOEConfig(experts * copies, self._slots, hidden, inner, 0)
        config.max_len, config.pool = self._most_tokens, self._pool.backend_
        if elsewhere is not None:
            config.gpu_experts_mask = elsewhere.data_ptr()
        return config

    def _loaded(self, kernel: str, config: Any) -> KtLayer:
        layer, order = getattr(self._moe, kernel)(config), torch.arange(config.expert_num)
        self._wait(layer.load_weights_task(order.data_ptr()))
        return KtLayer(self._pool, layer, self._slots)


_NO_LIMIT = 1e9  # of the activation: training with 4-bit weights takes one
_Parts = tuple[list[Tensor], list[Tensor]]  # codes, scales; of gate, up and down


def _parts(gate_up: Quantized, down: Quantized) -> _Parts:
    """Views of the codes, and the scale of each block."""
    return [*gate_up.codes.chunk(2, 1), down.codes], [*_folded(gate_up).chunk(2, 1), _folded(down)]


def _set_fp4(config: Any, parts: _Parts) -> None:
    """Tells a layer that is not loaded yet where its weights are."""
    config.quant_config.bits, config.quant_config.zero_point = 4, False
    codes, scales = parts
    config.quant_config.group_size = 2 * codes[0].shape[2] // scales[0].shape[2]
    config.gate_projs, config.up_projs, config.down_projs = map(_addresses, codes)
    config.gate_scales, config.up_scales, config.down_scales = map(_addresses, scales)


def _folded(q: Quantized) -> Tensor:
    """The scale of each block as one number -> bf16 [E, N, K/block]: rounded for NVFP4, exact for
    MXFP4.
    """
    _, scale, *of_matrix = q
    return (
        (scale.float() * of_matrix[0][:, None, None]).bfloat16() if of_matrix else scale.bfloat16()
    )


def matrices(q: Quantized, dtype: torch.dtype) -> list[Tensor]:
    """Each, dequantized; those of the same codes, which are copies, once: they are one tensor."""
    seen, made = dict[int, int](), list[Tensor]()
    for e, codes in enumerate(q[0]):
        like = seen.setdefault(hash(codes.view(torch.uint8).numpy().tobytes()), e)
        made.append(
            made[like]
            if like != e
            else dequantize(q.of(part[e] for part in q), torch.float32).to(dtype)
        )
    return made


def _bf16(q: Quantized) -> Tensor:
    """The weights; matrix by matrix, since float32 of all would take four times the memory."""
    return torch.stack(matrices(q, torch.bfloat16))


def _addresses(t: Tensor) -> list[list[int]]:
    """Where the matrix of each expert is, on the one NUMA node."""
    return [[matrix.data_ptr() for matrix in t]]
