"""Experts divided between processes, over gloo and over NCCL: what cases.py checks in each of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

CASES = Path(__file__).with_name("cases.py")
# Each group is the name of a file. Of two ranks all cases but those that take compilers longest; of
# four what takes so many, the rest of what depends on how many there are with --all alone.
KERNELS = (
    "gradients_by_kernels,kernels_through_shared_memory,compiled_by_others,"
    "compiled_for_any_routing,compiled_gradients_through_shared_memory"
)
TWO, REST_OF_TWO = f"2:-{KERNELS}", f"2:{KERNELS}"
FOUR = "4:experts_and_features"
MORE_OF_FOUR = (
    "4:whole_experts,tokens_of_a_rank,tokens_sent_to_experts,numbers_of_tokens_that_differ,"
    "more_tokens_than_the_capacity,checkpoints,tokens_through_shared_memory,"
    "gradients_through_shared_memory,kernels_through_shared_memory",
    "4:gradients_by_kernels,backwards_of_several_calls",
)
LOST = ("2:dies", "2:hangs")
NAMED = (
    "3:leaves_the_others",
    "2:stands_still",
    "2:layers_in_another_order",
    "2:leaves_before_the_backward",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.compiler,
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="torch was built without torch.distributed"
    ),
]


def outcomes(folder: Path, device: str, *groups: str) -> dict[str, list[dict[str, str]]]:
    """What each rank of each group that lives found: the traceback of each case, "" for those that
    pass.
    """
    # to compile kernels of each share takes longer than the rest: only some cases do
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FUSION_MOE_TARGET": "reference"}
    # whether there are GPUs is asked without CUDA, which survives no fork
    fixed["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with Path(folder, "log").open("wb") as log:
        subprocess.run(
            [sys.executable, CASES, folder, device, *groups],
            env={**os.environ, **fixed},
            stdout=log,
            stderr=log,
            timeout=1800,
        )
    assert list(folder.glob("*.json")), Path(folder, "log").read_text()[-2000:]
    return {
        group: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{group}.*.json"))]
        for group in groups
    }


def assert_agree(found: list[dict[str, str]], ranks: int) -> None:
    assert len(found) == ranks
    wrong = [
        f"rank {rank}, {case}:\n{why}"
        for rank, cases in enumerate(found)
        for case, why in cases.items()
        if why
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder) -> dict[str, list[dict[str, str]]]:
    """Of all groups below, one after the other: imports take longer than most of them."""
    return outcomes(folder, "cpu", TWO, FOUR, *LOST, *NAMED)


@pytest.mark.usefixtures("call_by_call")
@pytest.mark.parametrize("group", [TWO, FOUR], ids=["two", "four"])
def test_ranks_agree_with_one_process(found, group):
    assert_agree(found[group], int(group[0]))


@pytest.mark.exhaustive
def test_more_cases(tmp_path):
    for group, ranks in outcomes(tmp_path, "cpu", REST_OF_TWO, *MORE_OF_FOUR).items():
        assert_agree(ranks, int(group[0]))


def test_a_lost_rank_is_an_error_for_the_others(found, folder):
    """gloo knows ranks by their addresses, and those that hang not at all."""
    assert [found[group] for group in LOST] == [[{"dies": ""}], [{"hangs": ""}] * 2]
    said = (folder / "log").read_text()
    assert "peer" in said
    assert "[127.0.0.1]:" in said
    assert "Timed out" in said


def test_a_lost_rank_is_named_by_those_that_share_memory(found):
    """Whether it ended or stands still."""
    assert [found[group] for group in NAMED] == [
        [{"leaves_the_others": ""}] * 2,
        [{"stands_still": ""}] * 2,
        [{"layers_in_another_order": ""}] * 2,
        [{"leaves_before_the_backward": ""}] * 2,
    ]


def on_gpus(ranks: int) -> Any:
    few = torch.cuda.device_count() < ranks
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            few, reason=f"needs {ranks} CUDA GPUs; {torch.cuda.device_count()} here"
        ),
    ]
    return pytest.param(ranks, marks=[*marks, *([pytest.mark.multi] if ranks > 1 else [])])


@pytest.mark.parametrize("ranks", [on_gpus(2), on_gpus(4)])
def test_a_lost_rank_is_named_by_gpus(ranks, tmp_path):
    """A process that ends while kernels of the others wait for it."""
    group = f"{ranks}:leaves_the_others"
    assert outcomes(tmp_path, "cuda", group)[group] == [{"leaves_the_others": ""}] * (ranks - 1)


@pytest.mark.parametrize("ranks", [on_gpus(1), on_gpus(2), on_gpus(4)])
def test_ranks_on_gpus_agree_with_one_process(ranks, tmp_path):
    assert_agree(outcomes(tmp_path, "cuda", str(ranks))[str(ranks)], ranks)
