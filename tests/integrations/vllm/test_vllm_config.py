"""What the plug-in registers, what it takes and what it refuses, without a model."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from bad_calls import messages
from method_layers import assert_near, expected
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.lora import utils as lora_utils
from vllm.model_executor.layers.activation import GeluAndMul, SituAndMul, SwigluStepAndMul
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.platforms import current_platform

from fusion_moe import options
from fusion_moe.checkpoints.schemes import Direction
from fusion_moe.encodings import FP8, NVFP4, Quantized, quantize
from fusion_moe.errors import (
    CheckpointError,
    NonFiniteError,
    UnsupportedError,
)
from fusion_moe.integrations.vllm import register
from fusion_moe.integrations.vllm.compressed_tensors import (
    FusionMoeInt4Method,
    FusionMoeNvFp4Method,
    FusionMoePackedMxfp4Method,
)
from fusion_moe.integrations.vllm.config import FusionMoeConfig, _nvfp4_on_cpu
from fusion_moe.integrations.vllm.experts import activation_of, first_expert, need_served
from fusion_moe.integrations.vllm.modelopt import FusionMoeModelOptMethod
from fusion_moe.integrations.vllm.mxfp4 import (
    FusionMoeGptOssConfig,
    FusionMoeMxfp4Config,
    FusionMoeMxfp4Method,
)
from fusion_moe.integrations.vllm.states import need_kept
from fusion_moe.ir.activation import read
from fusion_moe.nn import Experts, prepare_, swiglu

on_cpus = pytest.mark.skipif(not current_platform.is_cpu(), reason="of vLLM for CPUs")
WITHOUT_GATE = [a for a in MoEActivation if not a.is_gated]
NVFP4_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def parallel(**changes: Any) -> FusedMoEParallelConfig:
    """vLLM's expert parallelism."""
    return dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), use_ep=True, **changes)


def layer(**changes: Any) -> FusedMoEConfig:
    """vLLM's configuration of a layer."""
    made = FusedMoEConfig(
        num_experts=4,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=32,
        num_local_experts=4,
        num_logical_experts=4,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes no configuration of layers without a gate on a CPU."""
    platform = SimpleNamespace(is_cuda_alike=lambda: True)
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.current_platform", platform)


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's parameters ask its group of processes for their rank."""
    for name, value in ("rank", 0), ("world_size", 1):
        asked = f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}"
        monkeypatch.setattr(asked, lambda value=value: value)


def test_registered_once_or_more_often() -> None:
    register()
    register()
    assert QUANTIZATION_METHODS.count("fusion_moe") == 1
    assert get_quantization_config("fusion_moe") is FusionMoeConfig


@pytest.mark.parametrize("plugins", [{}, {"VLLM_PLUGINS": ""}], ids=["all", "none"])
def test_vllm_finds_it_unless_its_own_variable_leaves_it_out(plugins: dict[str, str]) -> None:
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS; "
        "print('fusion_moe' in QUANTIZATION_METHODS)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **plugins},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == str(not plugins), done.stderr


def test_only_who_asks_gets_it() -> None:
    asked = FusionMoeConfig.override_quantization_method
    assert asked(NVFP4_CONFIG, "fusion_moe") == "fusion_moe"
    assert asked(NVFP4_CONFIG, None) is None
    assert asked(NVFP4_CONFIG, "modelopt_fp4") is None


@on_cpus
def test_what_vllm_has_no_experts_for_on_cpus() -> None:
    compressed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    assert all(map(_nvfp4_on_cpu, (NVFP4_CONFIG, compressed)))
    others = {"quant_method": "mxfp4"}, {"quant_method": "fp8"}
    assert not any(map(_nvfp4_on_cpu, (*others, compressed | {"format": "pack-quantized"})))


def test_another_version_of_vllm(caplog, monkeypatch) -> None:
    FusionMoeConfig.from_config(NVFP4_CONFIG)
    assert "tested with" not in caplog.text
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    FusionMoeConfig.from_config(NVFP4_CONFIG)
    assert "tested with vLLM 0.32 and 0.33, not with 0.99.1" in caplog.text


