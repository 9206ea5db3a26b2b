"""A server with clients: time to first token and between tokens (vLLM), and minutes of mixed
requests, malformed ones among them, whose answers are compared with those of single requests.

    python tools/engines_gpu/server.py vllm MODEL 600 --clients 64 --out FILE.json \\
        --options --quantization fusion_moe

The server is vLLM's, SGLang's, or this library's (`fusion_moe`: `fusion-moe serve`); --options is
last, and has all that follows. What was found so far is printed and written every 20 s.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

_START_S, _ANSWER_S = 600, 300
_SHOW_S = 20
_TOKENS = 64
Answer = list[tuple[str, float]]  # tokens and their log-probabilities
Prompt = list[int] | str
# modules to run, and what comes before the model
SERVERS = {
    "vllm": ["vllm.entrypoints.openai.api_server", "--max-model-len", "9216", "--model"],
    "sglang": ["sglang.launch_server", "--context-length", "9216", "--model-path"],
    "fusion_moe": ["fusion_moe.cli", "serve"],
}
# requests that are refused
_MALFORMED: tuple[dict[str, Any] | bytes, ...] = (
    b"{",
    b"\xff",
    {"prompt": "a", "max_tokens": -1},
    {"prompt": "a " * 200_000},
    {"prompt": "a", "temperature": "warm"},
)
# SGLang does not look at them: they are addresses beyond its table
_NO_IDS: tuple[dict[str, Any], ...] = ({"prompt": [10**9]}, {"prompt": [-1]})


class Server:
    """A running server of one model. engine: of SERVERS."""

    def __init__(self, engine: str, model: Path, port: int, *options: str):
        self.engine, self.model, self.port = engine, model, port
        self.vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        self.malformed = _MALFORMED if engine == "sglang" else _MALFORMED + _NO_IDS
        command = [sys.executable, "-m", *SERVERS[engine], str(model), "--port", str(port)]
        command += options
        socket.create_server(("127.0.0.1", port)).close()  # OSError: another server has it
        self.log = tempfile.NamedTemporaryFile(suffix=".log", delete=False)  # noqa: SIM115
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise
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
        with suppress(ProcessLookupError):  # it ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def memory_mib(self) -> tuple[int, int]:
        """Of the GPUs, and of the host's that the server's processes do not share."""
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said, host = "", 0
        with suppress(OSError):  # where there is no GPU
            said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
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
            body = json.dumps({"model": str(self.model)} | self._known(body)).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=_ANSWER_S)

    def _known(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request without what `fusion-moe serve` does not have."""
        none = ("ignore_eos", "logprobs") if self.engine == "fusion_moe" else ()
        return {name: value for name, value in body.items() if name not in none}

    def leave(self, prompt: Prompt) -> None:
        """Asks for a long answer, and hangs up after its first bytes."""
        asked = {"prompt": prompt, "max_tokens": 4096, "stream": True, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"model": str(self.model)} | self._known(asked)),
            {"Content-Type": "application/json"},
        )
        connection.getresponse().read(64)
        connection.close()

    def gap(self, prompt: Prompt) -> float:
        """The longest time in seconds between two tokens of a streamed answer of 64."""
        asked = {"prompt": prompt, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
        with self._opened(asked) as answer:
            times = [time.monotonic() for line in answer if line.startswith(b"data: {")]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def greedy(self, prompt: Prompt) -> Answer:
        """The answer of 64 tokens; its text alone, where there are no log-probabilities."""
        asked = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "logprobs": 0}
        (choice,) = self.post(asked | {"ignore_eos": True})["choices"]
        if self.engine == "fusion_moe":
            return [(word, 0.0) for word in choice["text"].split()]
        said = choice["logprobs"]
        return list(zip(said["tokens"], said["token_logprobs"], strict=True))

    def draw(self, drawn: random.Random, longest: int) -> Prompt:
        """A random prompt; of `fusion-moe serve` a text."""
        n = drawn.randrange(min(50, longest), longest + 1)
        ids = [drawn.randrange(10, self.vocabulary) for _ in range(n)]
        if self.engine != "fusion_moe":
            return ids
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.model / "tokenizer.json")).decode(ids)


