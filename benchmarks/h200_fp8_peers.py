"""Kernels of other packages for FP8 rows by FP8 weights, as contenders of h200_moe.py: vLLM's
fused_moe in Triton, Hugging Face's kernels-community/finegrained-fp8, and DeepGEMM, with float32
scales of 128 x 128 weights and of 128 columns of a row. All have the weights of contender "fp8".

vLLM's launch, configurations and tuned files are used, and this library's `route` and `combine` and
kernels of h200_align.py for what vLLM has in CUDA C++. finegrained-fp8 begins with ids and ends
with tokens, and tunes itself for minutes at each new size. It is a folder of Python files and no
package of PyPI: put torch-ext/finegrained_fp8 of github.com/huggingface/kernels-community, with the
file _ops.py that its build adds, on the path.
DeepGEMM has products of groups of whole 128 rows, as of model "equal" with a multiple of 128
tokens. It is the version whose host is in Python (commit 03d0be3), with headers of CUTLASS in its
include folder; it compiles by nvcc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from h200_cells import Cell, Routed
from h200_contenders import Call, Contender, Fp8
from h200_humming import aligned
from torch import Tensor

_BLOCK = 128
_FEW = 4  # of a call with fewer slots than experts by this factor vLLM does not sort ids


class Blocks(Contender):
    """Whole MLPs by weights with one scale for 128 x 128."""

    @cached_property
    def weights(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Of each layer, gate and up, and down: e4m3 [E, N, K], f32 [E, N / 128, K / 128]."""
        layers = Fp8(self.model, self.layers).weights
        return [[(w[0], w[1][:, ::_BLOCK].float().contiguous()) for w in layer] for layer in layers]

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        if cell.part != "mlp":
            raise NotImplementedError("whole MLPs only")
        return Call(self.mlp(to, *self.weights[layer]), layer, to)

    def mlp(self, to: Routed, gate_up: Any, down: Any) -> Callable[[], Tensor]:
        raise NotImplementedError


class Vllm(Blocks):
    """The Triton kernel that vLLM runs where DeepGEMM and others are not."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        import vllm.model_executor.layers.fused_moe.fused_moe  # noqa: F401

    def mlp(self, to: Routed, gate_up: Any, down: Any) -> Callable[[], Tensor]:
        from h200_align import to_e4m3
        from vllm.model_executor.layers.fused_moe import fused_moe

        ops, rows, (tokens, slots) = torch.ops.fusion_moe, to.ids.numel(), to.ids.shape
        config = fused_moe.try_get_optimal_moe_config(
            gate_up[0].shape, down[0].shape, slots, "fp8_w8a8", tokens, [_BLOCK, _BLOCK]
        )
        height, experts = config["BLOCK_SIZE_M"], self.model.experts
        in_place = torch.arange(rows, dtype=torch.int32, device="cuda").view(to.ids.shape)
        each_alone = None, to.ids.flatten(), torch.full_like(in_place[:1, 0], rows * height)

        def sorted_slots() -> tuple[Tensor | None, Tensor, Tensor]:
            if rows * _FEW <= experts:
                return each_alone
            ends, _, slot_of = ops.route(to.ids, experts)
            found = aligned(to.ids, ends, slot_of, height)
            return found["sorted_ids"], found["expert_ids"], found["num_tokens_padded"].view(1)

        def product(x: tuple[Tensor, Tensor], weight: Any, top_k: int, where: Any) -> Tensor:
            y = torch.empty(len(x[0]), top_k, weight[0].shape[1], dtype=to.x.dtype, device="cuda")
            fused_moe.invoke_fused_moe_triton_kernel(
                x[0],
                weight[0],
                y,
                x[1],
                weight[1],
                None,
                *where,
                mul_routed_weight=False,
                top_k=top_k,
                config=config,
                compute_type=fused_moe.tl.bfloat16,
                use_fp8_w8a8=True,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=False,
                block_shape=[_BLOCK, _BLOCK],
            )
            return y.view(rows, -1)

        def run() -> Tensor:
            where = sorted_slots()
            h = product(to_e4m3(to.x), gate_up, slots, where)
            y = product(to_e4m3(h, gated=True), down, 1, where)
            return ops.combine(y, in_place, to.w)

        return run


class Finegrained(Blocks):
    """One call, for each slot alone or for slots sorted by expert."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        import finegrained_fp8  # noqa: F401

    def mlp(self, to: Routed, gate_up: Any, down: Any) -> Callable[[], Tensor]:
        import finegrained_fp8

        few = to.ids.numel() <= self.model.experts
        call = finegrained_fp8.moe_fused_batched if few else finegrained_fp8.moe_fused_grouped
        weights = gate_up[0], down[0], gate_up[1], down[1]
        return partial(call, to.x, to.ids, to.w, *weights, [_BLOCK, _BLOCK])


class DeepGemm(Blocks):
    """Products of groups whose rows follow each other."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        import deep_gemm  # noqa: F401

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        import deep_gemm
        from h200_align import to_e4m3

        if cell.part == "mlp" or any(count % _BLOCK for count in to.counts):
            raise NotImplementedError("products of groups of whole 128 rows only")
        weight, rows = self.weights[layer][cell.part == "gemm2"], to.rows(cell.part)
        experts = torch.arange(self.model.experts, dtype=torch.int32, device="cuda")
        group_of = experts.repeat_interleave(torch.tensor(to.counts, device="cuda"))

        def run() -> Tensor:
            y = rows.new_empty(len(rows), weight[0].shape[1])
            deep_gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
                to_e4m3(rows, by_columns=True), weight, y, group_of
            )
            return y

        return Call(run, layer, to)