@pytest.mark.parametrize(
    "config",
    [
        NVFP4_CONFIG,
        {
            "quantization": {
                "quant_algo": "W4A16_NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": None,
                "exclude_modules": [],
            }
        },
    ],
)
def test_modelopt_is_read(config: dict[str, Any]) -> None:
    made = FusionMoeConfig.from_config(config)
    assert made.get_name() == "fusion_moe"
    assert "ModelOpt" in made.FusedMoEMethodCls.__name__  # vLLM's loader looks at it


def test_mxfp4_is_read() -> None:
    """vLLM renames gpt-oss's, whose rows take turns, and its loader of weights asks for the
    name.
    """
    gpt_oss = FusionMoeConfig.from_config({"quant_method": "gpt_oss_mxfp4"})
    assert isinstance(gpt_oss, FusionMoeGptOssConfig)
    assert gpt_oss.get_name() == "gpt_oss_mxfp4"
    assert isinstance(FusionMoeConfig.from_config({"quant_method": "mxfp4"}), FusionMoeMxfp4Config)


def routed_experts(**changes: Any) -> Any:
    """vLLM's layer, as far as a method is chosen by it."""
    made = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(made)
    made.moe_config = layer(**changes)
    for name in ("gate", "up", "down"):
        setattr(made, f"ckpt_{name}_proj_name", f"{name}_proj")
    return made


def compressed(**weights: Any) -> Any:
    """The configuration of compressed-tensors with such experts."""
    group = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "int"} | weights}
    written = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return FusionMoeConfig.from_config(written | {"config_groups": {"group_0": group}})


@on_cpus
def test_experts_that_neither_serves() -> None:
    with pytest.raises(
        UnsupportedError,
        match="layers.0.mlp.experts: experts in pack-quantized; expected NVFP4, .*, or vLLM's; "
        "quantize them so; vLLM says: No WNA16 MoE backend",
    ):
        compressed(num_bits=2, strategy="group", group_size=32).get_quant_method(
            routed_experts(), "layers.0.mlp.experts"
        )


def test_fp8_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts by this library, those that are skipped and linear layers by vLLM."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [128, 128], "ignored_layers": ["layers.1.mlp.experts"]}
    made, owner = FusionMoeConfig.from_config(config), routed_experts()
    monkeypatch.setattr(type(made).__bases__[-1], "get_quant_method", lambda *arguments: "vLLM's")
    assert made.get_name() == "fusion_moe"
    assert made.get_quant_method(owner, "layers.0.mlp.experts").scheme.encoding == FP8
    assert made.get_quant_method(owner, "layers.1.mlp.experts") == "vLLM's"
    assert made.get_quant_method(torch.nn.Linear(2, 2), "layers.0.mlp.gate") == "vLLM's"
    other = FusionMoeConfig.from_config(config | {"weight_block_size": [1, 128]})
    with pytest.raises(UnsupportedError, match=r"FP8 in blocks of \[1, 128\]; expected \[128, 128"):
        other.get_quant_method(owner, "layers.0.mlp.experts")
    gpt_oss = routed_experts(activation=MoEActivation.SWIGLUOAI)
    with pytest.raises(UnsupportedError, match="gpt-oss in quant_method fp8; expected ModelOpt's"):
        made.get_quant_method(gpt_oss, "layers.0.mlp.experts")


