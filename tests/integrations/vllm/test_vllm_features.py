"""What vLLM has beside plain serving: drawn weights, saved states, caches, speculative decoding.
Each gives the answers of plain serving, or a sentence says why not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from files import MADE
from served import (
    ENVIRONMENT,
    deepseek_v3,
    fp8_channels_demo,
    fp8_demo,
    fp8_modelopt_demo,
    greedy,
    judged,
    log_probabilities,
    modelopt_demo,
    with_mtp,
)

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("engines.py")
# one of more than a block of the cache, which has 128 tokens, and one that repeats itself
PROMPTS = [
    [3, 9, 27, 20, 5, 11, 30],
    [7 * i % 2000 + 1 for i in range(150)],
    [5, 6, 7, 8, 9] * 6,
]


def engines(
    options: list[dict[str, Any]], prompts: list[list[int]] = PROMPTS
) -> list[dict[str, Any]]:
    """What engines of these options found, in one process."""
    command = [sys.executable, SCRIPT, json.dumps(options), json.dumps(prompts)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def same(answers: list[Any], plain: list[Any]) -> bool:
    return all(
        tokens == want and values == pytest.approx(wanted, abs=1e-4)
        for (tokens, values), (want, wanted) in zip(answers, plain, strict=True)
    )


def test_features(tmp_path: Path) -> None:
    """Of vLLM on CPUs, with one directory."""
    directory = modelopt_demo(tmp_path)
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path / "cache")}
    draft = {"method": "draft_model", "model": str(directory), "quantization": "fusion_moe"}
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    options = {
        "plain": {"then": ["save"]},
        "moved": {"cpu_offload_gb": 1, "then": ["sleep"]},
        "transferred": {"kv_transfer_config": transfer, "then": ["forget"]},
        "state": {"load_format": "sharded_state"},
        "drafts": {"speculative_config": draft | {"num_speculative_tokens": 2}},
        "ngrams": {"speculative_config": ngram | {"num_speculative_tokens": 2}},
    }
    usual = {"model": str(directory), "dtype": "float32"}
    found = engines([usual | given for given in options.values()])
    found = dict(zip(options, found, strict=True))
    plain = found["plain"]["first"]
    model, _ = judged(directory, tmp_path, [])
    for prompt, (tokens, _) in zip(PROMPTS, plain, strict=True):
        assert greedy(model, prompt, tokens)
    assert found["plain"]["prefix_cache_hits"] == 128
    assert "the directory that is served: its files" in found["plain"]["save refused"]
    assert "--load-format sharded_state; expected a quantized" in found["state"]["refused"]
    assert found["transferred"]["external_prefix_cache_hits"] == 128
    drafts = found["drafts"]["spec_decode_num_draft_tokens"]
    assert found["drafts"]["spec_decode_num_accepted_tokens"] == drafts > 0
    assert found["ngrams"]["spec_decode_num_draft_tokens"] > 0
    for name in "plain", "moved", "transferred", "drafts", "ngrams":
        assert same(found[name]["first"], plain), name
        assert same(found[name]["then"], plain), name


def test_drawn_weights(tmp_path: Path) -> None:
    """--load-format dummy, in each format, also of linear layers; then those of a directory, whose
    q, k and v have scales of their own.
    """
    names = "modelopt-qwen3_moe", "ct-qwen3_moe", "ct-qwen3_moe-int4", "mxfp4-gpt_oss", "ct-gpt_oss"
    directories = [MADE / name for name in names]
    for write in fp8_demo, fp8_modelopt_demo, fp8_channels_demo:
        (folder := tmp_path / write.__name__).mkdir()
        directories.append(write(folder))
    usual = {"dtype": "float32", "max_model_len": 64}
    drawn = [usual | {"model": str(d), "load_format": "dummy"} for d in directories]
    plain = usual | {"model": drawn[1]["model"]}
    drawn[1]["then"] = ["reload"]
    *found, of_files = engines([*drawn, plain], PROMPTS[:1])
    assert not same(found[1]["first"], of_files["first"])
    assert same(found[1]["then"], of_files["first"])
    for directory, of in zip(directories, found, strict=True):
        ((tokens, values),) = of["first"]
        assert len(tokens) == 8, directory
        assert torch.tensor(values).isfinite().all(), directory


def test_multi_token_prediction(tmp_path: Path) -> None:
    """DeepSeek-V3's layer for it, whose output layer vLLM does not call by its name."""
    directory = with_mtp(deepseek_v3(tmp_path))
    prompt, drafts = PROMPTS[0], {"method": "mtp", "num_speculative_tokens": 1}
    usual = {"model": str(directory), "dtype": "bfloat16", "max_model_len": 64}
    (found,) = engines([usual | {"speculative_config": drafts}], [prompt])
    assert found["spec_decode_num_draft_tokens"]
    ((tokens, values),) = found["first"]
    model, _ = judged(directory, tmp_path, [])
    assert greedy(model, prompt, tokens, 0.3)
    want = log_probabilities(model, prompt + tokens)[-len(tokens) :]
    assert values == pytest.approx(want, abs=0.3)
