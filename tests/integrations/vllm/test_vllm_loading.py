"""Experts in NVFP4 that vLLM's own layers load from files, on one rank and on two: of gpt-oss and
Llama-4, of which its loader reads only what is left, and of Nemotron-H, which have no gate.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from method_layers import assert_near, expected
from safetensors.torch import load_file
from test_vllm_config import layer, no_group, parallel, pretended_gpu
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssRoutedExperts
from vllm.model_executor.models.utils import AutoWeightsLoader

from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.errors import CheckpointError
from fusion_moe.integrations.vllm.config import FusionMoeConfig

pytestmark = pytest.mark.usefixtures(no_group.__name__, pretended_gpu.__name__)
NAME = "model.layers.0.mlp.experts"
ALONE = FusedMoEParallelConfig.make_no_parallel()
RANKS = {
    "alone": [ALONE],
    "features": [dataclasses.replace(ALONE, tp_size=2, tp_rank=rank) for rank in range(2)],
    "experts": [parallel(ep_size=2, ep_rank=rank) for rank in range(2)],
}


def experts_of(
    directory: str,
    ranks: FusedMoEParallelConfig,
    cls: type[RoutedExperts] = GptOssRoutedExperts,
    names: dict[str, Any] | None = None,
    on_input: bool = False,
    **changes: Any,
) -> tuple[Any, Any]:
    """vLLM's layer of a rank, and its configuration of the quantization."""
    config = json.loads((MADE / directory / "config.json").read_text())["quantization_config"]
    quantization = FusionMoeConfig.from_config(config)
    placed = ExpertMapManager(64, 2, 4, 0, None, ranks, "linear", False)
    made = {"activation": MoEActivation.SWIGLUOAI, "has_bias": True, "intermediate_size": 64}
    moe = layer(
        num_local_experts=placed.local_num_experts,
        moe_parallel_config=ranks,
        in_dtype=torch.float32,
        **made | changes,
    )
    given = (names or {}) | {"apply_router_weight_on_input": on_input}
    return cls(NAME, torch.float32, moe, quantization, placed, **given), quantization


def load(owner: Any, quantization: Any, tensors: dict[str, torch.Tensor]) -> list[str]:
    """As vLLM's loader: the names that it reads itself."""
    mapper = GptOssForCausalLM.hf_to_vllm_mapper | quantization.get_cache_scale_mapper()
    mapper |= quantization.get_checkpoint_weight_mapper()
    mapper |= AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
    left = [name for name, _ in mapper.apply(tensors.items())]
    owner.quant_method.process_weights_after_loading(owner)
    return left


def fused(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The meaning of ModelOpt's tensors: of gpt-oss, rows of gate and up take turns."""

    def weight(name: str) -> Quantized:
        codes, scale = (t[f"{NAME}.{name}{suffix}"].mT for suffix in ("", "_weight_scale"))
        matrix = t[f"{NAME}.{name}_weight_scale_2"].expand(4)
        return Quantized(codes.contiguous(), scale.contiguous(), matrix, encoding=NVFP4)

    weights = {"w13": weight("gate_up_proj"), "w2": weight("down_proj")}
    if f"{NAME}.down_proj_bias" not in t:
        return weights
    return weights | {
        "w13_bias": t[f"{NAME}.gate_up_proj_bias"],
        "w2_bias": t[f"{NAME}.down_proj_bias"],
        "interleave": 1,
    }


def apart(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of llm-compressor's, one by one."""

    def stacked(name: str, suffix: str) -> torch.Tensor:
        return torch.stack([t[f"{NAME}.{expert}.{name}.{suffix}"] for expert in range(4)])

    def weight(*names: str) -> Quantized:
        codes, scale, divisor = (
            torch.cat([stacked(name, suffix) for name in names], 1)
            for suffix in ("weight_packed", "weight_scale", "weight_global_scale")
        )
        matrices = 1 / (divisor if len(names) > 1 else divisor[:, 0])
        return Quantized(codes, scale, matrices, encoding=NVFP4)

    both = [stacked(name, "bias") for name in ("gate_proj", "up_proj")]
    return {
        "w13": weight("gate_proj", "up_proj"),
        "w2": weight("down_proj"),
        "w13_bias": torch.cat(both, 1),
        "w2_bias": stacked("down_proj", "bias"),
    }


def sum_of(
    ranks: str,
    tensors: dict[str, torch.Tensor],
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    directory: str,
    **layer: Any,
) -> torch.Tensor:
    """What the experts of some ranks, which load these tensors, make of x, w and ids."""
    (x, w, ids), total = given, torch.zeros(3, 64)
    for rank in RANKS[ranks]:
        owner, quantization = experts_of(directory, rank, **layer)
        left = load(owner, quantization, tensors)
        assert len(left) == sum(".experts." not in name for name in tensors)
        total += owner.quant_method.apply(owner, x, w, ids.int())
    return total


@pytest.mark.parametrize(
    ("directory", "meaning"), [("modelopt-gpt_oss", fused), ("ct-gpt_oss", apart)]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_gpt_oss(directory: str, meaning: Any, ranks: str) -> None:
    tensors = load_file(MADE / directory / "model.safetensors")
    g = torch.Generator().manual_seed(1)
    for name, t in tensors.items():
        if name.endswith("bias"):  # zeros in the files
            t.copy_(torch.randn(t.shape, generator=g))
    x, w = torch.randn(3, 64, generator=g), torch.rand(3, 2, generator=g)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]])
    want = expected(x, ids, w, **meaning(tensors), limit=7.0, alpha=1.702, up_offset=1.0)
    assert_near(sum_of(ranks, tensors, (x, w, ids), directory), want)