def test_deepseek_v4_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in 4 bits are this library's, those that are left in floats or in FP8 vLLM's."""
    config = {"quant_method": "deepseek_v4_fp8", "weight_block_size": [128, 128]}
    config |= {"activation_scheme": "dynamic", "ignored_layers": ["layers.1.ffn.experts.0.w1"]}
    made, owner = FusionMoeConfig.from_config(config), routed_experts(swiglu_limit=10.0)
    monkeypatch.setattr(type(made).__bases__[-1], "get_quant_method", lambda *arguments: "vLLM's")
    assert (made.get_name(), made.weight_block_size) == ("fusion_moe", [128, 128])
    method = made.get_quant_method(owner, "layers.0.ffn.experts")
    assert isinstance(method, FusionMoeMxfp4Method)
    assert method.activation == swiglu(limit=10.0)
    assert made.get_quant_method(owner, "layers.1.ffn.experts") == "vLLM's"
    assert made.get_quant_method(torch.nn.Linear(2, 2), "layers.0.attn.wq_b") == "vLLM's"
    made._resolved_moe_quant_algo = "NVFP4"
    assert "ModelOpt" in type(made.get_quant_method(owner, "layers.0.ffn.experts")).__name__
    made._resolved_expert_dtype = "fp8"
    assert made.get_quant_method(owner, "layers.0.ffn.experts") == "vLLM's"


HEADS = ["model.layers.2.shared_head.head", "lm_head", "model.layers.0.self_attn.q_proj"]
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | {"symmetric": True}}},
}


@pytest.mark.parametrize("config", [NVFP4_CONFIG, NVFP4_CONFIG | {"quant_algo": "FP8"}, PACKED])
@pytest.mark.parametrize("gpu", [False, True])
def test_layers_that_vllm_calls_otherwise(
    config: dict[str, Any], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output layers for multi-token prediction, and layers of a draft model, that files leave in
    floats: they are no packed ones.
    """
    monkeypatch.setattr(
        "fusion_moe.integrations.vllm.linear.current_platform",
        SimpleNamespace(is_cpu=lambda: not gpu),
    )
    made = FusionMoeConfig.from_config(config | {"ignore": HEADS})
    head, linear = ParallelLMHead.__new__(ParallelLMHead), LinearBase.__new__(LinearBase)
    for layer, name in (
        (head, "model.layers.2.head"),
        (head, "model.layers.2.shared_head.head"),
        (head, ""),
        (head, "draft_model.lm_head"),
        (linear, "draft_model.model.layers.0.self_attn.q_proj"),
    ):
        method = made.get_quant_method(layer, name)
        assert method is None or "Unquantized" in type(method).__name__, name


