"""fusion-moe serve: transformers' server answers with a model in NVFP4, and says what it lacks."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from typer.testing import CliRunner, Result

from fusion_moe.checkpoints import quantize
from fusion_moe.cli.app import app
from fusion_moe.errors import ShapeError

DEMO = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"


NEEDED = ("fastapi", "uvicorn", "openai")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments)], prog_name="fusion-moe")


def test_help_is_ours() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert "--continuous-batching" in shown.output
    assert "Examples:" in shown.output


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    shown = run(DEMO)
    assert shown.exit_code == 3
    assert shown.stderr.startswith("fusion-moe: FastAPI, uvicorn or openai is missing; pip install")


def test_a_cache_in_memory_leaves_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    psutil = pytest.importorskip("psutil")
    now = SimpleNamespace(total=24 << 30, available=6 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: now)
    told = list[list[str]]()
    monkeypatch.setattr("fusion_moe.cli.server.serve", lambda _, options: told.append(options))
    for more in ([], ["--continuous-batching"]):
        run(DEMO, "--host", "127.0.0.1", "--port", _free(), "--device", "cpu", *more)
    assert "--cb-max-memory-percent" not in told[0]
    assert told[1][-2:] == ["--cb-max-memory-percent", "0.125"]


def test_a_port_that_is_taken() -> None:
    """Said before anything is loaded."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        shown = run(DEMO, "--host", "127.0.0.1", "--port", s.getsockname()[1])
    assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
    assert "Address already in use; expected an address of this machine, and a" in shown.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, int]]:
    """The address of a server of the demo model with experts in NVFP4, its directory, and the
    number of its process.
    """
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    folder = tmp_path_factory.mktemp("serve")
    directory, log = quantize(DEMO, folder / "model"), folder / "log"
    process, address = _started(directory, log)
    until = time.monotonic() + 1200
    try:
        while not _answers(f"{address}/health", process):
            if process.returncode is not None and "Address already in use" in log.read_text():
                process, address = _started(directory, log)  # another took the port before it
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.5)
        yield address, directory, process.pid
    finally:
        process.terminate()
        process.wait(300)


