"""Runs a Python program as if there were one CUDA device of a compute capability, so that the real
nvFuser compiles for it, or an engine starts on it.

    python tools/pretended_gpu 10.0 program.py arguments ...
    python tools/pretended_gpu --log FILE --headers FOLDER 9.0 program.py arguments ...

torch and NVML see a device whose memory is the host's and whose kernels do nothing. All that comes
before a kernel is real: nvFuser's segmenter, schedulers and code generator, NVRTC, which compiles
to machine code for that device, and the host code of CUTLASS; graphs are captured, and a replay
does nothing. So it shows that a definition compiles and is launched, and never its numbers. Needs
x86-64 Linux, a C compiler, and a torch for CUDA.

--log: a file to which each compilation and each launch adds a line: "compiled sm_100a", "kernel
NAME", "library NAME". --headers: CUDA headers in place of those in /usr/local/cuda/include, where
nvFuser looks for what sorts need.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCES = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".c", ".h"))
_HEADERS = "triton", "nvidia"  # packages that say which CUDA torch is built for
CACHE = Path(os.environ.get("FUSION_MOE_CACHE_DIR") or Path.home() / ".cache" / "fusion_moe")


def main() -> None:
    parser = argparse.ArgumentParser(prog="pretended_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path)
    parser.add_argument("--headers", type=Path)
    parser.add_argument("capability", help="10.0, 9.0")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if (
        asked.capability.count(".") != 1
        or not asked.capability.replace(".", "").isdigit()
        or not asked.program
    ):
        parser.error("a compute capability, as in 10.0, and a program")
    os.execve(
        sys.executable, [sys.executable, *asked.program], {**os.environ, **environment(asked)}
    )


def environment(asked: argparse.Namespace) -> dict[str, str]:
    """What the program needs to see the device. Memory is not cached, so that all of it is zeros
    when it is new; and vLLM has the runner that does not ask the device how many tokens it made.
    """
    built = library()

    def before(name: str, path: Path) -> str:
        return ":".join(filter(None, [str(path), os.environ.get(name)]))

    found = {
        "LD_PRELOAD": before("LD_PRELOAD", built),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", built.parent),
        "TRITON_LIBCUDA_PATH": str(built.parent),
        "PRETENDED_NVRTC": str(nvrtc()),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    chosen = {
        "PRETENDED_CAPABILITY": asked.capability,
        "PRETENDED_LOG": asked.log,
        "PRETENDED_HEADERS": asked.headers,
    }
    return found | {name: str(value) for name, value in chosen.items() if value}


def library() -> Path:
    """All of the device as one library, under the names of the driver and of NVML; built when its
    sources or the headers have changed.
    """
    headers = cuda_headers()
    digest = hashlib.sha256(
        b"".join([str(headers).encode(), *(p.read_bytes() for p in SOURCES)])
    ).hexdigest()[:16]
    built = CACHE / "pretended_gpu" / digest / "libcuda.so.1"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            made = Path(folder) / built.name
            sources = [p for p in SOURCES if p.suffix == ".c"]
            flags = [
                "-std=gnu11",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{built.name}",
                "-isystem",
                headers,
            ]
            subprocess.run(
                [os.environ.get("CC", "cc"), *flags, "-o", made, *sources, "-ldl", "-lpthread"],
                check=True,
            )
            made.replace(built)
    nvml = built.with_name("libnvidia-ml.so.1")
    with contextlib.suppress(FileExistsError):
        nvml.symlink_to(built.name)
    return built


def cuda_headers() -> Path:
    """Of the CUDA that torch is built for, since structures must have its sizes: those of triton,
    which torch brings; beside a torch for CUDA 13, whose triton may have older ones, the toolkit's.
    """
    triton, nvidia = (getattr(find_spec(n), "submodule_search_locations", []) for n in _HEADERS)
    folder = Path(next(iter(triton), ""), "backends", "nvidia", "include")
    if any(Path(where, "cu13").exists() for where in nvidia):
        folder = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "include")
    if not (folder / "cuda_runtime_api.h").exists():
        sys.exit(
            "pretended_gpu: no CUDA headers; expected those of triton, beside a torch that "
            "is built for CUDA; for CUDA 13, those of CUDA_HOME"
        )
    return folder


def nvrtc() -> Path:
    """The NVRTC that nvFuser's wheel brings, else torch's."""
    for package in "nvfuser", "nvidia-cuda-nvrtc":
        for wheel in importlib.metadata.distributions():
            for file in (wheel.files or ()) if wheel.name.startswith(package) else ():
                if re.match(r"libnvrtc(-(?!builtins)|\.so)", file.name):
                    return Path(str(wheel.locate_file(file)))
    sys.exit("pretended_gpu: neither nvFuser nor a torch for CUDA is installed")


if __name__ == "__main__":
    main()