@pytest.mark.parametrize(
    ("uva", "prefetch", "without_uva", "found"),
    [
        ({}, {}, False, None),
        ({"cpu_offload_gb": 1}, {}, False, "--cpu-offload-gb"),
        ({"cpu_offload_gb": 1, "cpu_offload_params": {"experts"}}, {}, False, "--cpu-offload-gb"),
        ({"cpu_offload_gb": 1, "cpu_offload_params": {"w2_weight"}}, {}, False, "--cpu-offload-gb"),
        ({"cpu_offload_gb": 1, "cpu_offload_params": {"self_attn"}}, {}, False, None),
        ({"cpu_offload_gb": 1, "cpu_offload_params": {"self_attn"}}, {}, True, "--cpu-offload-gb"),
        ({}, {"offload_group_size": 2}, False, "--offload-group-size"),
        ({}, {"offload_group_size": 2, "offload_params": {"qkv_proj"}}, False, None),
    ],
)
def test_experts_that_vllm_would_move(
    uva: dict[str, Any],
    prefetch: dict[str, Any],
    without_uva: bool,
    found: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a GPU to the host; on CPUs it moves nothing."""
    if without_uva:
        monkeypatch.setenv("VLLM_WEIGHT_OFFLOADING_DISABLE_UVA", "1")
    config, owner = VllmConfig(), SimpleNamespace(layer_name="model.layers.0.mlp.experts")
    config.offload_config = OffloadConfig(
        uva=UVAOffloadConfig(**uva), prefetch=PrefetchOffloadConfig(**prefetch)
    )
    with set_current_vllm_config(config):
        need_kept(owner, ["w13_weight", "w2_weight"])
        monkeypatch.setattr(
            "fusion_moe.integrations.vllm.states.current_platform",
            SimpleNamespace(is_cpu=lambda: False),
        )
        if found is None:
            need_kept(owner, ["w13_weight", "w2_weight"])
        else:
            with pytest.raises(UnsupportedError, match=f"{found}, which moves experts .*self_attn"):
                need_kept(owner, ["w13_weight", "w2_weight"])


def test_elements_of_weights_are_not_written() -> None:
    config, owner = VllmConfig(), SimpleNamespace(layer_name="layer")
    for backend, outcome in (
        ("nccl", nullcontext()),
        ("sparse_nccl", pytest.raises(UnsupportedError)),
    ):
        config.weight_transfer_config = WeightTransferConfig(backend=backend)
        with set_current_vllm_config(config), outcome:
            need_kept(owner, [])


@pytest.mark.parametrize("load_format", ["sharded_state", "runai_streamer_sharded"])
def test_states_are_neither_saved_nor_loaded(
    load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of models without this library's modules are."""
    saved = []
    monkeypatch.setattr(ShardedStateLoader, "save_model", lambda *given, **named: saved.append(1))
    config = VllmConfig(load_config=LoadConfig(load_format=load_format))
    with set_current_vllm_config(config), pytest.raises(UnsupportedError, match=load_format):
        need_kept(SimpleNamespace(layer_name="layer"), [])
    plain, served = torch.nn.Module(), torch.nn.Module()
    ShardedStateLoader.save_model(plain, "path", max_size=1)
    assert saved == [1]
    served.layer = torch.nn.Module()
    served.layer.fusion_moe = torch.nn.Module()
    with pytest.raises(UnsupportedError, match="a sharded state to save, .* keep it, or run"):
        ShardedStateLoader.save_model(served, "path")
    assert saved == [1]


def test_layers_that_are_served() -> None:
    need_served(layer())
    need_served(layer(swiglu_limit=7.0))
    need_served(layer(moe_parallel_config=parallel(ep_size=2)))


def with_adapters(**options: Any) -> VllmConfig:
    """A configuration of vLLM with --enable-lora."""
    made = VllmConfig()
    made.lora_config = LoRAConfig(lora_dtype="bfloat16", **options)
    return made


def test_adapters_are_this_librarys_for_its_experts() -> None:
    with set_current_vllm_config(with_adapters()):
        need_served(layer(is_lora_enabled=True))
        need_served(layer(is_lora_enabled=True))
    names = [cls.__name__ for cls in lora_utils._all_lora_classes]
    assert names.count("FusedMoEWithLoRA") == 2
    assert lora_utils._all_lora_classes[0].__module__ == "fusion_moe.integrations.vllm.lora"
    others = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(others)
    others.routed_experts = SimpleNamespace()
    found = [
        cls.__module__
        for cls in lora_utils._all_lora_classes
        if cls.__name__ == "FusedMoEWithLoRA"
        and cls.can_replace_layer(others, LoRAConfig(), ["w1", "w3"])
    ]
    assert found == ["vllm.lora.layers.fused_moe"]


@pytest.mark.parametrize(("slices", "alternate"), [(2, False), (2, True), (1, False)])
def test_slots_of_adapters(slices: int, alternate: bool) -> None:
    """What vLLM writes to a slot is that slot's B A for each part of the rows."""
    from fusion_moe.integrations.vllm.lora import Slots

    slots, experts, rank, n, k = 3, 2, 4, 8, 6
    made = Slots((experts, n, k), slots, rank, torch.empty(0), slices, alternate)
    generator = torch.Generator().manual_seed(0)
    for a, b in zip(made.a_slices, made.b_slices, strict=True):
        assert a.shape == (slots, experts, rank, k)
        assert b.shape == (slots, experts, n // slices, rank)
        for views in a, b:
            views.copy_(torch.randn(views.shape, generator=generator))
    for slot in range(slots):
        parts = [b[slot] @ a[slot] for a, b in zip(made.a_slices, made.b_slices, strict=True)]
        want = torch.stack(parts, 2).flatten(1, 2) if alternate else torch.cat(parts, 1)
        of = made.of == slot
        torch.testing.assert_close(made.b[..., of] @ made.a[:, of], want)


def test_adapters_of_padded_weights() -> None:
    """What vLLM writes to a slot is added as without padding, from the memory that was there before
    it was written.
    """
    from fusion_moe.integrations.vllm.lora import FusedMoEWithLoRA

    count, hidden, inner, rank, g = 4, 80, 48, 8, torch.Generator().manual_seed(0)
    up, down = (
        quantize(torch.randn(shape, generator=g), NVFP4)
        for shape in ((count, 2 * inner, hidden), (count, hidden, inner))
    )
    a = [torch.randn(count, rank, k, generator=g) for k in (hidden, inner, hidden)]
    b = [torch.randn(count, n, rank, generator=g) for n in (inner, hidden, inner)]
    x, w = torch.randn(3, hidden, generator=g).bfloat16(), torch.rand(3, 2, generator=g)
    ids, given = torch.tensor([[0, 1], [2, 3], [3, 1]]), {"max_loras": 2, "max_lora_rank": rank}
    results = []
    for padded in False, True:
        experts = Experts(up, down)
        if padded:
            prepare_(experts, "cuda")
        assert any(form.padding for form in experts.forms.values()) == padded
        moe = layer(hidden_dim=hidden, intermediate_size=inner)
        routed = SimpleNamespace(fusion_moe=experts)
        made = FusedMoEWithLoRA(
            SimpleNamespace(routed_experts=routed, moe_config=moe, _shared_experts=None)
        )
        made.create_lora_weights(2, LoRAConfig(lora_dtype="bfloat16", **given))
        made.punica_wrapper = SimpleNamespace(_token_lora_indices=torch.tensor([1, 0, 1, 0]))
        arguments = made._arguments(len(x))
        with options.override(target="reference"):
            results.append(experts(x, ids, w, arguments))
            made.set_lora(1, [t.bfloat16() for t in a], [t.bfloat16() for t in b])
            results.append(experts(x, ids, w, arguments))
            made.reset_lora(1)
            assert torch.equal(experts(x, ids, w, arguments), results[-2])
    zeros, found, zeros_padded, found_padded = results
    assert torch.equal(zeros, zeros_padded)
    assert torch.equal(found, found_padded)
    assert [torch.equal(*rows) for rows in zip(zeros, found, strict=True)] == [False, True, False]


def test_ranks_with_tokens_of_their_own_on_gpus(
    monkeypatch: pytest.MonkeyPatch, golden: Callable[[str], None]
) -> None:
    """Tokens are gathered, and what ranks return is added up, in one of vLLM's ways."""
    monkeypatch.setattr(
        "fusion_moe.integrations.vllm.experts.current_platform",
        SimpleNamespace(is_cpu=lambda: False),
    )
    need_served(layer(moe_parallel_config=parallel(ep_size=2, dp_size=2)))
    other = parallel(ep_size=2, dp_size=2, all2all_backend="deepep_low_latency")
    prefill = parallel(ep_size=2, pcp_size=2)
    golden(
        messages(
            {
                "another exchange": lambda: need_served(layer(moe_parallel_config=other)),
                "prefill": lambda: need_served(layer(moe_parallel_config=prefill)),
            }
        )
    )


@pytest.mark.parametrize(
    ("changes", "interleave", "found"),
    [
        ({}, 0, swiglu(limit=None)),
        ({"swiglu_limit": 7.0}, 0, swiglu(limit=7.0)),
        (
            {"activation": MoEActivation.SWIGLUOAI},
            1,
            swiglu(interleave=1, limit=7.0, alpha=1.702, up_offset=1.0),
        ),
        (
            {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, "swiglu_limit": 5.0},
            0,
            swiglu(limit=5.0, alpha=1.0, up_offset=0.0),
        ),
        (
            {
                "activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "swiglu_beta": 1.0,
            },
            0,
            swiglu(limit=7.0, alpha=1.702, up_offset=1.0),
        ),
    ],
)
def test_activations_that_are_served(changes: dict[str, Any], interleave: int, found: str) -> None:
    assert activation_of(layer(**changes), interleave) == found


def _vllm_computes(activation: MoEActivation, x: torch.Tensor) -> torch.Tensor:
    """By vLLM's own layers in plain torch."""
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": partial(GeluAndMul.forward_native, SimpleNamespace(approximate="none")),
        "gelu_tanh": partial(GeluAndMul.forward_native, SimpleNamespace(approximate="tanh")),
        "swiglustep": partial(SwigluStepAndMul.forward_native, SimpleNamespace(limit=7.0)),
        "situ": partial(SituAndMul.forward_native, SimpleNamespace(beta=8.0, linear_beta=25.0)),
    }
    if activation.is_gated:
        return layers[activation.value](x)
    return apply_moe_activation(activation, torch.empty_like(x), x.clone())


@pytest.mark.parametrize(
    "name", ["GELU", "GELU_TANH", "SWIGLUSTEP", "SITU", *(a.name for a in WITHOUT_GATE)]
)
def test_activations_mean_what_they_mean_in_vllm(name: str, pretended_gpu: None) -> None:
    activation = MoEActivation[name]
    given = {"activation_situ_beta": 8.0, "activation_situ_linear_beta": 25.0}
    program = read(activation_of(layer(activation=activation, **given), 0))
    assert program.parts == 1 + activation.is_gated
    x = 9 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    (found,) = program.fusion.evaluate(x)
    torch.testing.assert_close(found, _vllm_computes(activation, x), rtol=1e-5, atol=1e-5)


def test_every_activation_is_served_or_refused(pretended_gpu: None) -> None:
    served = {a for a in MoEActivation if a is not MoEActivation.RELU2}
    for activation in served:
        activation_of(layer(activation=activation, activation_situ_beta=1.0), 0)
    with pytest.raises(UnsupportedError, match="activation 'relu2'; expected one of silu, situ, "):
        activation_of(layer(activation=MoEActivation.RELU2), 0)


def experts_method(**changes: Any) -> Any:
    config = FusionMoeConfig.from_config(NVFP4_CONFIG)
    return config.FusedMoEMethodCls(config, layer(**changes))


def weights(experts: int = 4) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(experts, 2, 32, 64, generator=generator)
    w13[:, 1] *= 8  # up has scales of its own
    w2 = torch.randn(experts, 64, 32, generator=generator)
    codes, scale, matrix = torch.ops.fusion_moe.nvfp4_quantize(w13)
    return Quantized(codes.flatten(1, 2), scale.flatten(1, 2), matrix, encoding=NVFP4), Quantized(
        *torch.ops.fusion_moe.nvfp4_quantize(w2), encoding=NVFP4
    )


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five tokens, ids of their experts, and the router's weights."""
    g = torch.Generator().manual_seed(1)
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [3, 3]])
    return torch.randn(5, 64, generator=g), ids, torch.rand(5, 2, generator=g)


