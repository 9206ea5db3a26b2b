"""What h200_moe.py measures: models, cells, their weights, routings and inputs, and tolerances.

A cell is one part of one model's expert MLP at a number of tokens under a kind of routing. Its
floor is the time to read the NVFP4 weights of the experts that get a token, or to multiply,
whichever is longer; both rates were measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from fusion_moe.encodings import NVFP4, Quantized, dequantize

READ, MULTIPLY = 4.55e12, 780e12  # bytes, flops a second
PARTS, ROUTINGS, TOKENS = (
    ("gemm1", "gemm2", "mlp"),
    ("uniform", "zipf"),
    (1, 8, 32, 128, 512, 2048, 8192),
)
DENSE_TOKENS = (
    1,
    2,
    3,
    5,
    8,
    12,
    17,
    24,
    32,
    48,
    75,
    96,
    128,
    200,
    300,
    512,
    700,
    1100,
    2048,
    3000,
    8192,
)
ZIPF = 1.2
# relative Frobenius error that a result may have
LIMIT = {"gemm1": 3e-3, "gemm2": 3e-3, "mlp": 8e-3}
FP8_CONTENDERS = ("fp8", "both", "w8a16")
FP8_PEERS = (
    "humming w4a8 indexed",
    "humming w4a8 grouped",
    "vllm",
    "finegrained",
    "deepgemm",
    "monomoe",
)
PEERS = ("humming indexed", "humming grouped", "torch", "cutile")
# of weights, rows or both that are rounded to e4m3; of weights that are rounded to MXFP4
FP8_LIMITS = dict.fromkeys((*FP8_CONTENDERS, *FP8_PEERS), 0.08) | {
    name: 0.2 for name in FP8_PEERS if name.startswith("humming")
}
PEERS_MARGIN = 1.5  # what peers, which round in places of their own, may have of that
_ENOUGH_BYTES, _MOST_LAYERS = 1e9, 8
_CHECKED_EXPERTS, _CHECKED_ROWS, _CHECKED_TOKENS = 4, 64, 4


@dataclass(frozen=True)
class Model:
    """Experts of a layer: how many, how many of them a token goes to, hidden and intermediate
    features.
    """

    title: str
    experts: int
    slots: int
    hidden: int
    intermediate: int

    def products(self, part: str) -> tuple[tuple[int, int], ...]:
        """(N, K) of the products of a part."""
        both = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        return both if part == "mlp" else (both[part == "gemm2"],)

    def expert_bytes(self, part: str) -> int:
        """Of the NVFP4 weights of one expert."""
        return sum(n * k * 9 // 16 for n, k in self.products(part))

    @property
    def layers(self) -> int:
        """Layers to rotate over, for a gigabyte of weights in each part."""
        needed = math.ceil(_ENOUGH_BYTES / (self.experts * self.expert_bytes("gemm2")))
        return min(max(needed, 2), _MOST_LAYERS)


MODELS = {
    "qwen3": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "gpt-oss": Model("gpt-oss-120b", 128, 4, 2880, 2880),
    "mixtral": Model("Mixtral-8x7B", 8, 2, 4096, 14336),
    "deepseek": Model("DeepSeek-V3", 256, 8, 7168, 2048),
    "scout": Model("Llama-4-Scout", 16, 1, 5120, 8192),
}
MORE_MODELS = {
    "glm-air": Model("GLM-4.5-Air", 128, 8, 4096, 1408),
    "minimax": Model("MiniMax-M2", 256, 8, 3072, 1536),
    "qwen3-next": Model("Qwen3-Next-80B-A3B", 512, 10, 2048, 512),
}
MONOMOE = {"qwen3.6": Model("Qwen3.6-35B-A3B", 256, 8, 2048, 512)}  # the sizes that it has
SHARDS = {  # of intermediate features, as tensor parallelism makes them: no whole tiles
    "qwen3-tp8": Model("Qwen3-30B-A3B, one of 8", 128, 8, 2048, 96),
    "gpt-oss-tp4": Model("gpt-oss-120b, one of 4", 128, 4, 2880, 720),
    "i1392": Model("1,392 features", 64, 8, 2048, 1392),
    "i2064": Model("2,064 features", 16, 2, 4096, 2064),
}
EQUAL = {"equal": Model("4 experts, all tokens to each", 4, 4, 7168, 2048)}
ALL_MODELS = MODELS | MORE_MODELS | MONOMOE | SHARDS | EQUAL


@dataclass(frozen=True)
class Cell:
    """One cell; `name` is its model's key."""

    name: str
    part: str
    tokens: int
    routing: str

    @property
    def model(self) -> Model:
        """Whose experts."""
        return ALL_MODELS[self.name]

    @property
    def rows(self) -> int:
        """Rows of the products, one for each slot of a token."""
        return self.tokens * self.model.slots

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return sum(2 * self.rows * n * k for n, k in self.model.products(self.part))

    def floor(self, touched: float) -> float:
        """Seconds, if `touched` experts get a token."""
        return max(touched * self.model.expert_bytes(self.part) / READ, self.flops / MULTIPLY)


