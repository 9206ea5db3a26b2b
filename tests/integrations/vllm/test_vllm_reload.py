"""vLLM reloads weights: into the memory of the old ones, with the results of a new engine. By what
vLLM has for it, of layers and in an engine.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from method_layers import load_nvfp4
from safetensors.torch import load_file, save_file
from served import ENVIRONMENT
from test_vllm_config import NVFP4_CONFIG, layer, no_group, pretended_gpu
from test_vllm_loading import ALONE, NAME, RANKS, experts_of
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssRoutedExperts

from fusion_moe.encodings import MXFP4, NVFP4, quantize
from fusion_moe.errors import DtypeError, NonFiniteError, UnsupportedError
from fusion_moe.integrations.vllm.config import FusionMoeConfig

pytestmark = pytest.mark.usefixtures(no_group.__name__, pretended_gpu.__name__)
E, H, I = 4, 64, 32
# a layer, and what loads it from a seed
Made = tuple[Any, Callable[[Any, int], None]]


def qwen(ranks: Any, scales: str = "max") -> Made:
    """Experts in NVFP4, loaded one by one. A negative seed: with a scale that is NaN."""
    quantization = FusionMoeConfig.from_config(NVFP4_CONFIG | {"scales": scales})
    placed = ExpertMapManager(64, 2, E, 0, None, ranks, "linear", False)
    moe = layer(
        num_local_experts=placed.local_num_experts,
        moe_parallel_config=ranks,
        in_dtype=torch.float32,
    )
    owner = RoutedExperts(NAME, torch.float32, moe, quantization, placed)

    def load(owner: Any, seed: int, in_floats: bool = False) -> None:
        g = torch.Generator().manual_seed(abs(seed))
        shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
        for e in range(E):
            for name, shape in shapes.items():
                floats = torch.randn(shape, generator=g)
                if in_floats:
                    mapper = quantization.get_checkpoint_weight_mapper()
                    parts = mapper.apply([(f"{NAME}.{e}.{name}.weight", floats)])
                    list(owner.load_weights((n.removeprefix(f"{NAME}."), t) for n, t in parts))
                    continue
                weight = quantize(floats, NVFP4, scales=scales)
                if seed < 0 and name == "down_proj":
                    weight.block_scale[0, 0] = float("nan")
                load_nvfp4(owner, e, name, weight)

    return owner, load


def gpt_oss(directory: str) -> Callable[[Any], Made]:
    """gpt-oss in NVFP4, as ModelOpt writes it, and llm-compressor."""

    def made(ranks: Any) -> Made:
        owner, quantization = experts_of(directory, ranks)
        tensors = load_file(MADE / directory / "model.safetensors")

        def load(owner: Any, seed: int) -> None:
            mapper = GptOssForCausalLM.hf_to_vllm_mapper
            mapper |= quantization.get_checkpoint_weight_mapper()
            list(mapper.apply(_with_experts_in_turn(tensors, seed % E).items()))

        return owner, load

    return made


def _with_experts_in_turn(tensors: dict[str, torch.Tensor], turn: int) -> dict[str, torch.Tensor]:
    """Other weights: each expert has those of another one."""
    found = {}
    for name, t in tensors.items():
        before, _, after = name.partition("experts.")
        expert, dot, rest = after.partition(".")
        if expert.isdecimal():
            name = f"{before}experts.{(int(expert) + turn) % E}{dot}{rest}"
        elif after and t.dim():
            t = t.roll(turn, 0)
        found[name] = t
    return found


def gpt_oss_with_padding(ranks: Any) -> Made:
    """gpt-oss in its own MXFP4: a rank with half a block of features."""
    ranks = dataclasses.replace(ALONE, tp_size=2, tp_rank=1)
    quantization = FusionMoeConfig.from_config({"quant_method": "gpt_oss_mxfp4"})
    placed = ExpertMapManager(64, 2, E, 0, None, ranks, "linear", False)
    moe = layer(
        intermediate_size=96,
        moe_parallel_config=ranks,
        activation=MoEActivation.SWIGLUOAI,
        has_bias=True,
        in_dtype=torch.float32,
    )
    owner = GptOssRoutedExperts(NAME, torch.float32, moe, quantization, placed)

    def load(owner: Any, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for name, n, k in ("w13", 2 * I, H), ("w2", H, I):
            codes, scale = quantize(torch.randn(E, n, k, generator=g), MXFP4)
            bias = torch.randn(E, n, generator=g)
            for part, t in ("weight", codes), ("weight_scale", scale), ("bias", bias):
                param, t = (
                    getattr(owner, f"{name}_{part}"),
                    t.view(torch.uint8) if part != "bias" else t,
                )
                named = {"weight_name": f"{name}_{part}", "shard_id": None, "expert_id": None}
                param.weight_loader(param, t, **named)

    return owner, load


CASES = {
    **{f"NVFP4, {name}": (qwen, ranks[-1]) for name, ranks in RANKS.items()},
    **{
        f"{directory}, {name}": (gpt_oss(directory), ranks[-1])
        for directory in ("modelopt-gpt_oss", "ct-gpt_oss")
        for name, ranks in RANKS.items()
    },
    "NVFP4, alone, by another rule for scales": (partial(qwen, scales="mse"), ALONE),
    "MXFP4 with padding": (gpt_oss_with_padding, ALONE),
}


def filled(*args: Any, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
    """Memory that is not zero."""
    return torch.empty(*args, dtype=dtype, **kwargs).fill_(1 if dtype.is_floating_point else 120)


def reload(owner: Any, load: Callable[[Any, int], None], seed: int) -> None:
    initialize_layerwise_reload(owner)
    load(owner, seed)
    padded = type(owner.quant_method).__name__ == "FusionMoeGptOssMethod"
    assert padded or not hasattr(owner, "w13_weight")  # it is not kept until all layers are loaded
    finalize_layerwise_reload(owner, None)


@pytest.mark.parametrize("case", CASES)
def test_layers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, ranks = CASES[case]
    (owner, load), (fresh, load_fresh) = make(ranks), make(ranks)
    record_metadata_for_reloading(owner)
    load(owner, 1)
    owner.quant_method.process_weights_after_loading(owner)
    load_fresh(fresh, 2)
    fresh.quant_method.process_weights_after_loading(fresh)
    before = {name: p.data_ptr() for name, p in owner.named_parameters()}
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(5, H, generator=g), torch.rand(5, 2, generator=g)
    ids = torch.tensor([[0, 3], [2, 1], [3, 2], [1, 0], [0, 2]], dtype=torch.int32)
    want = fresh.quant_method.apply(fresh, x, w, ids)
    assert not torch.equal(owner.quant_method.apply(owner, x, w, ids), want)
    monkeypatch.setattr(
        "vllm.model_executor.model_loader.reload.meta.torch.empty_strided",
        lambda size, stride, dtype, requires_grad: filled(size, dtype=dtype),
    )
    ways = (load, partial(load, in_floats=True)) if case.startswith("NVFP4") else (load, load)
    for loads in ways:
        reload(owner, load, 1)
        assert not torch.equal(owner.quant_method.apply(owner, x, w, ids), want)
        for parameter in owner.parameters():  # as vLLM's sleep mode leaves them at level 2
            parameter.data.view(torch.uint8).fill_(255)
        reload(owner, loads, 2)
        assert torch.equal(owner.quant_method.apply(owner, x, w, ids), want)
        assert {name: p.data_ptr() for name, p in owner.named_parameters()} == before


@pytest.mark.parametrize("case", ["NVFP4, alone", "modelopt-gpt_oss, alone", "MXFP4 with padding"])
def test_what_vllm_keeps_to_reload_is_not_the_layer(case: str) -> None:
    make, ranks = CASES[case]
    owner, load = make(ranks)
    record_metadata_for_reloading(owner)
    alive = ref(owner)
    del owner, load
    gc.collect()
    assert alive() is None


def test_bad_weights_change_nothing() -> None:
    """vLLM's loading ends with the error."""
    owner, load = qwen(ALONE)
    record_metadata_for_reloading(owner)
    load(owner, 1)
    owner.quant_method.process_weights_after_loading(owner)
    kept, before = owner.fusion_moe.down_proj, owner.fusion_moe.down_proj.clone()
    initialize_layerwise_reload(owner)
    with pytest.raises(NonFiniteError, match="4 NaN .*w2.weight_scale"):
        load(owner, -1)
    assert torch.equal(kept, before)


