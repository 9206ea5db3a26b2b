"""DDP, FSDP2 and DeepSpeed's ZeRO around PEFT's adapters, over gloo; the first two over NCCL."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

MADE = Path(__file__).parents[2] / "checkpoints" / "made" / "modelopt-qwen3_moe"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.judges("peft"),
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="torch was built without torch.distributed"
    ),
]


def agreements(device: str, ranks: int, how: str = "torch") -> list[str]:
    """What each rank found to agree with one process."""
    # plain torch on CPUs: to compile kernels takes longer than the rest
    target = "reference" if device == "cpu" else "auto"
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FUSION_MOE_TARGET": target}
    fixed["DS_ACCELERATOR"] = device
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    # not by the name of the machine, which need have no address
    run += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*run, str(Path(__file__).with_name("processes.py")), str(MADE), device, how],
        env={**os.environ, **fixed},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(re.findall(r"rank \d+ [\w ]+: agree", done.stdout))  # lines of ranks may join


def every_case(ranks: int, wraps: tuple[str, ...] = ("ddp", "fsdp2")) -> list[str]:
    cases = [f"{wrap} {checkpointed}" for wrap in wraps for checkpointed in (False, True)]
    return sorted(f"rank {r} {case}: agree" for r in range(ranks) for case in [*cases, "unsent"])


@pytest.mark.exhaustive
def test_two_processes_train_as_one():
    assert agreements("cpu", 2) == every_case(2)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_two_processes_of_deepspeed_train_as_one():
    assert agreements("cpu", 2, "deepspeed") == every_case(2, ("zero1", "zero2", "zero3"))


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
def test_two_gpus_train_as_one():
    assert agreements("cuda", 2) == every_case(2)