def loaded(method: Any, w13: Any, w2: Any) -> torch.nn.Module:
    """A layer as vLLM leaves it to `process_weights_after_loading`."""
    owner = torch.nn.Module()
    owner.layer_name, owner.apply_router_weight_on_input = "model.layers.0.mlp.experts", False
    tensors = {"w13_input_scale": torch.ones(4, 2), "w2_input_scale": torch.ones(4)}
    for name, weight in ("w13", w13), ("w2", w2):
        tensors |= {
            f"{name}_{part}": t
            for part, t in zip(("weight", "weight_scale", "weight_scale_2"), weight, strict=True)
        }
    for name, tensor in tensors.items():
        owner.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    assert set(tensors) == set(method.loaded)
    return owner


@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_keep_both_scales_of_gate_and_up(limit: float | None) -> None:
    method, (w13, w2) = experts_method(swiglu_limit=limit), weights()
    owner = loaded(method, w13, w2)
    method.process_weights_after_loading(owner)
    assert [
        name for name, _ in owner.named_parameters() if not name.startswith("fusion_moe.")
    ] == []
    x, ids, w = routed()
    want = expected(x, ids, w, w13, w2, limit=limit)
    assert_near(method.apply(owner, x, w, ids.int()), want)


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_of_ranks_add_up(ranks: int) -> None:
    (w13, w2), (x, ids, w) = weights(), routed()
    total = torch.zeros(5, 64)
    for rank in range(ranks):
        count, placed, _ = determine_expert_map(ranks, rank, 4)
        here = placed >= 0
        method = experts_method(
            moe_parallel_config=parallel(ep_size=ranks, ep_rank=rank), num_local_experts=count
        )
        owner = loaded(
            method,
            *(Quantized(*(part[here] for part in weight), encoding=NVFP4) for weight in (w13, w2)),
        )
        method.first_expert = first_expert(placed, "")
        method.process_weights_after_loading(owner)
        assert len(owner.fusion_moe.down_proj) == count
        total += method.apply(owner, x, w, ids.int())
    assert_near(total, expected(x, ids, w, w13, w2))


