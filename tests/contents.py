"""Calls of every public operation with arguments whose elements are expert_map in memory or numbers
of rows, and the bad elements of each. For CPUs and GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.layouts import SF128X4

G, M, N, K, T = 3, 6, 64, 64, 4
FAR = 2**31 - 1, -(2**31)
INDEX, IDS = [(0, n) for n in (-1, M, *FAR)], [(0, n) for n in (-2, G, *FAR)]
ENDS = [(0, -1), (0, 5), (1, M + 1), (2, 1), (2, M + 1), (2, FAR[0]), (0, FAR[1])]
OFFSETS = [(i, n) for i in range(G) for n in (-1, M + 1, *FAR)]
ANY: list[tuple[int, int]] = []  # compared with others: one that is none of these selects nothing
INDICES = {
    "nvfp4_grouped_mm": {"offs": ENDS},
    "grouped_mm": {"offs": ENDS},
    "grouped_swizzle_block_scale": {"offs": ENDS},
    "route": {"ids": IDS},
    "combine": {"slot_of": INDEX},
    "group_add": {"offs": ENDS},
    "expert_mlp": {"ids": IDS},
    "fused_experts": {
        "ids": IDS,
        "expert_map": IDS,
        "peers": [(0, n) for n in (1, *FAR)],
        **dict.fromkeys(("lora_of", "gate_up_lora_of", "down_lora_of"), ANY),
    },
    "f16a_nvfp4weight_scaled_grouped_mm": {
        "offsets": OFFSETS,
        "blockscale_offsets": OFFSETS,
        "problem_sizes": [(i, n) for i in range(3 * G) for n in (-1, M + 1, *FAR)],
    },
}
# whose elements are only computed with
NUMBERS = {
    *("x", "a", "w", "y", "activation", "logits", "probs", "bias", "scale", "decode_scale"),
    *("b_codes", "b_block_scale", "b_decode_scale", "weight", "block_scale", "global_scale"),
    *("lora_a", "lora_b", "tokens_per_expert", "total_num_tokens", "activation_parameters"),
    *(f"{p}_{of}" for p in ("gate_up", "down") for of in ("codes", "block_scale", "decode_scale")),
    *(f"{p}_{of}" for p in ("gate_up", "down") for of in ("bias", "lora_a", "lora_b")),
    *("gate_up", "down", "fp4_weight", "weight_scaling_factor"),
}


def calls() -> dict[str, dict[str, Any]]:
    """Good arguments of each of these operations."""
    torch.manual_seed(0)
    ends, ids = torch.tensor([2, 3, M], dtype=torch.int32), torch.randint(G, (T, 2))
    up, down = (list(quantize(torch.randn(G, 64, n), NVFP4)) for n in (64, 32))
    x, w, rows = torch.randn(T, K).bfloat16(), torch.rand(T, 2), torch.randn(M, K).bfloat16()
    of_experts = {"x": x, "ids": ids, "w": w}
    parts = {
        f"{name}_{part}": t
        for name, weight in (("gate_up", up), ("down", down))
        for part, t in zip(("codes", "block_scale", "decode_scale"), weight, strict=True)
    }
    lora = {
        "gate_up_lora_a": torch.randn(G, 4, K).bfloat16(),
        "gate_up_lora_b": torch.randn(G, 64, 4).bfloat16(),
        "lora_of": torch.arange(T) % 2,
        "gate_up_lora_of": torch.arange(4) // 2,
    }
    starts = torch.tensor([0, 2, 3], dtype=torch.int32)
    swizzled = SF128X4.pack(*up, encoding=NVFP4)[1]
    return {
        "nvfp4_grouped_mm": dict(
            zip(("a", "b_codes", "b_block_scale", "b_decode_scale"), (rows, *up), strict=True),
            offs=ends,
        ),
        "grouped_mm": {"a": rows, "weight": up, "offs": ends, "weight_format": "nvfp4"},
        "grouped_swizzle_block_scale": {
            "block_scale": torch.rand(M, 4).to(torch.float8_e4m3fn),
            "offs": ends,
        },
        "route": {"ids": ids, "groups": G},
        "combine": {"y": rows, "slot_of": torch.randint(M, (T, 2)), "w": w},
        "group_add": {"y": rows, "bias": torch.randn(G, K).bfloat16(), "offs": ends},
        "expert_mlp": {**of_experts, **parts},
        "fused_experts": {
            **of_experts,
            **lora,
            "gate_up": up,
            "down": down,
            "weight_format": "nvfp4",
        },
        "fused_experts, expert_map": {
            **of_experts,
            "gate_up": up,
            "down": down,
            "weight_format": "nvfp4",
            "expert_map": torch.tensor([2, 0, 1], dtype=torch.int32),
        },
        "fused_experts, peers": {
            **of_experts,
            "gate_up": up,
            "down": down,
            "weight_format": "nvfp4",
            "peers": torch.zeros(5, dtype=torch.int64),
            "across": "one",
            "of_experts": G,
            "first_expert": 0,
        },
        "f16a_nvfp4weight_scaled_grouped_mm": {
            "activation": rows,
            "fp4_weight": up[0].mT,
            "weight_scaling_factor": swizzled,
            "global_scale": up[2],
            "offsets": starts,
            "blockscale_offsets": torch.tensor([0, 128, 256], dtype=torch.int32),
            "problem_sizes": torch.tensor([[n, N, K] for n in (2, 1, 3)], dtype=torch.int32),
        },
    }


def bad_calls() -> Iterator[tuple[str, dict[str, Any], str, list[dict[str, Any]]]]:
    """An operation, good arguments, the name of one, and the same with each bad element of it."""
    for name, good in calls().items():
        op = name.partition(",")[0]
        for argument, values in INDICES[op].items():
            if argument in good and (name == op or argument in name):
                yield op, good, argument, [changed(good, argument, *v) for v in values]


def changed(good: dict[str, Any], argument: str, at: int, value: int) -> dict[str, Any]:
    """The same arguments with another element."""
    other: Tensor = good[argument].clone()
    other.view(-1)[at] = value
    return {**good, argument: other}