def _started(directory: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server at a port that is free now, and its address."""
    port = _free()
    arguments = f"--host 127.0.0.1 --port {port} --device cpu".split()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fusion_moe.cli", "serve", directory, *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    return process, f"http://127.0.0.1:{port}"


def _free() -> int:
    """A port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return False
    try:
        urllib.request.urlopen(address, timeout=5)
    except (urllib.error.URLError, OSError):
        return False
    return True


def ask(
    server: tuple[str, Path, int], asked: Any, path: str = "/v1/completions", wait: float = 300
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an answer. asked: an object, or bytes that need not be JSON."""
    body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server[0]}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=wait) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_a_request(server: tuple[str, Path, int]) -> None:
    """The text that the model generates by itself."""
    import transformers

    import fusion_moe.transformers  # noqa: F401

    directory = server[1]
    asked = {"model": str(directory), "prompt": "def main():", "max_tokens": 6, "temperature": 0}
    status, answer = ask(server, asked)
    assert status == 200
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer("def main():", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    assert type(model.model.layers[0].mlp.experts).__name__ == "NVFP4Experts"
    text = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
    assert answer["choices"][0]["text"] == text


# what a request says beside a right prompt, and what the refusal quotes
WRONG = [
    ({"max_tokens": -1}, "max_tokens = -1; expected a whole number"),
    ({"max_tokens": 0}, "max_tokens = 0"),
    ({"max_tokens": "many"}, 'max_tokens = "many"'),
    ({"max_tokens": True}, "max_tokens = true"),
    ({"temperature": -0.5}, "temperature = -0.5"),
    ({"temperature": float("nan")}, "temperature = NaN"),
    ({"top_p": 1.5}, "top_p = 1.5"),
    ({"n": 2}, "n = 2; expected 1"),
    ({"seed": "a"}, 'seed = "a"'),
    ({"stream": 1}, "stream = 1"),
    ({"stop": [1]}, "stop = [1]"),
    ({"model": "another"}, "another"),
    ({"model": ["a"]}, 'model = ["a"]'),
    ({"prompt": ""}, "expected a text that is not empty"),
    ({"prompt": None}, "no prompt"),
    ({"prompt": 5}, "prompt = 5"),
    ({"prompt": "x " * 3000}, "a prompt of 3,001 tokens; expected 1 to 1,023"),
    ({"seed": 1.5}, "seed = 1.5; expected a whole number"),
    ({"stop": "x" * 257}, "at most 256 characters"),  # seconds, for each new one
    ({"stop": ["x"] * 17}, "at most 16"),
    ({"best_of": 2}, "best_of = 2; expected 1"),
    ({"echo": True}, "echo = true"),
    ({"logprobs": 1}, "logprobs = 1; expected none"),
    ({"presence_penalty": 0.5}, "presence_penalty = 0.5"),
    ({"logit_bias": {"5": 1}}, "/v1/chat/completions takes it"),
    ({"generation_config": "{"}, "generation_config"),
    ({"generation_config": '{"max_new_tokens": "a"}'}, "generation_config"),
    ({"generation_config": '{"top_k": "a"}'}, "JSON of what GenerationConfig takes"),
    ({"generation_config": '{"eos_token_id": "a"}'}, "generation_config"),
    ({"generation_config": '{"stop_strings": 5}'}, "generation_config"),
    ({"generation_config": '{"num_beams": 100}'}, "at most 8 beams"),
]


@pytest.mark.slow
def test_wrong_requests_are_refused_in_a_sentence(server: tuple[str, Path, int]) -> None:
    for asked, said in WRONG:
        status, answer = ask(server, {"prompt": "def", "max_tokens": 2, **asked})
        assert (status, said in answer["error"]["message"]) == (400, True), (asked, answer)
    for body in (b"{", b"[1]", b"\xff", b"", b'{"prompt": "\\ud800"}'):
        assert ask(server, body)[0] == 400, body
    calls = [{"type": "function", "function": {"name": "f"}}]  # without arguments
    for messages in (
        *([], ["x"], [{"role": "user", "content": 5}], [{"content": "x"}]),
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": calls}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"arguments": "{"}]}],
    ):
        assert ask(server, {"messages": messages}, "/v1/chat/completions")[0] == 400, messages
    for item in (
        {"type": "message"},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1"},
        {"type": "reasoning", "content": [{"type": "x"}]},
        {"role": "user", "content": [{"type": "input_text"}]},
    ):
        assert ask(server, {"input": [item]}, "/v1/responses")[0] == 400, item
    talk = {"messages": [{"role": "user", "content": "x"}]}
    for asked, said in (
        ({"chat_template_kwargs": {"chat_template": "x"}}, "what the model's own template reads"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs = 3"),
    ):
        status, answer = ask(server, {**talk, **asked}, "/v1/chat/completions")
        assert (status, said in answer["error"]["message"]) == (400, True), (asked, answer)
    assert ask(server, {"input": ""}, "/v1/responses")[0] == 400
    assert ask(server, b'{"prompt": "' + b"a" * 17_000_000 + b'"}')[0] == 413
    status, answer = ask(server, {"prompt": "a " * 7_000_000})  # before tokens are made of it
    assert (status, "a text of 14,000,000 characters; expected at most" in str(answer)) == (
        413,
        True,
    )
    assert [ask(server, {}, path)[0] for path in ("/reset", "/load_model")] == [403, 403]
    assert "Traceback" not in server[1].with_name("log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_answered_further(
    stream: bool, server: tuple[str, Path, int]
) -> None:
    """Nobody waits for 10**9 tokens, which would end at the model's context besides: 1,024 take
    ten times as long as what is waited for here.
    """
    asked = json.dumps({"prompt": "def", "max_tokens": 10**9, "stream": stream}).encode()
    host, port = server[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(asked), asked)
        )
        time.sleep(1)
    before = _cpu_seconds(server[2])
    time.sleep(3)
    assert _cpu_seconds(server[2]) - before < 1.5
    assert ask(server, {"prompt": "def", "max_tokens": 1})[0] == 200


def _cpu_seconds(process: int) -> float:
    times = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ctrl_c_ends_the_server(server: tuple[str, Path, int]) -> None:
    """Also while a request is answered. (The last test: its server is gone.)"""
    asked = {"prompt": "def", "max_tokens": 10**9}

    def cut_off() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(server, asked)

    client = threading.Thread(target=cut_off)
    client.start()
    time.sleep(1)
    os.kill(server[2], signal.SIGINT)
    before = _cpu_seconds(server[2])
    assert os.waitid(os.P_PID, server[2], os.WEXITED | os.WNOWAIT).si_status == 130
    assert _cpu_seconds(server[2]) - before < 10
    client.join(300)


def test_tokens_are_bounded_by_the_context() -> None:
    """And a prompt is refused that has ids which the embedding has no row for."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    from fastapi import HTTPException
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from fusion_moe.cli.server import bound

    config = AutoConfig.from_pretrained(DEMO, vocab_size=96, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config)
    for asked, room in ((10**9, 1021), (None, 1021), (7, 7)):
        generation = GenerationConfig(max_new_tokens=asked)
        bound(model, torch.tensor([[1, 2, 95]]), generation)
        assert generation.max_new_tokens == room
    for ids, said in (([], "without tokens"), ([0] * 1024, "1,024 tokens"), ([96], "id 96")):
        with pytest.raises(HTTPException, match=said) as refused:
            bound(model, ids, GenerationConfig())
        assert refused.value.status_code == 400


def test_attention_is_not_planned_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    from transformers.cli.serving import server as application, utils

    from fusion_moe.cli import server

    class Reached(Exception):
        pass

    def instead(model: str, non_blocking: bool = False) -> None:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise Reached

    for owner, name in (
        (utils, "GenerateManager"),
        (utils, "CBGenerateManager"),
        (utils.BaseHandler, "_resolve_model"),
        (application, "build_server"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # and it is as before
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(server, "Serve", instead)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with pytest.raises(Reached):
            server.serve(DEMO, [])
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("said by transformers"), 400),
        (TypeError("a fault"), 500),
        (KeyError("a fault"), 500),
        (ShapeError("of ours"), 500),
        (RuntimeError("of torch"), 500),
    ],
)
def test_faults_of_the_server_are_its_own(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is to blame for what validation says of it, and for what its messages do in a
    template, where the kind of error says nothing.
    """
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[serve]'")
    from fastapi import FastAPI
    from jinja2 import Environment

    from fusion_moe.cli import server as module

    template = Environment().from_string("{{ x() }}")

    def fail() -> None:
        raise error

    for handle, want in ((fail, status), (lambda: template.render(x=fail), 400)):
        app = FastAPI()
        app.post("/v1/completions")(handle)
        got = answered(module._guarded(lambda app=app: app)(), {"prompt": "x"})
        assert (got[0], str(error.args[0]) in got[1]["error"]["message"]) == (want, True)
    assert [record.exc_info is not None for record in caplog.records] == [True] * (status == 500)


def answered(app: Any, asked: Any) -> tuple[int, dict[str, Any]]:
    """The status and the JSON that an ASGI application sends."""
    body, sent, more = json.dumps(asked).encode(), list[dict[str, Any]](), asyncio.Event()
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await more.wait()
        return message

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    asyncio.run(app({**scope, "query_string": b"", "root_path": ""}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])
