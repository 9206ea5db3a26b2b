"""Builds on threads of their own: once at a time, under the options of who started them, and never
in the way of the exit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from fusion_moe import options
from fusion_moe.errors import BuildError
from fusion_moe.runtime import background, build
from fusion_moe.runtime.precompile import Build

SECONDS = 300
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def wait(started: background.Started) -> None:
    end = time.monotonic() + SECONDS
    while not started.done and time.monotonic() < end:
        time.sleep(0.01)
    assert started.done


@pytest.mark.compiler
def test_a_library_is_compiled_while_others_go_on(tmp_path):
    """Into the cache of the options in force at the start."""
    go, source = threading.Event(), build.LibrarySource("int one();", "one", "generic")
    with options.override(cache_dir=str(tmp_path)):
        started = background.start([("library", lambda: (go.wait(SECONDS), build.build(source)))])
    assert not started.done
    go.set()
    wait(started)
    started.check()
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".so"]


def test_equal_work_is_done_once_at_a_time():
    go, done = threading.Event(), list[int]()
    builds = [("key", lambda: (go.wait(SECONDS), done.append(1)))]
    both = background.start(builds), background.start(builds)
    go.set()
    for started in both:
        wait(started)
    assert done == [1]
    wait(background.start(builds))
    assert done == [1, 1]


def test_an_error_is_kept_for_who_asks():
    def fails() -> None:
        raise BuildError("no")

    started = background.start([("fine", lambda: 0), ("fails", fails)])
    wait(started)
    with pytest.raises(BuildError, match="no"):
        started.check()


@forks
def test_a_child_begins_anew():
    """It has none of the threads that its parent started, and waits for none of their work."""
    go = threading.Event()
    started = background.start([(i, lambda: go.wait(SECONDS)) for i in range(9)])
    child = os.fork()
    if child == 0:
        done = threading.Event()
        background.start([(0, done.set)])
        os._exit(0 if done.wait(SECONDS) else 1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    wait(started)


def ended() -> bool:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not any("compile ahead" in thread.name for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def test_what_may_be_needed_is_built_ahead(caplog):
    """On other threads, what makes the list too; an error is nobody's until it is asked for, but
    for a warning.
    """
    done, threads = threading.Event(), set[int]()

    def builds() -> list[Build]:
        threads.add(threading.get_ident())
        return [("fails", lambda: 1 / 0), ("fine", done.set)]

    background.ahead(builds)
    assert done.wait(SECONDS)
    assert threading.get_ident() not in threads
    assert ended()
    (said,) = caplog.messages
    assert said == (
        "a kernel was not compiled ahead (ZeroDivisionError: division by zero); the call that "
        "needs it compiles it"
    )


def test_a_list_that_cannot_be_made_is_a_warning_too(caplog):
    def builds() -> list[Build]:
        raise BuildError("no list")

    background.ahead(builds)
    assert ended()
    (said,) = caplog.messages
    assert "(BuildError: no list" in said


# Programs that end while work is under way, and what they print.
ENDING = {
    "started": """
def work():
    time.sleep(0.2); print("ends", flush=True)
background.start([(i, work) for i in range(3)])
""",
    "may be needed": """
def work():
    time.sleep(0.2); print("ends", flush=True)
background.ahead(lambda: [(i, work) for i in range(1000)])
time.sleep(0.1)
""",
    # also from a daemon, as a thread of autograd that runs a backward pass is to Python
    "has begun": """
begun = threading.Event()
def work():
    begun.set(); time.sleep(0.3); print("ends", flush=True)
call = lambda: background.ahead(lambda: [(0, work)])
threading.Thread(target=call, daemon=True).start()
begun.wait()
""",
}
# Each in a child of one process: to import torch takes longer than all of them.
EACH = """
import json, os, sys, threading, time
from fusion_moe.runtime import background
given = json.load(sys.stdin)
for name, program in given.items():
    child = os.fork()
    if child == 0:
        for stream, number in ("out", 1), ("err", 2):
            os.dup2(os.open(f"{sys.argv[1]}/{name}.{stream}", os.O_WRONLY | os.O_CREAT), number)
        exec(program, globals())
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """stdout and stderr of each of them."""
    folder = tmp_path_factory.mktemp("ending")
    command = [sys.executable, "-c", EACH, str(folder)]
    subprocess.run(command, input=json.dumps(ENDING), text=True, timeout=SECONDS, check=True)
    return {
        name: tuple((folder / f"{name}.{stream}").read_text() for stream in ("out", "err"))
        for name in ENDING
    }


@forks
def test_the_exit_waits_for_what_was_started(printed):
    out, err = printed["started"]
    assert out.split() == ["ends"] * 3
    assert not err


@forks
def test_the_exit_waits_for_none_that_may_be_needed(printed):
    out, err = printed["may be needed"]
    assert set(out.split()) <= {"ends"}
    assert len(out.split()) < 500
    assert not err


@forks
def test_the_exit_waits_for_what_has_begun(printed):
    assert printed["has begun"] == ("ends\n", "")
