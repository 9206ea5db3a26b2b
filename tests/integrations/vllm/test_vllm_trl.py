"""TRL's GRPO with vLLM in the trainer's process, on the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
pytest.importorskip("trl", reason="TRL is not installed: make vllm")

from served import ENVIRONMENT

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "grpo_vllm.py"


@pytest.mark.slow
def test_the_engine_has_the_weights_that_were_trained() -> None:
    """Its log-probabilities are as near to the trainer's after training as before."""
    environment = {**ENVIRONMENT, "FUSION_MOE_ORDER": "row", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, SCRIPT, "--steps", "2", "--learning-rate", "1e-3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    shown = re.findall(r"^(before|after) +(\S+) +\S+$", done.stdout, re.MULTILINE)
    means = {name: float(mean) for name, mean in shown}
    assert 0 < means["after"] < 2 * means["before"] < 0.1
