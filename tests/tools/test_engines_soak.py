"""tools/engines_gpu/server.py: what a soak counts, with a server that is not there."""

from __future__ import annotations

import importlib.util
import random
import threading
import urllib.error
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "engines_gpu" / "server.py"


@pytest.fixture(scope="module")
def server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engines_server", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Wrong:
    """Answers as a server that has clients answers the prompt [1] by other bits, [2] never."""

    malformed = (b"{", b"[")

    def __init__(self) -> None:
        self.drawn = 0
        self.asked = threading.local()
        self.first = threading.get_ident()

    def draw(self, drawn: random.Random, longest: int) -> list[int]:
        self.drawn += 1
        return [self.drawn]

    def greedy(self, prompt: list[int]) -> list[tuple[str, float]]:
        busy = threading.get_ident() != self.first
        if busy and prompt == [2]:
            raise ConnectionResetError("gone")
        return [("a", -1.0), ("b", -2.5 if busy and prompt == [1] else -2.0)]

    def post(self, body: bytes) -> Any:
        if body == b"{":
            raise urllib.error.HTTPError("", 400, "", Message(), None)

    def leave(self, prompt: list[int]) -> None: ...

    def gap(self, prompt: list[int]) -> float:
        return 0.25

    def memory_mib(self) -> tuple[int, int]:
        return 7, 9


def test_a_soak_counts_what_is_wrong(server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with other bits, requests that fail, and malformed ones that are answered; the others
    go on. Time passes with each question.
    """
    ticks = iter(range(10**9))
    monkeypatch.setattr(server.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(server.time, "sleep", lambda _: None)
    kept: list[dict[str, Any]] = []
    found, prompts, alone = server.soak(Wrong(), 1, 2000, kept.append, prompts=3, longest=5)
    assert prompts == [[1], [2], [3]]
    assert alone == [[("a", -1.0), ("b", -2.0)]] * 3
    assert 0 < found["as alone"] < found["answers"]
    assert found["most apart"] == 0.5
    assert found["longest_gap_s"] == 0.25
    assert found["single again"] == 3
    assert found["grown_mib"] == [0, 0]
    assert set(found["malformed"]) == {
        "left",
        "refused with 400",
        "malformed, and answered",
        "failed: ConnectionResetError('gone')",
    }
    assert kept[-1] == found


def test_a_soak_that_is_ended(server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients end, whatever time they were given."""
    monkeypatch.setattr(server, "_SHOW_S", 0)
    monkeypatch.setattr(server.time, "sleep", lambda _: None)

    def end(found: dict[str, Any]) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        server.soak(Wrong(), 2, 1e9, end, prompts=3, longest=5)
