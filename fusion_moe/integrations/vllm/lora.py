"""Adapters of experts (`--enable-lora`): vLLM loads them into slots and drops them, this library
adds their products to those of the experts.

The features of all slots together are one adapter for `fused_experts`, of which each token has
those of its own slot. So shapes never change: adapters come and go under the same CUDA graphs.
Letters: L slots, r rank, E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.lora import layers, utils
from vllm.lora.layers import BaseLayerWithLoRA

from ...nn import Experts
from ..serving import compile_, invariant, unsupported


class Slots:
    """The adapters of a projection [E, N, K] in L slots: zeros, until one is loaded.

    a [E, R, K] and b [E, N, R], with R = s * L * r features; of int64[R], the slot of each. Gate
    and up have features of their own (s = 2), unless an adapter has one A for both. a_slices,
    b_slices: s views, [L, E, r, K] and [L, E, N / s, r], through which vLLM writes.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        slots: int,
        rank: int,
        like: Tensor,
        slices: int = 1,
        alternate: bool = False,
    ):
        """shape: E, N and K. like: of the dtype and on the device of activations. alternate:
        whether rows of gate and up take turns.
        """
        (experts, n, k), features = shape, (slices, slots, rank)
        self.of = torch.arange(slots, device=like.device).repeat_interleave(rank).repeat(slices)
        self.a = like.new_zeros(experts, len(self.of), k)
        self.b = like.new_zeros(experts, n, len(self.of))
        a = self.a.unflatten(1, features)
        rows = self.b.unflatten(2, features).unflatten(
            1, (-1, slices) if alternate else (slices, -1)
        )
        b = rows.transpose(1, 2) if alternate else rows
        self.a_slices = tuple(a[:, i].transpose(0, 1) for i in range(slices))
        self.b_slices = tuple(b[:, i, :, i].permute(2, 0, 1, 3) for i in range(slices))