@contextmanager
def serving(engine: str, model: Path, port: int, *options: str) -> Iterator[Server]:
    """A server, until the end of the block."""
    server = Server(engine, model, port, *options)
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
    server: Server,
    clients: int,
    seconds: float,
    keep: Callable[[dict[str, Any]], object] = print,
    prompts: int = 48,
    longest: int = 1600,
) -> tuple[dict[str, Any], list[Prompt], list[Answer]]:
    """Clients that ask until the time is over, some of which hang up; `keep` is given what happened
    so far every 20 s. Returns what happened to malformed requests, requests that failed, the
    longest wait for an answer and between two tokens, the growth of memory, how many answers are
    those to single requests, bit for bit, before and once more after it, and how far others are
    from them; prompts, and the answers to single requests.
    """
    drawn = random.Random(0)
    asked = [server.draw(drawn, longest) for _ in range(prompts)]
    alone = [server.greedy(prompt) for prompt in asked]
    until, before = time.monotonic() + seconds, server.memory_mib()

    happened, far, waits, gaps = Counter[str](), list[float](), list[float](), list[float]()
    same, host = list[bool](), list[int]()

    def ask(own: random.Random) -> None:
        i, kind = own.randrange(prompts), own.random()
        if kind < 0.05:
            happened[_refused(server, own.choice(server.malformed))] += 1
        elif kind < 0.1:
            server.leave(asked[i])
            happened["left"] += 1
        elif kind < 0.2:
            gaps.append(server.gap(asked[i]))
        else:
            begun = time.monotonic()
            answer = server.greedy(asked[i])
            same.append(answer == alone[i])
            far.append(apart(answer, alone[i]))
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
        now = server.memory_mib()
        host.append(now[1])
        return {
            "seconds": round(seconds - max(until - time.monotonic(), 0)),
            "clients": clients,
            "malformed": dict(happened),
            "answers": len(far),
            "as alone": sum(same),
            "most apart": max(far, default=0.0),
            "longest_wait_s": max(waits, default=0.0),
            "longest_gap_s": max(gaps, default=0.0),
            "grown_mib": [a - b for a, b in zip(now, before, strict=True)],
            "host_mib": [before[1], *host],
        }

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, seed) for seed in range(clients)]
        try:
            while wait(running, timeout=_SHOW_S).not_done:
                keep(so_far())
        finally:
            until = 0.0  # clients end, also if this process shall
    spread = statistics.quantiles(far or [0.0], n=1000, method="inclusive")
    again = sum(server.greedy(p) == answer for p, answer in zip(asked, alone, strict=True))
    found = so_far() | {"single again": again, "apart": spread}
    keep(found)
    return found, asked, alone


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
    for (token, probability), (wanted, expected) in zip(found, alone, strict=False):
        largest = max(largest, abs(probability - expected))
        if token != wanted:
            break
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=SERVERS)
    parser.add_argument("model", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--prompts", type=int, default=48, help="how many; default: %(default)s")
    parser.add_argument("--longest", type=int, default=1600, help="tokens of a prompt")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the server")
    # argparse ends at a "--", which `fusion-moe serve` has before options of transformers
    at = [*sys.argv, "--options"].index("--options")
    given, options = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the server ends
    with serving(given.engine, given.model, given.port, *options) as server:

        def keep(found: dict[str, Any]) -> None:
            log = Path(server.log.name).read_text(errors="replace")
            found |= {"start_s": server.start_s, "tracebacks": log.count("Traceback")}
            given.out.write_text(json.dumps(found | {"alive": server.process.poll() is None}))
            print({name: value for name, value in found.items() if name != "apart"}, flush=True)

        keep({})
        soak(server, given.clients, given.seconds, keep, given.prompts, given.longest)


if __name__ == "__main__":
    main()
