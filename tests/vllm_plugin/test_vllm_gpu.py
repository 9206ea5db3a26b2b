"""vLLM on a GPU, in its default mode (CUDA graphs, torch.compile), in bfloat16: what it says is
compared with transformers' model of the same numbers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from served import (
    adapter_of,
    compressed_tensors_demo,
    fp8_channels_demo,
    fp8_demo,
    fp8_modelopt_demo,
    gemma4,
    judged,
    log_probabilities,
    mixed_demo,
    modelopt_demo,
    mxfp4_alone_demo,
    mxfp4_demo,
)
from test_vllm_reload import an_engine_reloads
from test_vllm_serving import PROMPTS, generated

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DEFAULT: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "gpu_memory_utilization": 0.1,
}


def near(directory: Path, folder: Path, found: list[dict[str, Any]]) -> None:
    _, wanted = judged(directory, folder, PROMPTS)
    for answer, want in zip(found, wanted, strict=True):
        assert answer["log_probabilities"] == pytest.approx(want, abs=0.15)


@pytest.mark.parametrize(
    "write",
    [
        modelopt_demo,
        mixed_demo,
        compressed_tensors_demo,
        mxfp4_demo,
        mxfp4_alone_demo,
        fp8_demo,
        fp8_modelopt_demo,
        fp8_channels_demo,
        gemma4,
    ],
)
def test_directories(write: Any, tmp_path: Path) -> None:
    directory = write(tmp_path)
    found, log = generated(directory, **DEFAULT)
    assert "fusion_moe serves experts in" in log
    assert ", on cuda" in log
    near(directory, tmp_path, found)


@pytest.mark.parametrize(
    "name", ["modelopt-mixtral", "modelopt-gpt_oss", "ct-qwen3_moe-int4", "mxfp4-gpt_oss"]
)
def test_made_by_other_packages(name: str, tmp_path: Path) -> None:
    found, log = generated(MADE / name, **DEFAULT)
    assert ", on cuda" in log
    near(MADE / name, tmp_path, found)


def test_captured_graphs_read_reloaded_weights(tmp_path: Path) -> None:
    an_engine_reloads(tmp_path, DEFAULT)


def test_adapters(tmp_path: Path) -> None:
    """Three adapters of experts and attention in two slots, and a request without one."""
    directory, prompt = modelopt_demo(tmp_path), PROMPTS[0]
    base, _ = judged(directory, tmp_path, [prompt])
    models = [copy.deepcopy(base) for _ in range(3)]
    adapters = [adapter_of(m, tmp_path, i, attention=True) for i, m in enumerate(models)]
    found, _ = generated(
        directory,
        prompts=[prompt] * 4,
        adapters=[*adapters, None],
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=16,
        lora_target_modules=["qkv_proj", "o_proj", "experts"],
        **DEFAULT,
    )
    for model, answer in zip([*models, base], found, strict=True):
        want = log_probabilities(model, prompt)
        assert answer["log_probabilities"] == pytest.approx(want, abs=0.15)
