"""benchmarks/h100_parallel.py, tried between two processes on CPUs: every way, with its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.once, pytest.mark.slow]
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "h100_parallel.py"
WAYS = {"all_gather", "all_to_all 1.0", "symmetric", "replicated"}


@pytest.mark.exhaustive
def test_every_way_is_measured_and_right(tmp_path):
    rows = tmp_path / "rows.jsonl"
    cells = "--device cpu --ranks 2 --tiny --models qwen3-235b --tokens 8 --passes forward lora"
    done = subprocess.run(
        [sys.executable, BENCHMARK, *cells.split(), "--out", rows],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all cells are there" in done.stdout
    assert "WRONG" not in done.stdout
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    for run in ("forward", "lora"):
        assert {row["way"] for row in found if row["passes"] == run} >= WAYS
    assert all(row["ep"] > 0 and row["error"] < 1e-2 for row in found)
