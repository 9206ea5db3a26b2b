"""Starts workers, reads their journals, goes on after a crash, and tells what was found, each kind
of fault once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .journal import kind, lines

ROOT = Path(__file__).resolve().parents[2]
HANGS = {  # seconds without a line
    "evaluate": 120,
    "traced": 180,
    "cxx": 300,
    "sanitize": 600,
    "hostile": 600,
    "files": 120,
    "states": 120,
    "inductor": 400,
}
LEVELS = tuple(HANGS)


@dataclass
class Result:
    """graphs: how many were run; regions: programs run in C++; faults: kind -> what was found, by
    seed.
    """

    graphs: int = 0
    regions: int = 0
    seconds: float = 0.0
    faults: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, fault: dict[str, Any]) -> bool:
        """Notes a fault; whether it is the first of its kind."""
        same = self.faults.setdefault(kind(fault["wrong"]), [])
        same.append(fault)
        return len(same) == 1


def fuzz(level: str, seed: int, graphs: int, seconds: float, tell: Any = print) -> Result:
    """Runs graphs of the seeds from `seed` on, until they are done or the time is over."""
    result, start, at = Result(), time.monotonic(), seed
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        while at < seed + graphs and time.monotonic() - start < seconds:
            at = _one_worker(level, at, seed + graphs, start + seconds, Path(folder), result, tell)
    result.seconds = time.monotonic() - start
    return result


def _one_worker(
    level: str, first: int, last: int, until: float, folder: Path, result: Result, tell: Any
) -> int:
    """One worker until it is done, dies, hangs or the time is over. -> the seed to go on with."""
    journal, errors = folder / f"{first}.jsonl", folder / f"{first}.txt"
    journal.touch()
    with errors.open("w") as stderr:
        command = [
            sys.executable,
            "-m",
            "tests.fuzz.work",
            level,
            str(first),
            str(last),
            str(journal),
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(level, folder), stdout=stderr, stderr=stderr
        )
        last_line = _follow(process, journal, level, until, result, tell)
    if last_line.get("done") or "over" in last_line:
        return last
    if "at" not in last_line:
        raise RuntimeError(
            f"the worker does not start:\n{errors.read_text(errors='replace')[-2000:]}"
        )
    at = int(last_line["at"])
    how = "hangs" if "hangs" in last_line else f"crashes (exit status {process.returncode})"
    told = "\n".join(errors.read_text(errors="replace").splitlines()[-60:])
    fault = {
        "seed": at,
        "wrong": f"{how}: {_headline(told)}",
        "repro": f"{json.dumps(last_line)}\n{told}",
    }
    if result.add(fault):
        tell(_told(fault))
    return at + 1


def _follow(
    process: Any, journal: Path, level: str, until: float, result: Result, tell: Any
) -> dict[str, Any]:
    """Reads the journal while the worker runs. -> what it was at when it ended, or {"over"} if the
    time is.
    """
    at: dict[str, Any] = {}
    heard = time.monotonic()
    with journal.open() as file:
        while True:
            over = process.poll() is not None
            for line in lines(file):
                heard = time.monotonic()
                if "wrong" in line:
                    if result.add(line):
                        tell(_told(line))
                elif "at" in line or "done" in line:
                    result.graphs += "at" in line and "program" not in line
                    at = line
                result.regions += "ran" in line
            if over:
                return at
            if time.monotonic() > until or time.monotonic() - heard > HANGS[level]:
                process.kill()
                process.wait()
                return {**at, "over" if time.monotonic() > until else "hangs": True}
            time.sleep(0.2)


def _environment(level: str, folder: Path) -> dict[str, str]:
    """Caches of their own, which go with the run; libasan for the sanitized level."""
    kept = os.environ.get("FUSION_MOE_CACHE_DIR", str(folder / "cache"))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "translators"), os.environ.get("PYTHONPATH", "")]
        ),
        "FUSION_MOE_CACHE_DIR": kept,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "OMP_NUM_THREADS": "1",
    }
    if level in ("sanitize", "hostile"):
        # the first wants to see what throws exceptions
        preloaded = " ".join(map(_library, ("libasan.so", "libstdc++.so")))
        environment |= {
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
        }
    return environment


def _library(name: str) -> str:
    """The file of one of the compiler's libraries."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return str(Path(found.stdout.strip()).resolve())


def _headline(told: str) -> str:
    marks = ("ERROR: AddressSanitizer", "runtime error", "Error")
    return next(
        (line for mark in marks for line in told.splitlines() if mark in line), told.strip()[-200:]
    )


def _told(fault: dict[str, Any]) -> str:
    return f"--- seed {fault['seed']}: {fault['wrong']}\n{_short(fault['repro'])}\n"


def _short(text: str) -> str:
    return "\n".join(
        line if len(line) < 400 else f"{line[:300]} ... {line[-60:]}" for line in text.splitlines()
    )
