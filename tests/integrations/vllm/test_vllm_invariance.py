"""Prompts alone and in other company have the same tokens and log-probabilities, bit for bit, where
experts run in row order (tools/engines_gpu/invariance.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from served import DEMO, ENVIRONMENT, adapter_of, judged

from fusion_moe.checkpoints import quantize

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parents[3] / "tools" / "engines_gpu" / "invariance.py"
PARTS: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
}  # 64: prompts in parts


def answers(directory: Path, out: Path, *arguments: Any, order: str = "row", **options: Any) -> Any:
    """What the tool writes: by the name of each way of asking, how many answers differ."""
    usual = {"quantization": "fusion_moe", "enforce_eager": True, "max_model_len": 256}
    usual |= {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "skip_tokenizer_init": True}
    command = [sys.executable, TOOL, directory, "--options", json.dumps(usual | options)]
    command += ["--count", 16, "--longest", 180, "--modules", "--out", out, *arguments]
    environment = ENVIRONMENT | {"FUSION_MOE_ORDER": order}
    done = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def other_bits(results: dict[str, Any]) -> dict[str, int]:
    """By way of asking, or module: how many answers, or rows, have other bits."""
    named = {k: v for k, v in results.items() if isinstance(v, dict)}
    assert len([k for k in named if k.startswith("in batches of")]) == 4
    counts = {k: v.get("other bits", 0) + v.get("other outputs", 0) for k, v in named.items()}
    return {k: n for k, n in counts.items() if n}


@pytest.mark.parametrize("to", ["bf16", "nvfp4", "mxfp4", "int4", "fp8"])
def test_answers_do_not_depend_on_the_batch(to: str, tmp_path: Path) -> None:
    """With prefix caching, prompts in parts, and experts in each format; "bf16": a directory that
    nobody quantized.
    """
    directory = DEMO if to == "bf16" else quantize(DEMO, tmp_path / to, to=to)
    results = answers(directory, tmp_path / "parts.json", **PARTS)
    assert results["experts"]["rows"]
    assert not other_bits(results)


def test_nor_on_caches_parts_and_adapters_of_others(tmp_path: Path) -> None:
    """Half of the prompts have an adapter of experts. Those without one have the bits of an engine
    that knows of none, and whose prompts are whole.
    """
    directory = quantize(DEMO, tmp_path / "nvfp4")
    adapter = adapter_of(judged(directory, tmp_path, [])[0], tmp_path, seed=1)
    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    lora["lora_target_modules"] = ["experts"]
    whole = answers(directory, tmp_path / "whole.json")
    results = answers(directory, tmp_path / "lora.json", "--adapter", adapter, **PARTS, **lora)
    assert not other_bits(whole) | other_bits(results)
    same = [a == b for a, b in zip(whole["answers"], results["answers"], strict=True)]
    assert same == [i % 4 in (0, 3) for i in range(16)]


def test_in_free_order_they_do(tmp_path: Path) -> None:
    """Or the tests above test nothing. On one core it is experts alone that differ."""
    directory = quantize(DEMO, tmp_path / "int4", to="int4")
    differ = other_bits(answers(directory, tmp_path / "free.json", order="free"))
    assert differ["in another order"]
    assert all(".mlp.experts" in name for name in differ if name.startswith("model."))