def test_placements_of_experts() -> None:
    assert first_expert(None, "") is None
    assert [first_expert(determine_expert_map(3, rank, 7)[1], "") for rank in range(3)] == [0, 3, 5]


def test_what_is_refused(golden: Callable[[str], None]) -> None:
    assert FusionMoeConfig.get_config_filenames() == []  # vLLM then makes one without arguments
    FusionMoeInt4Method(layer())

    def with_config(lora: dict[str, Any] | None = None, **changes: Any) -> None:
        made = with_adapters(**lora) if lora is not None else VllmConfig()
        made.parallel_config.enable_elastic_ep = lora is None
        with set_current_vllm_config(made):
            need_served(layer(**changes))

    def with_flag() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_BATCH_INVARIANT", "1")
            need_served(layer())

    of_rows, adapters = {}, {}
    for name in "SILU", "SWIGLUOAI_UNINTERLEAVE", "GELU":
        moe = layer(activation=MoEActivation[name])
        of_rows[f"{name} of rows that take turns"] = partial(activation_of, moe, 1)
    for lora, changes in (
        ({"fully_sharded_loras": True}, {}),
        ({"enable_moe_shared_loras": True}, {}),
        ({}, {"enable_eplb": True}),
    ):
        ranks = parallel(**changes)
        adapters[f"adapters, {lora | changes}"] = partial(
            with_config, lora, is_lora_enabled=True, moe_parallel_config=ranks
        )
    owner = SimpleNamespace(layer_name="experts", expert_map=None)
    make, read_config = experts_method().create_weights, FusionMoeConfig.from_config
    by_turns, empty = determine_expert_map(2, 0, 4, "round_robin")[1], determine_expert_map(3, 2, 2)
    golden(
        messages(
            {
                "mxfp8": lambda: read_config({"quant_method": "mxfp8"}),
                "FP8_PB_WO": lambda: read_config(NVFP4_CONFIG | {"quant_algo": "FP8_PB_WO"}),
                "another backend": lambda: need_served(layer(moe_backend="marlin")),
                "the flag on a CPU": with_flag,
                "ranks that come and go": with_config,
                **adapters,
                **of_rows,
                "INT4 in float16": lambda: FusionMoeInt4Method(layer(in_dtype=torch.float16)),
                "I": lambda: make(owner, 4, 64, 24, torch.bfloat16),
                "H": lambda: make(owner, 4, 40, 32, torch.bfloat16),
                "experts by turns": lambda: first_expert(by_turns, "layer 3"),
                "no experts": lambda: first_expert(empty[1], ""),
                "experts in another order": lambda: first_expert(torch.tensor([-1, 1, 0]), ""),
            }
        )
    )


