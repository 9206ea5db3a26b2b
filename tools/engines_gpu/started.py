"""Starts an engine and a server of it from the pieces of pack.py and the packages of this Python
alone, on small models: a file that does not travel is found here, not on the GPU machine.

    BARE/bin/python tools/engines_gpu/started.py sglang PIECES SITE --pretend   # without a GPU
    python tools/engines_gpu/started.py sglang PIECES SITE                      # there

BARE has what the GPU machine has: its Python, torch, torchvision and transformers. SITE is written
anew; its folder `caches` gets what is compiled. Prints a line for each start, and the end of the
log of one that failed, with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import models
import pack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROMPTS = [[5, 6, 7, 8], [9, 10]]
# small ones: the host's memory is the pretended GPU's
MODELS = {"nvfp4": {"num_experts": 16}, "mxfp4": {"num_local_experts": 8}}
_SERVER = ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
_SERVER += ["--max-total-tokens", "4096", "--mem-fraction-static", "0.5"]
_SERVER += ["--quantization", "fusion_moe", "--cuda-graph-max-bs-decode", "2"]
_SERVER += ["--cuda-graph-max-bs-prefill", "16", "--grammar-backend", "none"]
_ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "context_length": 512,
    "mem_fraction_static": 0.5,
    "cuda_graph_max_bs_decode": 2,
    "cuda_graph_max_bs_prefill": 16,
}


def environment(site: Path) -> dict[str, str]:
    """Of a process that imports from site, this tree and its Python alone."""
    caches = site / "caches"
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "PYTHONPATH": f"{site}:{ROOT}:{ROOT / 'translators'}",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        # where nvcc and libcudart are that compile SGLang's modules
        "CUDA_HOME": os.environ.get("CUDA_HOME") or "/usr/local/cuda",
        "FUSION_MOE_CACHE_DIR": str(caches / "fusion_moe"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "SGLANG_JIT_CACHE_DIR": str(caches / "jit"),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # its other tree is built for a newer torch
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }


def starts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Names and programs, of which each makes an engine that answers."""
    engine = str(ROOT / "tests" / "integrations" / "sglang" / "engine.py")
    for name, sizes in MODELS.items():
        made = models.make(folder, name, 2, vocab_size=4096, **sizes)
        yield f"engine, {name}", [engine, str(made), json.dumps(PROMPTS), json.dumps(_ENGINE)]
    soak = [str(HERE / "server.py"), "sglang", str(folder / "nvfp4"), "5", "--clients", "2"]
    soak += ["--prompts", "2", "--longest", "20", "--out", str(folder / "server.json")]
    yield "server", [*soak, "--options", *_SERVER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=["sglang"])
    parser.add_argument("pieces", type=Path)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pretend", action="store_true", help="a GPU that is not there")
    asked = parser.parse_args()
    shutil.rmtree(asked.site, ignore_errors=True)
    pack.unpack(asked.pieces, asked.site)
    pretended = [str(ROOT / "tools" / "pretended_gpu"), "9.0"] if asked.pretend else []
    failed = False
    for name, program in starts(asked.site / "models"):
        begun, log = time.monotonic(), asked.site / f"{name.replace(', ', '-')}.log"
        with log.open("w") as out:
            code = subprocess.run(
                [sys.executable, *pretended, *program],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(asked.site),
            ).returncode
        print(f"{name}: exit status {code}, {time.monotonic() - begun:.0f} s", flush=True)
        if code:
            failed = True
            print(log.read_text(errors="replace")[-3000:], flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
