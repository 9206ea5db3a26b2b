"""A trainer's bf16 parameters, whole or in FSDP2's shares, by transformers' names, into an engine
that runs: what a new engine of the same weights answers, at the addresses of the old ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from served import ENVIRONMENT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "ranks", "form"),
    [("nvfp4", 2, "whole"), ("fp8", 1, "mixed"), ("mxfp4", 1, "each"), ("int4", 1, "mixed")],
)
def test_a_running_engine_takes_them(encoding: str, ranks: int, form: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("refitting.py")
    command = [sys.executable, script, tmp_path, encoding, str(ranks), form]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["before"] != found["new engine"]
    assert found["after"] == found["new engine"]
    assert found["addresses stay"]
    # what goes into the weights that are served vLLM does not miss
    assert "RoutedExperts: Failed to load weights" not in done.stdout + done.stderr
