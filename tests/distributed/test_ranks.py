"""Experts divided between processes, over gloo and over NCCL: what cases.py checks in each of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

CASES = Path(__file__).with_name("cases.py")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)


def outcomes(
    folder: Path, ranks: int, device: str, *case: str, target: str = "auto"
) -> list[dict[str, str]]:
    """What each rank that lives found: the traceback of each case, "" for those that pass. target:
    what ranks compile for.
    """
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "FUSION_MOE_TARGET": target,
    }
    with Path(folder, "log").open("wb") as log:
        subprocess.run(
            [sys.executable, CASES, folder, str(ranks), device, *case],
            env=env,
            stdout=log,
            stderr=log,
            timeout=500,
        )
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert found, Path(folder, "log").read_text()[-2000:]
    return found


def on_gpus(ranks: int) -> Any:
    few = torch.cuda.device_count() < ranks
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            few, reason=f"needs {ranks} CUDA GPUs; {torch.cuda.device_count()} here"
        ),
    ]
    marks += [pytest.mark.multi] if ranks > 1 else []
    return pytest.param("cuda", ranks, marks=marks)


def assert_agree(found: list[dict[str, str]], ranks: int) -> None:
    assert len(found) == ranks
    wrong = [
        f"rank {rank}, {case}:\n{why}"
        for rank, cases in enumerate(found)
        for case, why in cases.items()
        if why
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.once
def test_two_ranks_agree_with_one_process(tmp_path):
    """With kernels of the CPU."""
    assert_agree(outcomes(tmp_path, 2, "cpu", "but", "compiled"), 2)


@pytest.mark.slow
@pytest.mark.compiler
def test_two_ranks_that_torch_compiles_agree_with_one_process(tmp_path):
    assert_agree(outcomes(tmp_path, 2, "cpu", "compiled"), 2)


@pytest.mark.slow
def test_four_ranks_agree_with_one_process(tmp_path):
    """In plain torch: kernels of other sizes than those of two ranks' shares take longer to compile
    than the rest does.
    """
    assert_agree(outcomes(tmp_path, 4, "cpu", target="reference"), 4)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("device", "ranks"), [on_gpus(1), on_gpus(2), on_gpus(4)])
def test_ranks_agree_with_one_process(device, ranks, tmp_path):
    assert_agree(outcomes(tmp_path, ranks, device), ranks)


@pytest.mark.slow
def test_a_lost_rank_is_an_error_for_the_others(tmp_path):
    """gloo knows ranks by their addresses, and those that hang not at all."""
    folders = {case: tmp_path / case for case in ("dies", "hangs")}
    for folder in folders.values():
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        found = dict(
            zip(
                folders,
                pool.map(lambda case: outcomes(folders[case], 2, "cpu", case), folders),
                strict=True,
            )
        )
    assert found == {"dies": [{"dies": ""}], "hangs": [{"hangs": ""}, {"hangs": ""}]}
    said = {case: (folder / "log").read_text() for case, folder in folders.items()}
    assert "peer" in said["dies"]
    assert "[127.0.0.1]:" in said["dies"]
    assert "Timed out" in said["hangs"]
