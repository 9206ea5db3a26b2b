"""Starts an engine and a server of it from the pieces of pack.py and the packages of this Python
alone, on small models: a file that does not travel is found here, not on the GPU machine.

1   python tools/engines_gpu/pack.py pack FOLDER sglang==0.5.23 --installed FILE --mb 30
2   BARE/bin/python tools/engines_gpu/started.py sglang FOLDER/pieces SITE --pretend --keep
3   python tools/engines_gpu/started.py sglang PIECES SITE
4   python tools/engines_gpu/started.py sglang PIECES SITE --run server.py sglang SITE/models/nvfp4
        60 --clients 64 --out FILE.json --options --quantization fusion_moe
        --attention-backend triton --sampling-backend pytorch --grammar-backend none
        --cuda-graph-max-bs-decode 64 --cuda-graph-max-bs-prefill 512

1 and 2 are for a machine without a GPU. BARE has what the GPU machine has: its Python, torch,
torchvision and transformers. --keep adds pieces of what was compiled, which else takes minutes.
Then calls of the GPU machine bring the pieces, one each if they may not be larger; the next is 3,
whose models have all experts and eight layers, the last one 4, with clients. Of vLLM there is --run
alone.

SITE is written unless it is there; its folder `caches` has what is compiled. Prints a line for each
start, and the end of the log of one that failed, with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import models
import pack

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROMPTS = [[5, 6, 7, 8], [9, 10]]
# models of a pretended GPU, whose memory is the host's; whole ones have the sizes of their names
SMALL = {
    "nvfp4": {"layers": 2, "vocab_size": 4096, "num_experts": 16},
    "mxfp4": {"layers": 2, "vocab_size": 4096, "num_local_experts": 8},
}
WHOLE = {name: {"layers": 8} for name in SMALL}
# what needs no package that does not travel
OPTIONS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.5,
    "cuda_graph_max_bs_decode": 2,
    "cuda_graph_max_bs_prefill": 16,
}
# of the machine alone, or made again in no time
_NOT_KEPT = re.compile(r"/pretended_gpu|/triton/.*\.so$|\.(lock|tmp)$")


def environment(site: Path) -> dict[str, str]:
    """Of a process that imports from site, this tree and its Python alone."""
    site = site.resolve()
    caches = site / "caches"
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "PYTHONPATH": f"{site}:{ROOT}:{ROOT / 'translators'}",
        "PYTHONNOUSERSITE": "1",
        # ninja is beside this Python
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
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


def starts(folder: Path, sizes: dict[str, dict[str, int]]) -> Iterator[tuple[str, list[str]]]:
    """Names and programs, of which each makes an engine that answers; sizes: of models."""
    engine = str(ROOT / "tests" / "integrations" / "sglang" / "engine.py")
    options = json.dumps(OPTIONS | {"context_length": 512})
    for name, of in sizes.items():
        made = models.make(folder, name, **of)
        yield f"engine-{name}", [engine, str(made), json.dumps(PROMPTS), options]
    soak = [str(HERE / "server.py"), "sglang", str(folder / "nvfp4"), "5", "--clients", "2"]
    soak += ["--prompts", "2", "--longest", "20", "--out", str(folder / "server.json")]
    flags = (("--" + name.replace("_", "-"), str(value)) for name, value in OPTIONS.items())
    yield "server", [*soak, "--options", "--quantization", "fusion_moe", *chain(*flags)]


def keep(caches: Path, pieces: Path) -> None:
    """Adds pieces of what was compiled, for machines with the same GPU and versions."""
    archive = pieces.parent / "caches.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(caches, "caches", filter=lambda of: None if _NOT_KEPT.search(of.name) else of)
    pack.split(archive, pieces, pack.PIECE_MB * 10**6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=list(pack.ENGINES))
    parser.add_argument("pieces", type=Path)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pretend", action="store_true", help="a GPU that is not there")
    parser.add_argument("--keep", action="store_true", help="add what was compiled to the pieces")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="this tool in place of all starts")
    asked = parser.parse_args()
    if asked.engine != "sglang" and not asked.run:
        parser.error(f"{asked.engine}: with --run alone")
    if not (asked.site / asked.engine).exists():
        pack.unpack(asked.pieces, asked.site)
    pretended = [str(ROOT / "tools" / "pretended_gpu"), "9.0"] if asked.pretend else []
    if asked.run:
        tool, *rest = asked.run
        command = [sys.executable, *pretended, str(HERE / tool), *rest]
        os.execve(sys.executable, command, environment(asked.site))
    failed = False
    for name, program in starts(asked.site / "models", SMALL if asked.pretend else WHOLE):
        begun, log = time.monotonic(), asked.site / f"{name}.log"
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
    if asked.keep:
        keep(asked.site / "caches", asked.pieces)
    sys.exit(failed)


if __name__ == "__main__":
    main()