# Weights ------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """gate_up nvfp4[E, 2I, H], gate above up, and down nvfp4[E, H, I], in linear order, one decode
    scale an expert.
    """

    gate_up: Quantized
    down: Quantized

    def of(self, part: str) -> Quantized:
        """The weight of the product "gemm1" or "gemm2"."""
        return self.gate_up if part == "gemm1" else self.down


class Layers(list[Layer]):
    """Random ones on the GPU, not more than `most`."""

    def __init__(self, model: Model, most: int):
        super().__init__(
            Layer(*(_weight(model.experts, n, k) for n, k in model.products("mlp")))
            for _ in range(min(model.layers, most))
        )
        self._forms: dict[str, list[Any]] = {}

    def each(self, name: str, form: Callable[[Quantized], Any]) -> list[Any]:
        """Layers with all weights in another form, which is made once and has this name."""
        if name not in self._forms:
            self._forms[name] = [Layer(*map(form, layer)) for layer in self]
        return self._forms[name]


def _weight(experts: int, n: int, k: int) -> Quantized:
    """All codes, block scales 32 to 448, decode scales such that products of normal numbers are
    about 1 in size.
    """
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(
        0x60, 0x7F, (experts, n, k // 16), dtype=torch.uint8, device="cuda"
    ).view(torch.float8_e4m3fn)
    decode = (torch.rand(experts, device="cuda") + 0.5) / (600 * math.sqrt(k))
    return Quantized(codes, scales, decode, encoding=NVFP4)


def expert(weight: Quantized, e: int) -> Tensor:
    """-> f32 [N, K]"""
    return dequantize(Quantized(*(t[e : e + 1] for t in weight), encoding=NVFP4))[0]


# Routings and inputs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """Tokens and where they go. x bf16 [T, H], ids i32 [T, k], w bf16 [T, k]; a row of the products
    is a slot, sorted by expert.
    """

    model: Model
    x: Tensor
    ids: Tensor
    w: Tensor

    @cached_property
    def order(self) -> Tensor:
        """i64 [T k]: the slot of each sorted row."""
        return self.ids.flatten().argsort(stable=True)

    @cached_property
    def slot_of(self) -> Tensor:
        """i32 [T, k]: the sorted row of each slot."""
        return self.order.argsort().int().view(self.ids.shape)

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        return self.ids.flatten().bincount(minlength=self.model.experts).tolist()

    @cached_property
    def ends(self) -> Tensor:
        """i32 [E]: where each expert's rows end."""
        return torch.tensor(self.counts, device="cuda").cumsum(0).int()

    @property
    def touched(self) -> int:
        """Experts that have a row."""
        return sum(count > 0 for count in self.counts)

    @cached_property
    def sorted_x(self) -> Tensor:
        """bf16 [T k, H]: the input of gate and up, sorted."""
        return self.x[self.order // self.ids.shape[1]]

    @cached_property
    def sorted_h(self) -> Tensor:
        """bf16 [T k, I]: some input of down, sorted."""
        return torch.randn(self.ids.numel(), self.model.intermediate, device="cuda").bfloat16()

    def rows(self, part: str) -> Tensor:
        """The input of "gemm1" or "gemm2", sorted."""
        return self.sorted_x if part == "gemm1" else self.sorted_h


def routed(cell: Cell) -> list[Routed]:
    """Different ones, for the calls to rotate over."""
    return [routed_once(cell, seed) for seed in range(16 if cell.tokens <= 512 else 4)]


def routed_once(cell: Cell, seed: int) -> Routed:
    """k different experts for each token, all as likely; or expert i in proportion to 1 / i^ZIPF,
    the same i at all tokens.
    """
    model, g = cell.model, torch.Generator("cuda").manual_seed(seed)
    # exponential
    score = (
        -torch.rand(cell.tokens, model.experts, device="cuda", generator=g).clamp_min(1e-20).log_()
    )
    if cell.routing == "zipf":
        rank = (
            torch.randperm(
                model.experts, device="cuda", generator=torch.Generator("cuda").manual_seed(7)
            )
            + 1.0
        )
        score *= rank**ZIPF
    ids = score.topk(model.slots, largest=False).indices.int()
    w = torch.rand(ids.shape, device="cuda", generator=g).add_(0.1)
    x = torch.randn(cell.tokens, model.hidden, device="cuda", generator=g).bfloat16()
    return Routed(model, x, ids, (w / w.sum(1, keepdim=True)).bfloat16())


# What is right ------------------------------------------------------------------------------------


def error(cell: Cell, layer: Layer, to: Routed, found: Tensor) -> float:
    """Relative Frobenius error, against float32, of a few tokens of the MLP, or rows of a few
    experts. found: rows sorted by expert.
    """
    at, want = _mlp(layer, to) if cell.part == "mlp" else _product(cell.part, layer, to)
    return float((found[at].float() - want).norm() / want.norm())


def is_right(name: str, part: str, found: Mapping[str, Any]) -> bool:
    """Whether a contender's result was: an error beyond the limit, or NaN, is none."""
    limit = FP8_LIMITS.get(name, LIMIT[part] * (PEERS_MARGIN if name in (*PEERS, "marlin") else 1))
    return "error" not in found or (found["error"] or math.inf) <= limit


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most so many of them, first and last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _product(part: str, layer: Layer, to: Routed) -> tuple[Tensor, Tensor]:
    at, want = [], []
    for e in _spread([e for e, count in enumerate(to.counts) if count], _CHECKED_EXPERTS):
        start = sum(to.counts[:e])
        rows = torch.tensor(
            _spread(range(start, start + to.counts[e]), _CHECKED_ROWS), device="cuda"
        )
        at.append(rows)
        want.append(to.rows(part)[rows].float() @ expert(layer.of(part), e).T)
    return torch.cat(at), torch.cat(want)


def _mlp(layer: Layer, to: Routed) -> tuple[Tensor, Tensor]:
    at = _spread(range(len(to.x)), _CHECKED_TOKENS)
    want = torch.zeros(len(at), to.model.hidden, device="cuda")
    for i, token in enumerate(at):
        for e, w in zip(to.ids[token].tolist(), to.w[token].float(), strict=True):
            gate, up = (to.x[token].float() @ expert(layer.gate_up, e).T).chunk(2)
            want[i] += w * ((silu(gate) * up) @ expert(layer.down, e).T)
    return torch.tensor(at, device="cuda"), want
