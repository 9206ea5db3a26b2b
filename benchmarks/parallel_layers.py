"""What h100_parallel.py divides: layers of experts, on each rank the same, their tokens, and the
ranks themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from h200_cells import MODELS, Model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fusion_moe.distributed.collectives import all_reduce
from fusion_moe.encodings import FP8_E8M0, NVFP4, Quantized, dequantize, quantize
from fusion_moe.nn import Experts, NVFP4Experts, add_lora_

MODELS_BY_NAME = {
    "deepseek": MODELS["deepseek"],
    "qwen3-235b": Model("Qwen3-235B-A22B", 128, 8, 4096, 1536),
    "tiny": Model("tiny", 16, 4, 128, 64),
}
LORA_RANK = 16
PASSES = {
    "forward": "forward",
    "fp8": "forward, FP8",
    "lora": "and backward, LoRA",
    "floats": "and backward, bf16",
}
FORWARDS = ("forward", "fp8")


@dataclass(frozen=True)
class World:
    """The ranks, and where they compute."""

    mesh: DeviceMesh
    device: torch.device

    @property
    def kind(self) -> str:
        """What computes."""
        return torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_rank()

    @property
    def group(self) -> str:
        return str(self.mesh.get_group().group_name)

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        t = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return float(t)

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of all tokens."""
        return [t.chunk(self.ranks)[self.rank].contiguous() for t in tensors]

    def of_experts(self, t: Tensor) -> Tensor:
        """The part for this rank's experts of what all have, in memory of its own."""
        each = math.ceil(len(t) / self.ranks)
        return t[each * self.rank :][:each].clone()


@dataclass(frozen=True)
class Cell:
    """A layer of a model at some tokens of each rank; passes: a key of PASSES."""

    name: str
    tokens: int
    passes: str
    routing: str

    @property
    def model(self) -> Model:
        return MODELS_BY_NAME[self.name]

    def inputs(self, world: World) -> list[Tensor]:
        """x bf16[T, H], ids i64[T, k], w bf16[T, k] and the result's gradient bf16[T, H] of all
        ranks' tokens, the same on all ranks. Routing "zipf": expert e is named as often as
        1 / (1 + e) ** 1.2, in an order that is spread over ranks.
        """
        model, tokens, device = self.model, self.tokens * world.ranks, world.device
        g = torch.Generator(device).manual_seed(tokens)
        scores = torch.rand(tokens, model.experts, device=device, generator=g).log()
        if self.routing == "zipf":
            order = torch.randperm(model.experts, device=device, generator=g)
            scores = scores * (order + 1).float() ** 1.2  # the largest of exponential variables
        ids = scores.topk(model.slots).indices
        w = torch.rand(tokens, model.slots, device=device, generator=g) + 0.1
        x, dy = (torch.randn(tokens, model.hidden, device=device, generator=g) for _ in "xy")
        return [x.bfloat16(), ids, (w / w.sum(1, keepdim=True)).bfloat16(), dy.bfloat16()]


# Layers -------------------------------------------------------------------------------------------


def nvfp4_experts(model: Model, device: torch.device) -> NVFP4Experts:
    """All experts: any codes, decode scales such that products of normal numbers are about 1 in
    size.
    """
    g = torch.Generator(device).manual_seed(0)
    weights = []
    for n, k in model.products("mlp"):
        codes = torch.randint(
            0, 256, (model.experts, n, k // 2), dtype=torch.uint8, device=device, generator=g
        )
        scales = torch.randint(
            0x60, 0x7F, (model.experts, n, k // 16), dtype=torch.uint8, device=device, generator=g
        )
        decode = (torch.rand(model.experts, device=device, generator=g) + 0.5) / (
            600 * math.sqrt(k)
        )
        weights.append(Quantized(codes, scales.view(torch.float8_e4m3fn), decode, encoding=NVFP4))
    return NVFP4Experts(*weights)


def fp8_experts(model: Model, device: torch.device) -> Experts:
    """Weights and rows in e4m3."""
    g, weights = torch.Generator(device).manual_seed(0), []
    for n, k in model.products("mlp"):
        some = [
            quantize(torch.randn(1, n, k, device=device, generator=g) / math.sqrt(k), FP8_E8M0)
            for _ in range(model.experts)
        ]
        weights.append(some[0].of(torch.cat(parts) for parts in zip(*some, strict=True)))
    return Experts(*weights, activation_format="fp8")


def adapted_experts(model: Model, device: torch.device) -> nn.Module:
    """The same, frozen, with adapters in bf16 that train."""
    module, g = nvfp4_experts(model, device), torch.Generator(device).manual_seed(1)
    add_lora_(module, rank=LORA_RANK, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.normal_(std=p.shape[-1] ** -0.5, generator=g)
    return module


def float_experts(model: Model, device: torch.device) -> nn.Module:
    """transformers' experts in bf16, which train as operations of this library."""
    import fusion_moe.transformers  # noqa: F401  # names its implementation

    module, g = theirs(model, model.experts, "fusion_moe"), torch.Generator(device).manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).shape
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for matrix in made:
            matrix.normal_(std=shape[-1] ** -0.5, generator=g)
        setattr(module, name, nn.Parameter(made))
    return module


LAYERS: dict[str, Callable[[Model, torch.device], nn.Module]] = {
    "forward": nvfp4_experts,
    "fp8": fp8_experts,
    "lora": adapted_experts,
    "floats": float_experts,
}


def theirs(model: Model, experts: int, implementation: str) -> Any:
    """transformers' module without weights."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=model.hidden,
        moe_intermediate_size=model.intermediate,
        num_experts=experts,
        num_experts_per_tok=model.slots,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


class Theirs:
    """transformers' experts on their grouped_mm, and the steps of its expert parallelism."""

    def __init__(self, model: Model, whole: Any, world: World):
        here = model.experts // world.ranks
        self.module = theirs(model, here, "grouped_mm")
        self.module._is_expert_parallel = world.ranks > 1
        self.first, self.here, self.world = world.rank * here, here, world
        for name in ("gate_up", "down"):
            weight = whole.weight_of(name)
            shares = [
                weight.of(t[e : e + 1] for t in weight)
                for e in range(self.first, self.first + here)
            ]
            made = torch.empty((here, *weight.shape[1:]), dtype=torch.bfloat16, device=world.device)
            for e, share in enumerate(shares):
                made[e] = dequantize(share, torch.bfloat16)[0]
            setattr(self.module, f"{name}_proj", nn.Parameter(made, requires_grad=False))

    def __call__(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        """As AllReduceEP of 5.21; before, the hook of the router masks."""
        away = ids // self.here != self.world.rank
        y = self.module(x, torch.where(away, self.here, ids - self.first), w.masked_fill(away, 0))
        return all_reduce(y, self.world.group, self.world.ranks)