def as_compressed_tensors(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """ModelOpt's tensors by the names of compressed-tensors."""
    kept = {name: v for name, v in t.items() if not name.endswith(".input_scale")}
    return {
        name.replace(".weight_scale_2", ".weight_global_scale")
        + "_packed" * name.endswith(".weight"): 1 / v if name.endswith("_scale_2") else v
        for name, v in kept.items()
    }


@pytest.mark.parametrize("ranks", RANKS)
def test_llama4(ranks: str) -> None:
    """The router's weights scale what goes into experts."""
    tensors = load_file(MADE / "modelopt-llama4_text" / "model.safetensors")
    tensors = {name.replace("feed_forward", "mlp"): t for name, t in tensors.items()}
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(3, 64, generator=g), torch.rand(3, 1, generator=g)
    ids = torch.tensor([[3], [1], [2]])
    total = sum_of(
        ranks,
        tensors,
        (x, w, ids),
        "modelopt-llama4_text",
        cls=RoutedExperts,
        on_input=True,
        activation=MoEActivation.SILU,
        has_bias=False,
        intermediate_size=32,
        experts_per_token=1,
    )
    assert_near(total, expected(x * w, ids, torch.ones_like(w), **fused(tensors)))


@pytest.mark.parametrize("directory", ["modelopt-nemotron_h", "ct-gpt_oss"])
@pytest.mark.parametrize("ranks", RANKS)
def test_nemotron_h(directory: str, ranks: str) -> None:
    """directory: has the configuration of the quantization."""
    tensors = load_file(MADE / "modelopt-nemotron_h" / "model.safetensors")
    start = "backbone.layers.0.mixer.experts."
    tensors = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(3, 64, generator=g), torch.rand(3, 2, generator=g)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2]])
    total = torch.zeros(3, 64)
    for rank in RANKS[ranks]:
        owner, _ = experts_of(
            directory,
            rank,
            RoutedExperts,
            {"ckpt_gate_proj_name": "up_proj", "ckpt_up_proj_name": None},
            activation=MoEActivation.RELU2_NO_MUL,
            has_bias=False,
            intermediate_size=32,
        )
        stored = tensors if "modelopt" in directory else as_compressed_tensors(tensors)
        assert len(set(owner.load_weights(stored.items()))) == (8 if stored is tensors else 6)
        owner.quant_method.process_weights_after_loading(owner)
        total += owner.quant_method.apply(owner, x, w, ids.int())

    def weight(name: str) -> Quantized:
        parts = [
            torch.stack([tensors[f"{expert}.{name}.{suffix}"] for expert in range(4)])
            for suffix in ("weight", "weight_scale", "weight_scale_2")
        ]
        return Quantized(*parts, encoding=NVFP4)

    want = expected(
        x, ids, w, weight("up_proj"), weight("down_proj"), function=lambda up: up.relu().square()
    )
    assert_near(total, want)


def test_other_tensors_of_modelopt_are_refused() -> None:
    owner, quantization = experts_of("modelopt-gpt_oss", ALONE)
    tensors = {f"{NAME}.3.gate_proj.weight": torch.zeros(64, 32, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="'3.gate_proj.weight'.*; expected gate_up_proj"):
        load(owner, quantization, tensors)
