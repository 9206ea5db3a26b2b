"""A process of two: vLLM's load balancing moves experts between ranks and gives them replicas.
Raises if they are not, byte for byte, those of the new arrangement.

Arguments: the rank; a file in which ranks meet.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import distributed

LOGICAL, PHYSICAL, RANKS, H, I = 4, 6, 2, 64, 32
NAME = "model.layers.0.mlp.experts"


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """[E, bytes]"""
    return t.detach().reshape(len(t), -1).view(torch.uint8)


def layer(rank: int) -> Any:
    """vLLM's layer with weights, at first in vLLM's own arrangement: 0 1 2 | 3 0 1."""
    from method_layers import load_nvfp4
    from test_vllm_config import NVFP4_CONFIG, layer as configuration, parallel
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    from fusion_moe.encodings import NVFP4, quantize
    from fusion_moe.integrations.vllm.config import FusionMoeConfig

    ranks = parallel(ep_size=RANKS, ep_rank=rank, enable_eplb=True)
    redundant = PHYSICAL - LOGICAL
    placed = ExpertMapManager(64, 2, PHYSICAL, redundant, None, ranks, "linear", True)
    moe = dataclasses.replace(
        configuration(in_dtype=torch.float32, moe_parallel_config=ranks),
        num_experts=PHYSICAL,
        num_local_experts=placed.local_num_experts,
    )
    quantization = FusionMoeConfig.from_config(NVFP4_CONFIG)
    owner = RoutedExperts(NAME, torch.float32, moe, quantization, placed)
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    for e in range(LOGICAL):
        for name, shape in shapes.items():
            load_nvfp4(owner, e, name, quantize(torch.randn(shape, generator=g), NVFP4))
    owner.quant_method.process_weights_after_loading(owner)
    return owner


def balance(rank: int, order: str) -> None:
    """With weights in an order."""
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    from fusion_moe import backends

    group = distributed.group.WORLD
    cpu = backends.TARGETS["cpu"]
    pretended = dataclasses.replace(cpu, weight_layout=order)
    backends._registered["cpu"] = backends.backend_of(cpu), pretended
    owner = layer(rank)
    module = owner.fusion_moe
    assert module.weight_layout == order
    weights = [list(owner.get_expert_weights())]
    assert all(t.shape[0] == PHYSICAL // RANKS for t in weights[0])
    addresses = [p.data_ptr() for p in module.parameters()]
    arranged = [0, 1, 2, 3, 0, 1]
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, H, generator=g), torch.rand(5, 2, generator=g)

    def results(place: int) -> torch.Tensor:
        """Of the expert in a place; zeros on the other rank."""
        return owner.quant_method.apply(owner, x, w, torch.tensor([[place, -1]] * 5).int())

    states: list[Any] = [None] * RANKS
    distributed.all_gather_object(states, {n: as_bytes(t) for n, t in module.state_dict().items()})
    wanted = [results(arranged.index(e)) for e in range(LOGICAL)]
    for each in wanted:
        distributed.all_reduce(each)
        assert each.any()
    for after in ([3, 0, 3, 1, 2, 0], [2, 2, 1, 0, 3, 1], [0, 1, 2, 3, 0, 1]):
        rearrange_expert_weights_inplace(
            torch.tensor([arranged]),
            torch.tensor([after]),
            weights,
            [torch.empty_like(t) for t in weights[0]],
            group,
            TorchDistNcclEplbCommunicator(ep_group=group),
        )
        for local, e in enumerate(after[3 * rank : 3 * rank + 3]):
            from_rank, row = divmod(e, 3)
            for name, t in module.state_dict().items():
                assert torch.equal(as_bytes(t)[local], states[from_rank][name][row]), (after, name)
            assert torch.equal(results(3 * rank + local), wanted[e])
        assert [p.data_ptr() for p in module.parameters()] == addresses
        arranged = after


def main() -> None:
    import vllm.model_executor.parameter as parameter

    rank, meeting = int(sys.argv[1]), sys.argv[2]
    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    for order in "linear", "w16x64":
        balance(rank, order)
    print("BALANCED")


if __name__ == "__main__":
    main()
