"""Marlin, vLLM's kernels for NVFP4 weights by `mma.sync`, as a contender of h200_moe.py: whole MLPs
by vLLM's call. Its wheel has PTX for compute capability 8.0, which a Hopper runs as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from h200_cells import Cell, Routed
from h200_contenders import Call, Contender


class Marlin(Contender):
    """fused_marlin_moe, with the weights in the order of its kernels."""

    @cached_property
    def weights(self) -> list[dict[str, Any]]:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
            prepare_nvfp4_moe_layer_for_marlin,
        )
        from vllm.scalar_type import scalar_types

        of = SimpleNamespace(
            num_experts=self.model.experts,
            hidden_size=self.model.hidden,
            intermediate_size_per_partition=self.model.intermediate,
            params_dtype=torch.bfloat16,
        )
        names = ("w1", "w1_scale", "global_scale1", "w2", "w2_scale", "global_scale2")
        found = []
        for gate_up, down in self.layers:
            parts = (
                *(part.clone() for part in gate_up),
                *(part.clone() for part in down),
            )
            made = prepare_nvfp4_moe_layer_for_marlin(of, *parts, is_act_and_mul=True)
            others = {"bias1": None, "bias2": None, "quant_type_id": scalar_types.float4_e2m1f.id}
            found.append({**dict(zip(names, made, strict=True)), **others})
        return found

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Puts weights in order once."""
        assert self.weights

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe

        if cell.part != "mlp":
            raise NotImplementedError("whole MLPs only")
        weights = self.weights[layer]
        ids, w = to.ids.int(), to.w.float()

        def moe_sum(rows: torch.Tensor, tokens: torch.Tensor, *_: object) -> torch.Tensor:
            ops.moe_sum(rows, tokens)
            return tokens

        def run() -> torch.Tensor:
            return fused_marlin_moe(to.x, topk_weights=w, topk_ids=ids, moe_sum=moe_sum, **weights)

        return Call(run, layer, to)
