"""fusion-moe serve: transformers' server answers with a model in NVFP4, and says what it lacks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner

from fusion_moe.checkpoints import quantize
from fusion_moe.cli.app import app

DEMO = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"


def test_help_is_that_of_transformers() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], prog_name="fusion-moe")
    assert shown.exit_code == 0
    assert "--continuous-batching" in shown.output


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    shown = CliRunner().invoke(app, ["serve", "."], prog_name="fusion-moe")
    assert shown.exit_code == 3
    assert shown.output.endswith("the extra serve installs it: pip install '.[serve]' in a clone\n")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server of the demo model with experts in NVFP4, and the file of its log."""
    for name in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    directory, log = quantize(DEMO, tmp_path / "model"), tmp_path / "log"
    arguments = f"--host 127.0.0.1 --port {port} --device cpu".split()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fusion_moe.cli", "serve", directory, *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 300
        while not _answers(f"{address}/health"):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address, directory
    finally:
        process.terminate()
        process.wait(60)


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5)
    except (urllib.error.URLError, OSError):
        return False
    return True


@pytest.mark.slow
def test_a_request(server: tuple[str, Path]) -> None:
    """The text that the model generates by itself."""
    import transformers

    import fusion_moe.transformers  # noqa: F401

    address, directory = server
    asked = {"model": str(directory), "prompt": "def main():", "max_tokens": 6, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)["choices"][0]["text"]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer("def main():", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert type(model.model.layers[0].mlp.experts).__name__ == "NVFP4Experts"
    assert found == tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
