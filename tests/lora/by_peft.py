"""What PEFT makes of a tiny Qwen3-MoE: the directory `made`, and what it adds to the weights.

    python -m pip install --no-deps --target somewhere peft accelerate
    PYTHONPATH=somewhere:. python tests/lora/by_peft.py      # writes tests/lora/made

Factors are small whole numbers, so that what is added is exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_qwen3 import qwen3_moe

MADE = Path(__file__).parent / "made"
DELTAS = "deltas.safetensors"
TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
KEPT = (
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "bias",
    "target_modules",
    "target_parameters",
    "use_rslora",
    "rank_pattern",
)


def adapted(
    model: Any, rank: int = 2, alpha: float = 4, targets: tuple[str, ...] = TARGETS, **how: Any
) -> Any:
    """The model as PEFT wraps it, with random whole numbers as factors."""
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=[], target_parameters=list(targets), **how
    )
    wrapped = peft.get_peft_model(model, config)
    g = torch.Generator().manual_seed(1)
    for p in wrapped.parameters():
        if p.requires_grad:
            p.data = torch.randint(-1, 2, p.shape, generator=g).float()
    return wrapped.eval()


def deltas(wrapped: Any) -> dict[str, Tensor]:
    """What PEFT adds to each parameter, by its name; of one layer."""
    found = {}
    for module in wrapped.modules():
        if type(module).__name__ == "ParamWrapper":
            found[module.parameter_name] = (
                module.get_delta_weight("default").to(torch.int8).contiguous()
            )
    return found


def make(folder: Path) -> None:
    """Writes the directory: what PEFT saves, without defaults, and what it adds to the weights."""
    wrapped = adapted(qwen3_moe().bfloat16())
    wrapped.save_pretrained(folder)
    save_file(
        load_file(folder / "adapter_model.safetensors"),
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({key: config[key] for key in KEPT}, indent=2) + "\n"
    )
    save_file(deltas(wrapped), folder / DELTAS)
    (folder / "README.md").unlink()


if __name__ == "__main__":
    make(MADE)
