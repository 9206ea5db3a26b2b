"""TRL's GRPO with vLLM in the trainer's process, and on another GPU, on the demo model."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")
pytest.importorskip("trl", reason="TRL is not installed: make vllm")

from served import DEMO, ENVIRONMENT

from fusion_moe.checkpoints import quantize

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "grpo_vllm.py"
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
SERVER += ["--quantization", "fusion_moe", "--dtype", "bfloat16", "--max-model-len", "256"]
SERVER += ["--weight-transfer-config", '{"backend": "nccl"}', "--enable-return-routed-experts"]
SERVER += ["--logprobs-mode", "processed_logprobs", "--gpu-memory-utilization", "0.05"]
SERVER += ["--kv-cache-memory-bytes", str(1 << 28)]


def trains(*options: str, **more: str) -> None:
    """The log-probabilities of rollouts are as near to the trainer's after training as before."""
    environment = {**ENVIRONMENT, "TRL_EXPERIMENTAL_SILENCE": "1", **more}
    command = [sys.executable, SCRIPT, "--steps", "2", "--learning-rate", "1e-3", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    shown = re.findall(r"^(before|after) +(\S+) +\S+$", done.stdout, re.MULTILINE)
    means = {name: float(mean) for name, mean in shown}
    assert 0 < means["after"] < 2 * means["before"] < 0.1


@contextlib.contextmanager
def serving(directory: Path, log: Path, port: int, **more: str) -> Iterator[None]:
    """A server of it, until the end of the block; it need not answer yet."""
    environment = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", **more}
    command = [*SERVER, "--model", str(directory), "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        yield
    except AssertionError as error:
        error.add_note(log.read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


@pytest.mark.slow
def test_the_engine_has_the_weights_that_were_trained() -> None:
    trains(FUSION_MOE_ORDER="row")


@pytest.mark.gpu
@pytest.mark.multi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.slow
def test_a_server_has_the_weights_that_were_trained(tmp_path: Path) -> None:
    """The trainer's GPU is the second; it waits for the server."""
    served = quantize(DEMO, tmp_path / "nvfp4", to="nvfp4", scales="max")
    port, group = free_ports(2)
    where = {"VLLM_HOST_IP": "127.0.0.1"}
    with serving(served, tmp_path / "log", port, CUDA_VISIBLE_DEVICES="0", **where):
        options = ["--server", f"http://127.0.0.1:{port}", "--group-port", str(group)]
        trains(*options, CUDA_VISIBLE_DEVICES="1", **where)