class Served:
    """How these layers differ from vLLM's of the same names: where the adapters
    lie, and who adds their products.
    """

    joined = False  # whether gate and up have one A
    base_layer: Any
    moe_config: Any
    punica_wrapper: Any

    def __init__(self, base_layer: Any):
        """base_layer: vLLM's runner of a layer whose experts are this library's."""
        # not that of the next class, which needs a kernel of vLLM
        BaseLayerWithLoRA.__init__(self)
        self.base_layer, self.moe_config = base_layer, base_layer.moe_config
        self._shared_experts = base_layer._shared_experts
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
        self.device = self.experts.weight_of("down").device
        self._w13_slices = 2 if self.moe_config.is_act_and_mul and not self.joined else 1
        self.n_slices = self.moe_config.num_local_experts * (self._w13_slices + 1)

    @property
    def experts(self) -> Experts:
        """The module of this library that computes the layer's experts."""
        return self.base_layer.routed_experts.fusion_moe

    @classmethod
    def can_replace_layer(cls, source_layer: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether vLLM's class would replace the layer, and this library has its experts."""
        routed = getattr(source_layer, "routed_experts", None)
        ours = isinstance(getattr(routed, "fusion_moe", None), Experts)
        return ours and super().can_replace_layer(source_layer, *args, **kwargs)  # type: ignore[misc]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """New weights of experts, by the names in files, or by vLLM's, with "base_layer."."""
        named = ((name.replace(".base_layer.", "."), t) for name, t in weights)
        return super().load_weights(named)  # type: ignore[misc]

    def _create_lora_a_weights(self, max_loras: int, lora_config: Any) -> None:
        """Both factors of both projections."""
        like = torch.empty(0, dtype=self.moe_config.in_dtype, device=self.device)
        experts, size = self.experts, (max_loras, lora_config.max_lora_rank, like)
        first, second = map(experts.shape_of, experts.projections)
        up = Slots(first, *size, self._w13_slices, alternate=bool(experts.interleave))
        down = Slots(second, *size)
        self.slots = up, down
        self.factors = self._factors()
        self.w13_lora_a_stacked, self.w13_lora_b_stacked = up.a_slices, up.b_slices
        self.w2_lora_a_stacked, self.w2_lora_b_stacked = down.a_slices, down.b_slices

    def _create_lora_b_weights(self, max_loras: int, lora_config: Any) -> None:
        """Made with A."""

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Writes an adapter to a slot. Infinity and NaN in B become numbers: times the zeros that
        other slots' tokens have there, they would be NaN.
        """
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        for b in (*self.w13_lora_b_stacked, *self.w2_lora_b_stacked):
            b[index].nan_to_num_()
        self._update()

    def reset_lora(self, index: int) -> None:
        """Empties a slot, also for an adapter that has nothing for these experts."""
        super().reset_lora(index)  # type: ignore[misc]
        self._update()

    def set_mapping(self, punica_wrapper: Any) -> None:
        """punica_wrapper: what knows each token's slot. Compiles the kernels."""
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        moe = self.moe_config
        with invariant(envs.VLLM_BATCH_INVARIANT):
            compile_(self.experts, moe.in_dtype, moe.experts_per_token, self._arguments)
        self.base_layer.routed_experts.quant_method.adapters = self.arguments

    def arguments(self, tokens: int) -> dict[str, Tensor]:
        """The arguments of `fused_experts` for adapters; none if no token of this step has one,
        which the host knows.
        """
        # on GPUs a flag, on the host
        meta = getattr(self.punica_wrapper, "token_mapping_meta", None)
        none = self.punica_wrapper.no_lora if meta is None else meta.no_lora_flag_cpu.item()
        return {} if none else self._arguments(tokens)

    def _arguments(self, tokens: int) -> dict[str, Tensor]:
        # padded as a graph's batch is, unlike what the wrapper's property returns
        return {"lora_of": self.punica_wrapper._token_lora_indices[:tokens], **self.factors}

    def _update(self) -> None:
        for name, t in self._factors().items():
            self.factors[name].copy_(t)

    def _factors(self) -> dict[str, Tensor]:
        """All slots, as `fused_experts` takes them: copies where weights are padded."""
        results: dict[str, Tensor] = {}
        named = zip(("gate_up", "down"), self.experts.projections, self.slots, strict=True)
        for name, projection, slots in named:
            a, b = self.experts.padded_factors(projection, slots.a, slots.b)
            results |= {f"{name}_lora_a": a, f"{name}_lora_b": b, f"{name}_lora_of": slots.of}
        return results


class FusedMoEWithLoRA(Served, layers.FusedMoEWithLoRA):
    """Adapters of each expert's gate, up and down. vLLM's manager knows the layer by this name."""


class FusedMoE3DWithLoRA(Served, layers.FusedMoE3DWithLoRA):
    """Adapters of gate and up together, with the rows of B in the order of the weight's."""

    joined = True


def need_served(moe: Any) -> None:
    """Makes vLLM use the layers above for experts of this library.

    UnsupportedError for adapters that cannot be served, by vLLM's configuration of a layer, and of
    adapters.
    """
    lora, parallel = get_current_vllm_config().lora_config, moe.moe_parallel_config
    refused = {
        "--fully-sharded-loras": lora.fully_sharded_loras,
        "--enable-moe-shared-loras": lora.enable_moe_shared_loras,
        "--data-parallel-size": parallel.dp_size > 1 or parallel.use_all2all_kernels,
        "--enable-eplb": parallel.enable_eplb,
    }
    if results := [option for option, argument in refused.items() if argument]:
        raise unsupported(
            "vLLM",
            f"--enable-lora with {' and '.join(results)}",
            "whole adapters, one for each expert, and experts and tokens that stay where they are",
            "leave out one of the two options",
        )
    ours = FusedMoEWithLoRA, FusedMoE3DWithLoRA
    if utils._all_lora_classes[:2] != ours:
        utils._all_lora_classes = (*ours, *utils._all_lora_classes)