def test_experts_that_move_are_not_reloaded() -> None:
    """vLLM would load them to where they were."""
    owner, load = qwen(dataclasses.replace(ALONE, use_ep=True, enable_eplb=True))
    record_metadata_for_reloading(owner)
    load(owner, 1)
    owner.quant_method.process_weights_after_loading(owner)
    initialize_layerwise_reload(owner)
    with pytest.raises(UnsupportedError, match="--enable-eplb, .*; start another engine"):
        load(owner, 2)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
    ids=lambda config: config["quant_method"],
)
def test_numbers_are_not_rounded_to_fp8(config: dict[str, Any]) -> None:
    placed = ExpertMapManager(64, 2, E, 0, None, ALONE, "linear", False)
    quantization = FusionMoeConfig.from_config(config)
    owner = RoutedExperts(NAME, torch.float32, layer(), quantization, placed)
    for dtype in torch.float8_e4m3fn, torch.bfloat16:
        matrix = torch.zeros(I, H).to(dtype)
        loaded = owner.load_weights([("0.gate_proj.weight", matrix)])
        if dtype == torch.bfloat16:
            with pytest.raises(DtypeError, match="weight in torch.bfloat16; expected .*, and scal"):
                list(loaded)
        else:
            assert list(loaded) == ["w13_weight"]


@pytest.mark.slow
def test_an_engine(tmp_path: Path) -> None:
    """With adapters too, whose layers are around those that reload."""
    names = ["qkv_proj", "o_proj", "experts"]
    adapters = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": names}
    an_engine_reloads(tmp_path, {"dtype": "float32", "enforce_eager": True, **adapters})


def an_engine_reloads(folder: Path, options: dict[str, Any]) -> None:
    """Experts, attention and embeddings; from a directory, and from tensors as of a trainer."""
    first, second = MADE / "modelopt-qwen3_moe", folder / "second"
    shutil.copytree(first, second)
    tensors = load_file(second / "model.safetensors")
    for i, name in enumerate(tensors):
        if name.endswith("weight_scale_2"):
            # q, k and v have one scale, as before
            tensors[name] = tensors[name] * (1.5 if "self_attn" in name else 1 + i % 5 / 4)
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    prompts = [[3, 9, 27, 20, 5, 11, 30], [8, 4]]
    script = Path(__file__).with_name("reloading.py")
    command = [sys.executable, script, first, second, json.dumps(prompts), json.dumps(options)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["of the first"] != found["of the second"]
    assert found["reloaded the second"] == found["of the second"]
    assert found["reloaded the first"] == found["of the first"]
    assert found["addresses stay"]
