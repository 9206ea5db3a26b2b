"""vLLM's load balancing of experts (EPLB) moves weights between ranks as they are packed: by vLLM's
functions between two processes, and in an engine on GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from served import modelopt_demo
from test_vllm_gpu import DEFAULT
from test_vllm_serving import generated


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
    """The same log-probabilities with experts that move every few steps, and with replicas."""
    directory, more = modelopt_demo(tmp_path), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = DEFAULT | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    still, _ = generated(directory, more, **options)
    balance = {"window_size": 4, "step_interval": 3, "num_redundant_experts": 2}
    balance["use_async"] = in_background
    moved, log = generated(directory, more, **options, enable_eplb=True, eplb_config=balance)
    assert re.search(rf"Rearranging experts {mode} \.\.\.", log)  # more than to profile it
    for a, b in zip(moved, still, strict=True):
        assert a["log_probabilities"] == pytest.approx(b["log_probabilities"], abs=0.1)
