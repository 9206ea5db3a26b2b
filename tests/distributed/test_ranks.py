"""Experts divided between processes over gloo: what cases.py checks in each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

CASES = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")


def outcomes(folder: Path, ranks: int, *case: str) -> list[dict[str, str]]:
    """What each rank that lives found: the traceback of each case, "" for those that pass."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with Path(folder, "log").open("wb") as log:
        subprocess.run([sys.executable, CASES, folder, str(ranks), *case], env=env, stdout=log, stderr=log, timeout=500)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert found, Path(folder, "log").read_text()[-2000:]
    return found


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_with_one_process(ranks, tmp_path):
    found = outcomes(tmp_path, ranks)
    assert len(found) == ranks
    wrong = [f"rank {rank}, {case}:\n{why}" for rank, cases in enumerate(found) for case, why in cases.items() if why]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_for_the_others(tmp_path):
    assert outcomes(tmp_path, 2, "silent") == [{"silent": ""}]
    assert "gloo" in (tmp_path / "log").read_text()
