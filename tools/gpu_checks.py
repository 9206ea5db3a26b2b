"""What needs GPUs before a release, each check on a GPU of its own, as many at once as there are.

    python tools/gpu_checks.py FOLDER [--only NAME ...] [--minutes 60]
    python tools/gpu_checks.py --list

Writes FOLDER/NAME.log for each check, and a line once it ends: its exit status, seconds, and the
last line that it printed. Those of several GPUs come last and have all of them. A check that is not
done after its own minutes, or after --minutes, is killed.

Tests have no clock; benchmarks have, and run beside tests on other GPUs of the same host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from fusion_moe.integrations.distributed.symmetric import NO_MULTICAST

_PYTEST = "-m pytest -q -p no:cacheprovider --all"
_PARALLEL = f"{_PYTEST} -n 10 --dist worksteal"
_SANITIZED = "tests/gpu/test_cuda_sanitized.py"
_FEW_THREADS = ("OMP_NUM_THREADS", "4")


@dataclass(frozen=True)
class Check:
    """A command of this Python, in the root of the checkout. all_gpus: not on one of them alone."""

    name: str
    minutes: float
    command: str
    environment: tuple[tuple[str, str], ...] = ()
    all_gpus: bool = False


def _lane(capability: str, minutes: float, tests: str, name: str = "as") -> Check:
    """Tests with the kernels of another GPU."""
    environment = (("FUSION_MOE_CUDA_ARCH", capability), _FEW_THREADS)
    return Check(f"{name}-{capability}", minutes, f"{_PARALLEL} -m gpu {tests}", environment)


# Those that take longest come first.
CHECKS = (
    Check(
        "tests",
        40,
        f"{_PARALLEL} -m gpu tests/gpu tests/integrations/thunder --ignore={_SANITIZED}",
        (_FEW_THREADS,),
    ),
    Check("sanitized", 20, f"{_PARALLEL} -m gpu {_SANITIZED}", (_FEW_THREADS,)),
    _lane("8.0", 10, f"-k 'memcheck or racecheck' {_SANITIZED}", "sanitized"),
    _lane("8.0", 20, "tests/gpu/test_cuda_kernels.py tests/gpu/test_cuda_training.py"),
    Check("launches", 5, f"{_PYTEST} -m gpu tests/gpu/test_cuda_native.py tests/gpu/test_cuda.py"),
    Check("arch", 4, f"{_PYTEST} -m gpu tests/gpu/test_cuda_arch.py"),
    Check("exchange", 3, f"{_PYTEST} -m gpu tests/gpu/test_cuda_exchange.py"),
    Check(
        "offload",
        6,
        f"{_PYTEST} -m gpu tests/gpu/test_cuda_offload.py tests/gpu/test_cuda_offload_model.py",
    ),
    Check("record", 4, f"{_PYTEST} -m gpu tests/gpu/test_cuda_record.py"),
    _lane("8.9", 6, "tests/gpu/test_cuda_fp8.py"),
    Check("overhead", 2, "benchmarks/call_overhead.py --device cuda"),
    Check("ampere", 8, "benchmarks/ampere_moe.py --out {out}/ampere"),
    Check("training-fp8", 5, "benchmarks/h200_training.py --recipe fp8 --out {out}/fp8.jsonl"),
    Check(
        "training-8.0",
        8,
        "benchmarks/h200_training.py --contender fusion_moe liger --out {out}/training80.jsonl",
        (("FUSION_MOE_CUDA_ARCH", "8.0"), ("TRITON_OVERRIDE_ARCH", "sm80")),
    ),
    Check("offload-times", 8, "benchmarks/offload.py --seconds 420 --json {out}/offload.json"),
    Check(
        "record-times",
        4,
        "benchmarks/record_overhead.py --config qwen3-30b --layers 4 --device cuda",
    ),
    Check("bench", 5, "-m fusion_moe.cli bench --config qwen3-30b --layers 4"),
    Check("row-order", 3, "benchmarks/invariant.py --bits nvfp4 mxfp4"),
    Check(
        "ranks", 12, f'{_PYTEST} -m "gpu and multi" tests/integrations/distributed', all_gpus=True
    ),
    Check(
        "ranks-times",
        8,
        "benchmarks/h100_parallel.py --seconds 420 --out {out}/parallel.jsonl",
        all_gpus=True,
    ),
)


def run(check: Check, out: Path, gpus: list[int], end: float) -> None:
    """Runs a check to its end or its limit, and prints its line."""
    if time.monotonic() > end:
        return
    command = [sys.executable, *shlex.split(check.command.format(out=out))]
    environment = {
        **os.environ,
        **NO_MULTICAST,
        **dict(check.environment),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        "PYTHONUNBUFFERED": "1",
    }
    log, begin = out / f"{check.name}.log", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = str(process.wait(min(60 * check.minutes, end - begin)))
        except subprocess.TimeoutExpired:
            status = "killed"
            process.send_signal(signal.SIGINT)  # pytest says what failed until then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        finally:  # its workers too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    last = [line for line in log.read_text(errors="replace").split("\n") if line][-1:]
    print(f"{check.name:14} {status:>6} {time.monotonic() - begin:5.0f} s  ", *last, flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", metavar="FOLDER", nargs="?", type=Path)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=[c.name for c in CHECKS])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [c for c in CHECKS if not arguments.only or c.name in arguments.only]
    if arguments.list or arguments.out is None:
        for check in chosen:
            print(f"{check.name:14} {check.minutes:3.0f} min  {check.command}")
        return
    count = torch.cuda.device_count()
    if not count:
        sys.exit("no GPU found by torch")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    free = SimpleQueue[int]()
    for gpu in range(count):
        free.put(gpu)

    def when_free(check: Check) -> None:
        gpu = free.get()
        try:
            run(check, arguments.out, [gpu], end)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(when_free, (c for c in chosen if not c.all_gpus)))
    for check in chosen:
        if check.all_gpus and count > 1:
            run(check, arguments.out, list(range(count)), end)


if __name__ == "__main__":
    main()
