"""A server of vLLM with clients: time to first token and between tokens, and minutes of mixed
requests, malformed ones among them, whose answers are compared with those of single requests.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

_START_S, _ANSWER_S = 600, 300
_SHOW_S = 20
_PROMPTS, _TOKENS = 48, 64
Answer = list[tuple[str, float]]  # tokens and their log-probabilities
# requests that are refused
_MALFORMED: tuple[dict[str, Any] | bytes, ...] = (
    b"{",
    {"prompt": [10**9]},
    {"prompt": [-1]},
    {"prompt": [11], "max_tokens": -1},
    {"prompt": [11] * 100_000},
    {"prompt": [11], "temperature": "warm"},
)


class Server:
    """A running server of one model."""

    def __init__(self, model: Path, port: int, *options: str):
        self.model, self.port = model, port
        self.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
        ]
        command += ["--port", str(port), "--max-model-len", "9216", *options]
        self.log = tempfile.NamedTemporaryFile(suffix=".log", delete=False)  # noqa: SIM115
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._wait()
        self.start_s = time.perf_counter() - begun

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while self.process.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"the server did not start: {Path(self.log.name).read_text()[-2000:]}")

    def kill(self) -> None:
        """As kill -9 of all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def memory_mib(self) -> tuple[int, int]:
        """Of the GPUs, and of the host's that the server's processes do not share."""
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        host = 0
        for status in Path("/proc").glob("[0-9]*/smaps_rollup"):
            with suppress(OSError):  # of processes that end meanwhile
                if os.getsid(int(status.parent.name)) == self.process.pid:
                    host += int(status.read_text().split("Private_Dirty:")[1].split()[0])
        return sum(map(int, said.split())), host // 1024

    def post(self, body: dict[str, Any] | bytes) -> Any:
        """The answer to a completion. urllib.error.HTTPError for one that is refused."""
        with self._opened(body) as answer:
            return json.load(answer)

    def _opened(self, body: dict[str, Any] | bytes) -> Any:
        if isinstance(body, dict):
            body = json.dumps({"model": str(self.model)} | body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=_ANSWER_S)

    def leave(self, prompt: list[int]) -> None:
        """Asks for a long answer, and hangs up after its first bytes."""
        asked = {"model": str(self.model), "prompt": prompt, "max_tokens": 4096, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(asked | {"ignore_eos": True}),
            {"Content-Type": "application/json"},
        )
        connection.getresponse().read(64)
        connection.close()

    def gap(self, prompt: list[int]) -> float:
        """The longest time in seconds between two tokens of a streamed answer of 64."""
        asked = {"prompt": prompt, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
        with self._opened(asked) as answer:
            times = [time.monotonic() for line in answer if line.startswith(b"data: {")]
        return max(after - before for before, after in pairwise(times))

    def greedy(self, prompt: list[int]) -> Answer:
        """The answer of 64 tokens."""
        asked = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "logprobs": 0}
        said = self.post(asked | {"ignore_eos": True})["choices"][0]["logprobs"]
        return list(zip(said["tokens"], said["token_logprobs"], strict=True))


@contextmanager
def serving(model: Path, port: int, *options: str) -> Iterator[Server]:
    """A server, until the end of the block."""
    server = Server(model, port, *options)
    try:
        yield server
    finally:
        server.kill()


def latencies(server: Server, clients: int) -> dict[str, float]:
    """`vllm bench serve` with random prompts of 512 tokens and answers of 128: median and 99th
    percentile of the times to the first token and between tokens, in ms; tokens a second.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--model", str(server.model), "--port", str(server.port), "--seed", "0"]
        command += ["--dataset-name", "random", "--random-input-len", "512"]
        command += ["--random-output-len", "128", "--num-prompts", str(8 * clients), "--ignore-eos"]
        command += ["--max-concurrency", str(clients), "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "r.json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"vllm bench serve: {done.stderr[-2000:]}")
        found = json.loads((Path(folder) / "r.json").read_text())
    wanted = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "output_throughput")
    return {name: found[name] for name in wanted}


def soak(
    server: Server, clients: int, seconds: float
) -> tuple[dict[str, Any], list[list[int]], list[Answer]]:
    """Clients that ask until the time is over, some of which hang up. Prints what happened so far
    now and then. Returns what happened to malformed requests, requests that failed, the longest
    wait for an answer and between two tokens, the growth of memory, and how far answers are from
    those to single requests; prompts, and the answers to single requests.
    """
    drawn = random.Random(0)
    prompts = [
        [drawn.randrange(10, server.vocabulary) for _ in range(drawn.randrange(50, 1600))]
        for _ in range(_PROMPTS)
    ]
    alone = [server.greedy(prompt) for prompt in prompts]
    until, before = time.monotonic() + seconds, server.memory_mib()

    happened, far, waits, gaps = Counter[str](), list[float](), list[float](), list[float]()

    def ask(own: random.Random) -> None:
        i, kind = own.randrange(_PROMPTS), own.random()
        if kind < 0.05:
            happened[_refused(server, own.choice(_MALFORMED))] += 1
        elif kind < 0.1:
            server.leave(prompts[i])
            happened["left"] += 1
        elif kind < 0.2:
            gaps.append(server.gap(prompts[i]))
        else:
            begun = time.monotonic()
            far.append(apart(server.greedy(prompts[i]), alone[i]))
            waits.append(time.monotonic() - begun)

    def client(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < until:
            try:
                ask(own)
            except Exception as error:  # is a result: the others go on
                happened[f"failed: {error!r}"] += 1
                time.sleep(1)

    def so_far() -> dict[str, Any]:
        grown = [now - then for now, then in zip(server.memory_mib(), before, strict=True)]
        return {
            "seconds": round(seconds - max(until - time.monotonic(), 0)),
            "clients": clients,
            "malformed": dict(happened),
            "answers": len(far),
            "most apart": max(far, default=0.0),
            "longest_wait_s": max(waits, default=0.0),
            "longest_gap_s": max(gaps, default=0.0),
            "grown_mib": grown,
        }

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, seed) for seed in range(clients)]
        while wait(running, timeout=_SHOW_S).not_done:
            print(so_far(), flush=True)
    found = so_far()
    print(found, flush=True)
    spread = statistics.quantiles(far, n=1000, method="inclusive")
    return found | {"apart": spread}, prompts, alone


def _refused(server: Server, body: dict[str, Any] | bytes) -> str:
    try:
        server.post(body)
    except urllib.error.HTTPError as error:
        return f"refused with {error.code}"
    return "malformed, and answered"


def apart(found: Answer, alone: Answer) -> float:
    """The largest difference of a log-probability up to the first other token, and of that. Sums of
    a batch have another order, so another token is right where two are as likely.
    """
    largest = 0.0
    for (token, probability), (wanted, expected) in zip(found, alone, strict=True):
        largest = max(largest, abs(probability - expected))
        if token != wanted:
            break
    return largest
