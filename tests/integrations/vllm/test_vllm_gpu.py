"""vLLM on a GPU, in its default mode (CUDA graphs, torch.compile), in bfloat16: what it says is
compared with transformers' model of the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from served import (
    compressed_tensors_demo,
    deepseek_v3,
    deepseek_v4,
    fp8_channels_demo,
    fp8_demo,
    fp8_modelopt_demo,
    gemma4,
    judged,
    mixed_demo,
    modelopt_demo,
    mxfp4_alone_demo,
    mxfp4_demo,
)
from test_vllm_reload import an_engine_reloads
from test_vllm_serving import PROMPTS, differences, generated, serves_adapters
from vllm.utils.import_utils import has_deep_gemm
from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DEFAULT: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "gpu_memory_utilization": 0.05,  # what must be free at the start: others may run here
    "kv_cache_memory_bytes": 1 << 28,
}


def near(
    directory: Path,
    folder: Path,
    found: list[dict[str, Any]],
    prompts: list[list[int]] = PROMPTS,
) -> None:
    """To transformers' model in float32, or in bfloat16, which may choose other experts where two
    are as likely.
    """
    exact, rounded = (
        judged(directory, folder, prompts, dtype)[1] for dtype in (torch.float32, torch.bfloat16)
    )
    for answer, *wanted in zip(found, exact, rounded, strict=True):
        for value, *either in zip(answer["log_probabilities"], *wanted, strict=True):
            assert min(abs(value - want) for want in either) <= 0.15


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
        deepseek_v3,
    ],
)
def test_directories(write: Any, tmp_path: Path) -> None:
    directory = write(tmp_path)
    found, log = generated(directory, **DEFAULT)
    assert "fusion_moe serves experts in" in log
    assert ", on cuda" in log
    near(directory, tmp_path, found)


@pytest.mark.parametrize(
    "name",
    [
        "modelopt-mixtral",
        "modelopt-qwen3_moe",
        "modelopt-llama4_text",
        "ct-gpt_oss",
        "modelopt-gpt_oss",
        "ct-qwen3_moe-int4",
        "mxfp4-gpt_oss",
    ],
)
def test_made_by_other_packages(name: str, tmp_path: Path) -> None:
    found, log = generated(MADE / name, **DEFAULT)
    assert ", on cuda" in log
    near(MADE / name, tmp_path, found)


@pytest.mark.skipif(
    not (is_flashmla_sparse_supported()[0] and has_deep_gemm()),
    reason="vLLM's attention of DeepSeek-V4 needs FlashMLA and DeepGEMM",
)
def test_deepseek_v4(tmp_path: Path) -> None:
    """As published. vLLM attends over keys and values in FP8."""
    directory = deepseek_v4(tmp_path)
    found, log = generated(directory, **DEFAULT)
    assert "fusion_moe serves experts in mxfp4" in log
    mean, largest = differences(directory, tmp_path, found)
    assert mean <= 0.08
    assert largest <= 0.3


@pytest.mark.parametrize("write", [modelopt_demo, mxfp4_demo])
def test_batch_invariance(write: Any, tmp_path: Path) -> None:
    """Of vLLM's whole model: the same bits in a batch and alone."""
    directory, asked = write(tmp_path), {"VLLM_BATCH_INVARIANT": "1"}
    together, log = generated(directory, asked, **DEFAULT)
    assert ", in row order" in log
    alone, _ = generated(directory, asked, prompts=PROMPTS[:1], **DEFAULT)
    assert together[:1] == alone
    near(directory, tmp_path, together)


def test_captured_graphs_read_reloaded_weights(tmp_path: Path) -> None:
    an_engine_reloads(tmp_path, DEFAULT)


@pytest.mark.parametrize("write", [modelopt_demo, mxfp4_demo])
def test_adapters(write: Any, tmp_path: Path) -> None:
    serves_adapters(write(tmp_path), tmp_path, attention=True, alone=True, tolerance=0.3, **DEFAULT)
