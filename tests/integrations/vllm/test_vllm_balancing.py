"""vLLM's load balancing of experts (EPLB) moves weights between ranks as they are packed: by vLLM's
functions between two processes, and in an engine on GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from served import modelopt_demo
from test_vllm_gpu import DEFAULT, near
from test_vllm_serving import PROMPTS, generated


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Replicas too."""
    script = Path(__file__).with_name("balanced.py")
    paths = os.pathsep.join([*map(str, sys.path)])
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "meeting")],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out[-4000:]
        assert "BALANCED" in out


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_background", "mode"), [(False, "sync mode"), (True, r"\(async mode\)")]
)
def test_an_engine_on_two_gpus(in_background: bool, mode: str, tmp_path: Path) -> None:
    """Prompts before and after experts moved, with replicas: near transformers' model."""
    directory, rounds = modelopt_demo(tmp_path), 4
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    balance = {"window_size": 4, "step_interval": 3, "num_redundant_experts": 2}
    options |= {"enable_eplb": True, "eplb_config": balance | {"use_async": in_background}}
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    # four at once
    found, log = generated(directory, more, prompts=PROMPTS * rounds, **DEFAULT | options)
    assert re.search(rf"Rearranging experts {mode} \.\.\.", log)  # more than to profile it
    for i in range(rounds):
        near(directory, tmp_path, found[i * len(PROMPTS) : (i + 1) * len(PROMPTS)])