def filled(method: Any, **biases: torch.Tensor) -> tuple[torch.nn.Module, dict[str, Quantized]]:
    """A layer with parameters of its method, as vLLM's loader fills them, and its weights."""
    owner, weights = torch.nn.Module(), {}
    owner.layer_name, owner.apply_router_weight_on_input = "model.layers.0.mlp.experts", False
    owner.expert_map = None
    method.create_weights(owner, 4, 64, 32, torch.float32, weight_loader=None)
    parts = method.moe.w13_num_shards
    for name, shape in ("w13", (4, parts, 32, 64)), ("w2", (4, 1, 64, 32)):
        made = quantize(torch.randn(shape), method.scheme.encoding)
        # gate and up have scales of their own
        joined = [t.flatten(1, 2) if t.dim() == 4 else t.squeeze(1) for t in made]
        weights[name] = Quantized(*joined, encoding=method.scheme.encoding)
        keys = [key for key in method.loaded if key.startswith(f"{name}_")]
        for stored, key, t in zip(method.scheme.parts, keys, joined, strict=False):
            parameter = getattr(owner, key).data
            t = t.reciprocal() if stored.direction is Direction.DIVISOR else t
            alike = t.dtype == parameter.dtype or t.dtype == torch.bfloat16
            parameter.view(t.shape if alike else parameter.shape).copy_(
                t if alike else t.contiguous().view(parameter.dtype)
            )
    for name, bias in biases.items():
        getattr(owner, name).data.copy_(bias)
    return owner, weights


