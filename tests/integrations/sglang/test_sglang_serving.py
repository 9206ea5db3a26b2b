"""SGLang serves directories with this library: what it says is compared with transformers' model
of the same numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: make sglang")

from files import MADE
from safetensors.torch import load_file, save_file
from served import greedy, judged, modelopt_demo

from fusion_moe.checkpoints import convert

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PROMPTS = [[3, 9, 27, 20, 5, 11, 30], [8, 4], [17, 3, 29, 31, 6, 12, 25, 14, 7, 22, 19, 5]]


def run(script: str, *arguments: Any) -> tuple[subprocess.CompletedProcess[str], str]:
    """A script that ended, and all that it said."""
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, done.stdout + done.stderr


def found(script: str, *arguments: Any) -> tuple[Any, str]:
    """What a script found, and all that it said."""
    done, log = run(script, *arguments)
    assert done.returncode == 0, log[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND ")), log


def untied(directory: Path) -> Path:
    """The same with an lm_head of its own, which SGLang's model of Qwen3-MoE wants."""
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return directory


def test_qwen3_moe_in_nvfp4(tmp_path: Path) -> None:
    directory = untied(modelopt_demo(tmp_path))
    answers, log = found("engine.py", directory, json.dumps(PROMPTS))
    assert "fusion_moe serves experts in nvfp4, activations in torch.float32, on cpu" in log
    model, wanted = judged(directory, tmp_path, PROMPTS)
    for prompt, answer, want in zip(PROMPTS, answers, wanted, strict=True):
        assert answer["log_probabilities"] == pytest.approx(want, abs=1e-3)
        assert greedy(model, prompt, answer["tokens"])


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Biases, rows of gate and up interleaved; SGLang makes the model's activations bfloat16."""
    convert(MADE / "mxfp4-gpt_oss", tmp_path / "dense", to="dense")
    errors, _ = found("blocks.py", MADE / "mxfp4-gpt_oss", tmp_path / "dense")
    assert errors
    assert max(errors) <= 2**-7


def test_attention_in_nvfp4_on_a_cpu_is_refused(tmp_path: Path) -> None:
    done, log = run("engine.py", MADE / "modelopt-qwen3_moe", json.dumps(PROMPTS))
    assert done.returncode != 0
    assert "a linear layer in NVFP4 on a CPU; expected one in floats, or a GPU" in log
