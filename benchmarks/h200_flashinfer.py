"""FlashInfer (package flashinfer-python) as contenders of h200_moe.py, whole MLPs: cuTile kernels
for rows of 16 bits by NVFP4 weights, with the tiles that its tuner finds for each number of tokens;
and MonoMoE, one kernel from a router's logits to tokens, for FP8, up to 8 tokens and the sizes of
model "qwen3.6" alone.

cuTile needs cuda-tile[tileiras] and no nvcc. nvcc compiles MonoMoE when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from h200_cells import Cell, Routed, routed_once
from h200_contenders import Call, Contender
from h200_fp8_peers import Blocks
from torch import Tensor

_NEVER = -1e4  # a logit


class CuTile(Contender):
    """W4A16: FlashInfer's layer with this backend alone."""

    @cached_property
    def layer(self) -> Any:
        from flashinfer import fused_moe as f

        return f.MoELayer(
            f.MoEConfig(
                routing=f.RoutingConfig(self.model.experts, self.model.slots),
                quant=f.QuantConfig(weight=f.QuantFormat.NVFP4),
                experts=f.ExpertConfig(self.model.intermediate),
                backend=f.BackendOptions((f.CuTileNvfp4Bf16Config(),)),
            )
        )

    @cached_property
    def weights(self) -> list[Any]:
        from flashinfer.fused_moe import CuTileNvfp4Bf16Config, MoEWeightPack

        model, found = self.model, []
        for (codes, scales, decode), down in self.layers:
            up_first = (torch.cat(part.chunk(2, 1)[::-1], 1) for part in (codes, scales))
            view = CuTileNvfp4Bf16Config.prepare_weights(
                *up_first,
                decode,
                *down,
                num_local_experts=model.experts,
                hidden_size=model.hidden,
                intermediate_size=model.intermediate,
            )
            found.append(MoEWeightPack({self.layer.runners[0].backend_key: view}))
        return found

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Compiles and times its tiles."""
        from flashinfer.autotuner import autotune

        with autotune():
            for cell in cells:
                self.run(cell, 0, routed_once(cell, 0)).run()

    def run(self, cell: Cell, layer: int, to: Routed) -> Call:
        from flashinfer.fused_moe import MoEActivationPack

        if cell.part != "mlp":
            raise NotImplementedError("whole MLPs only")
        tokens = MoEActivationPack(to.x, None, to.ids, to.w.float())
        return Call(partial(self.layer, tokens, self.weights[layer]), layer, to)


class MonoMoe(Blocks):
    """It chooses experts too."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Puts the rows of gate and up in its order."""
        from flashinfer.fused_moe.monomoe import alloc_scratchpad, interleave_for_tma_wgmma_up

        self.scratchpad = alloc_scratchpad(torch.device("cuda"))
        for (gate_up, _), _ in self.weights:
            interleave_for_tma_wgmma_up(gate_up)  # which keeps it

    def mlp(self, to: Routed, gate_up: Any, down: Any) -> Callable[[], Tensor]:
        from flashinfer.fused_moe.monomoe import mono_moe

        logits = torch.full((len(to.x), self.model.experts), _NEVER, device="cuda")
        logits.scatter_(1, to.ids.long(), to.w.float().log())
        return partial(
            mono_moe,
            to.x,
            logits.bfloat16(),
            *gate_up,
            *down,
            top_k=self.model.slots,
            scratchpad=self.scratchpad,
        )