METHODS: dict[str, Callable[[FusedMoEConfig], Any]] = {
    "modelopt": lambda moe: FusionMoeModelOptMethod(FusionMoeConfig.from_config(NVFP4_CONFIG), moe),
    "compressed-tensors nvfp4": FusionMoeNvFp4Method,
    "compressed-tensors mxfp4": FusionMoePackedMxfp4Method,
    "compressed-tensors int4": FusionMoeInt4Method,
    "mxfp4": FusionMoeMxfp4Method,
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("rank", [0, 1])
def test_biases_in_every_encoding(make: Callable[[Any], Any], rank: int, no_group: None) -> None:
    """vLLM adds up what ranks return, so that one of them has down's bias."""
    torch.manual_seed(0)
    biases = {"w13_bias": torch.randn(4, 64).bfloat16(), "w2_bias": torch.randn(4, 64).bfloat16()}
    ranks = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), tp_rank=rank)
    moe = layer(has_bias=True, in_dtype=torch.float32, moe_parallel_config=ranks)
    method = make(moe)
    owner, weights = filled(method, **biases)
    method.process_weights_after_loading(owner)
    assert all(name.startswith("fusion_moe.") for name, _ in owner.named_parameters())
    x, ids, w = routed()
    want = expected(x, ids, w, **weights, **biases | ({"w2_bias": None} if rank else {}))
    assert_near(method.apply(owner, x, w, ids.int()), want)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_experts_without_a_gate(
    make: Callable[[Any], Any], pretended_gpu: None, no_group: None
) -> None:
    torch.manual_seed(0)
    bias = torch.randn(4, 32).bfloat16()
    activation = MoEActivation.RELU2_NO_MUL
    method = make(layer(has_bias=True, in_dtype=torch.float32, activation=activation))
    owner, weights = filled(method, w13_bias=bias)
    method.process_weights_after_loading(owner)
    x, ids, w = routed()
    want = expected(x, ids, w, **weights, w13_bias=bias, function=lambda up: up.relu().square())
    assert_near(method.apply(owner, x, w, ids.int()), want)


@pytest.mark.parametrize(
    ("key", "change", "error", "message"),
    [
        ("w13_weight_scale", lambda t: t.view(torch.uint8).fill_(0x7F), NonFiniteError, "NaN"),
        ("w2_weight_scale_2", lambda t: t.fill_(-1.0), NonFiniteError, "negative"),
        ("w13_weight_scale_2", lambda t: t.reciprocal_(), CheckpointError, "makes the largest"),
    ],
)
def test_bad_scales_are_found(
    key: str, change: Callable[[torch.Tensor], object], error: type[Exception], message: str
) -> None:
    method, (w13, w2) = experts_method(), weights()
    owner = loaded(method, w13, w2)
    change(getattr(owner, key).data)
    with pytest.raises(error, match=message) as raised:
        method.process_weights_after_loading(owner)
    assert key.replace("_", ".", 1) in str(raised.value)
