"""Scales that no quantizer writes, and divisors where multipliers belong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_calls import message
from files import MADE, Tensors, at, change, copied

from fusion_moe.checkpoints import Directory, check_scales, weights_in

GATE = "model.layers.0.mlp.experts.0.gate_proj"


def check(path: Path) -> None:
    directory = Directory.open(path)
    check_scales(directory, weights_in(directory))


@pytest.mark.parametrize("name", sorted(path.name for path in MADE.iterdir()))
def test_what_packages_write_is_right(name: str) -> None:
    check(MADE / name)


def _byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change_one(t: torch.Tensor) -> torch.Tensor:
        t.view(torch.uint8)[3, 1] = value
        return t

    return change_one


BROKEN: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "NaN block scale": ("modelopt-qwen3_moe", at(f"{GATE}.weight_scale", _byte(0x7F))),
    "negative block scale": ("modelopt-qwen3_moe", at(f"{GATE}.weight_scale", _byte(0xB8))),
    "NaN decode scale": (
        "modelopt-qwen3_moe",
        at(f"{GATE}.weight_scale_2", lambda t: t * float("nan")),
    ),
    "negative decode scale": ("modelopt-qwen3_moe", at(f"{GATE}.weight_scale_2", lambda t: -t)),
    "divisor for a multiplier": (
        "modelopt-qwen3_moe",
        at(f"{GATE}.weight_scale_2", lambda t: 1 / t),
    ),
    "multiplier for a divisor": (
        "ct-qwen3_moe",
        at(f"{GATE}.weight_global_scale", lambda t: 1 / t),
    ),
    "NaN scale of integers": (
        "ct-qwen3_moe-int4",
        at(f"{GATE}.weight_scale", lambda t: t * float("nan")),
    ),
    "negative FP8 scale": (
        "modelopt-qwen3_5_moe-mixed",
        at("model.language_model.layers.0.linear_attn.out_proj.weight_scale", lambda t: -t),
    ),
    "another shape": ("ct-qwen3_moe-int4", at(f"{GATE}.weight_shape", lambda t: t - 1)),
    "zero as a divisor": ("ct-qwen3_moe", at(f"{GATE}.weight_global_scale", lambda t: 0 * t)),
}


@pytest.mark.parametrize(("name", "how"), BROKEN.values(), ids=BROKEN)
def test_bad_scales(
    name: str, how: Callable[[Tensors], object], tmp_path: Path, golden: Callable[..., None]
) -> None:
    path = change(copied(name, tmp_path), how)
    golden(message(lambda: check(path)))
