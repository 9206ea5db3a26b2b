"""What the plug-in registers, what it takes and what it refuses, without a model."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make sglang")

from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

from fusion_moe.checkpoints.schemes import MODELOPT, PACKED_MXFP4
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.sglang import register
from fusion_moe.integrations.sglang.config import (
    FusionMoeConfig,
    FusionMoeModelOptConfig,
    FusionMoeMxfp4Config,
)
from fusion_moe.integrations.sglang.experts import activation_of, need_served
from fusion_moe.nn import swiglu

NVFP4_CONFIG = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def test_registered_once_or_more_often() -> None:
    register()
    register()
    assert get_quantization_config("fusion_moe") is FusionMoeConfig
    assert QUANTIZATION_CHOICES.count("fusion_moe") == 1
    assert next(iter(QUANTIZATION_METHODS)) == "fusion_moe"  # ModelOpt's would take its own


@pytest.mark.parametrize("plugins", [{}, {"SGLANG_PLUGINS": "other"}], ids=["all", "others"])
def test_sglang_takes_its_name_unless_its_own_variable_leaves_it_out(
    plugins: dict[str, str],
) -> None:
    """In the order of `sglang serve`: plug-ins, then the command line."""
    code = (
        "import argparse; from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(); ServerArgs.add_cli_args(parser)\n"
        "line = '--model-path directory --quantization fusion_moe'\n"
        "print(parser.parse_args(line.split()).quantization)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **plugins},
        capture_output=True,
        text=True,
    )
    if plugins:
        assert "invalid choice: 'fusion_moe'" in done.stderr
    else:
        assert done.stdout.split()[-1:] == ["fusion_moe"], done.stderr


def test_only_who_asks_gets_it() -> None:
    asked = FusionMoeConfig.override_quantization_method
    assert asked(NVFP4_CONFIG, "fusion_moe") == "fusion_moe"
    assert asked(NVFP4_CONFIG, None) is None
    assert asked(NVFP4_CONFIG, "modelopt_fp4") is None


def test_another_version_of_sglang(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    FusionMoeConfig.from_config(NVFP4_CONFIG)
    assert "tested with" not in caplog.text
    monkeypatch.setattr("sglang.__version__", "0.9.9")
    FusionMoeConfig.from_config(NVFP4_CONFIG)
    assert "tested with SGLang 0.5.23, not with 0.9.9" in caplog.text


def test_what_is_read() -> None:
    """The names are SGLang's, which its loaders ask for."""
    older = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}, "group_size": 16}
    for config in NVFP4_CONFIG, NVFP4_CONFIG | {"quant_method": "modelopt"}, older:
        made = FusionMoeConfig.from_config(config)
        assert isinstance(made, FusionMoeModelOptConfig)
        assert made.get_name() == "modelopt_fp4"
    made = FusionMoeConfig.from_config({"quant_method": "mxfp4"})
    assert isinstance(made, FusionMoeMxfp4Config)
    assert made.get_name() == "mxfp4"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quant_method": "fp8"}, "quant_method 'fp8'"),
        ({"quant_method": "modelopt_fp8", "quant_algo": "FP8"}, "quant_algo FP8"),
    ],
)
def test_other_methods_are_refused(config: dict[str, Any], found: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"{found}; expected ModelOpt's NVFP4.*; leave out --quantization"
    ):
        FusionMoeConfig.from_config(config)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"runner": "marlin"}, "experts by marlin, .*; leave out --moe-runner-backend, or"),
        # SGLang's choice, not an option that the user gave
        ({"runner": "flashinfer_mxfp4"}, "by itself .*Blackwell.*, --quantization fusion_moe$"),
        ({"exchange": "deepep"}, "--moe-a2a-backend deepep; .*; leave it out"),
        ({"enable_eplb": True}, "load balancing of experts"),
        ({"ep_num_redundant_experts": 2}, "load balancing of experts"),
        ({"enable_lora": True}, "LoRA"),
        ({"load_format": "dummy"}, None),
        ({"load_format": "sharded_state"}, "--load-format sharded_state; .*; leave it out"),
        ({"enable_memory_saver": True}, "drops weights; .*; --enable-weights-cpu-backup too"),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, None),
        ({"num_fused_shared_experts": 1}, "shared experts .*; --disable-shared-experts-fusion"),
        ({"no_combine": True}, "a result for each expert"),
    ],
)
def test_layers_that_are_refused(
    changes: dict[str, Any], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(name: str, usual: Any) -> Any:
        return changes.get(name, usual)

    def give(name: str, value: Any) -> None:
        monkeypatch.setattr(f"fusion_moe.integrations.sglang.experts.{name}", lambda: value)

    give("get_moe_runner_backend", MoeRunnerBackend(said("runner", "auto")))
    give("get_moe_a2a_backend", MoeA2ABackend(said("exchange", "none")))
    balancing = {n: said(n, 0) for n in ("enable_eplb", "ep_num_redundant_experts")}
    saver = {n: said(n, False) for n in ("enable_memory_saver", "enable_weights_cpu_backup")}
    give(
        "get_exec",
        SimpleNamespace(moe=SimpleNamespace(**balancing), features=SimpleNamespace(**saver)),
    )
    give("get_model", SimpleNamespace(load_format=said("load_format", "auto")))
    give("get_lora", SimpleNamespace(enable_lora=said("enable_lora", False)))
    config = MoeRunnerConfig(
        num_fused_shared_experts=said("num_fused_shared_experts", 0),
        no_combine=said("no_combine", False),
    )
    if found is None:
        need_served(config)
    else:
        with pytest.raises(UnsupportedError, match=found):
            need_served(config)


GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}


def test_activations_that_are_served() -> None:
    for scheme in MODELOPT, PACKED_MXFP4:
        assert activation_of(MoeRunnerConfig(), scheme) == swiglu()
        clamped = MoeRunnerConfig(swiglu_limit=10.0)
        assert activation_of(clamped, scheme) == swiglu(limit=10.0)
    assert activation_of(MoeRunnerConfig(**GPT_OSS), PACKED_MXFP4) == swiglu(
        1, limit=7.0, alpha=1.702, up_offset=1.0
    )


@pytest.mark.parametrize(
    ("changes", "scheme", "found"),
    [
        ({"activation": "gelu"}, MODELOPT, "activation 'gelu'"),
        ({"is_gated": False}, MODELOPT, "is_gated False"),
        (GPT_OSS, MODELOPT, "gemm1_alpha 1.702, gemm1_clamp_limit 7.0"),
        (GPT_OSS | {"gate_up_interleaved": False}, PACKED_MXFP4, "gemm1_alpha 1.702"),
        (GPT_OSS | {"gemm1_beta": 2.0}, PACKED_MXFP4, "gemm1_beta 2.0"),
    ],
)
def test_activations_that_are_refused(changes: dict[str, Any], scheme: Any, found: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{found}.*; expected SwiGLU, or gpt-oss's"):
        activation_of(MoeRunnerConfig(**changes), scheme)
