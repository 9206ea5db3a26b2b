"""benchmarks/side_by_side.py: who is measured is alone, and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import side_by_side
from side_by_side import in_turns

pytestmark = pytest.mark.once
BENCHMARKS = Path(side_by_side.__file__).parent


def child(after: str = "", before: str = "") -> list[str]:
    """Writes to a file of its own name when it is there, and when it was measured."""
    text = f"""
        import sys, time
        from pathlib import Path
        sys.path.append({str(BENCHMARKS)!r})
        from side_by_side import ready
        out, name = Path(sys.argv[1]), sys.argv[2]
        (out / "pid").open("a").write(f"{{__import__('os').getpid()}}\\n")
        {before}
        (out / "order").open("a").write(f"ready {{name}}\\n")
        ready()
        (out / "order").open("a").write(f"measures {{name}}\\n")
        {after}
        (out / "order").open("a").write(f"measured {{name}}\\n")
    """
    return [sys.executable, "-c", textwrap.dedent(text)]


def named(out: Path, **calls: list[str]) -> dict[str, list[str]]:
    return {name: [*call, str(out), name] for name, call in calls.items()}


def is_left(pid: int) -> bool:
    """Whether a process is there and no zombie, which a parent of its own has to wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(out: Path) -> list[int]:
    return [int(line) for line in (out / "pid").read_text().split()]


def test_all_get_ready_then_one_at_a_time(tmp_path):
    never = child(before="time.sleep(10**6)")
    raises = child(after='sys.exit("no such kernel\\n")')
    calls = named(
        tmp_path, a=child(), b=raises, c=child(before='sys.exit("no library")'), d=child()
    )
    want = {"a": "", "b": "no such kernel", "c": "no library", "d": ""}
    assert dict(in_turns(calls, tmp_path, 10**6)) == want
    order = (tmp_path / "order").read_text().splitlines()
    assert sorted(order[:3]) == ["ready a", "ready b", "ready d"]
    assert order[3:] == [
        *("measures a", "measured a", "measures b", "measures d", "measured d"),
    ]
    assert dict(in_turns(named(tmp_path, a=never), tmp_path, 0)) == {"a": "not ready in 0 s"}


def test_one_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """Nor does it keep those after it."""
    wait = subprocess.Popen.wait

    def shorter(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        return wait(process, 0.1 if timeout and process.args[-1] == "a" else timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", shorter)
    calls = named(tmp_path, a=child(after="time.sleep(10**6)"), b=child())
    assert [*in_turns(calls, tmp_path, 99999)] == [("a", "not measured in 99999 s"), ("b", "")]
    assert not any(map(is_left, pids(tmp_path)))


def test_nobody_is_left_when_the_caller_stops(tmp_path):
    found = in_turns(named(tmp_path, a=child(), b=child(), c=child()), tmp_path, 10**6)
    assert next(found) == ("a", "")
    assert sum(map(is_left, pids(tmp_path))) == 2
    found.close()
    assert not any(map(is_left, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_when_the_process_ends(number, tmp_path):
    """By Ctrl-C, or killed."""
    calls = named(tmp_path, a=child(), b=child(after="time.sleep(10**6)"), c=child())
    text = f"""
        import signal, sys
        from pathlib import Path
        sys.path.append({str(BENCHMARKS)!r})
        from side_by_side import in_turns
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        for name, _ in in_turns({calls!r}, Path({str(tmp_path)!r}), 10**6):
            print(name, flush=True)
    """
    call = [sys.executable, "-c", textwrap.dedent(text)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"a\n"
        assert sum(map(is_left, pids(tmp_path))) == 2
        os.kill(process.pid, number)
        process.wait()
    while any(map(is_left, pids(tmp_path))):  # the kernel ends them, soon
        time.sleep(0.01)
