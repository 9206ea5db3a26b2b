"""Launches kept definitions on the device that there is, or that is pretended to be there, and
prints a line about each.

pytest --keep-definitions=FOLDER                                            # what the tests make
python tools/pretended_gpu --log LOG 10.0 \
    tests/integrations/nvfuser/launched.py FOLDER  # those for sm_100;
    with 9.0 those for sm_90

launched NAME              compiled, and all its kernels launched
compiled NAME              on 9.0: nvFuser's product loops over groups on the host, and stops at
                           ends that no pretended kernel wrote
needs headers NAME         sorts, and nvFuser would find no CUDA headers that fit:
                           tools/pretended_gpu --headers FOLDER
refused NAME: why          anything else; the exit status says that there was one
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.nvfuser import headers
from fusion_moe.integrations.nvfuser.definition import define
from fusion_moe.integrations.nvfuser.launch import launcher
from fusion_moe.ir.binding import storage_shape
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.text import parse, text
from fusion_moe.ir.types import DTYPES

UNWRITTEN = "split_with_sizes expects split_sizes to sum exactly"


def keep(fusion: Fusion, target: str, sizes: Mapping[str, int], folder: Path) -> Path:
    """Writes a definition for a target as a file; the same one for the same text, whatever its
    sizes.
    """
    name = f"{target}-{hashlib.sha256(text(fusion).encode()).hexdigest()[:12]}.json"
    (folder / name).write_text(
        json.dumps({"fusion": text(fusion), "sizes": {s: sizes[s] for s in fusion.symbols}})
    )
    return folder / name


def launch(path: Path) -> str:
    """What came of a kept definition: the words before its name, or "refused" and why."""
    kept = json.loads(path.read_text())
    fusion = parse(kept["fusion"])
    inputs = [
        torch.empty(storage_shape(v.type, kept["sizes"]), dtype=DTYPES[v.type.dtype], device="cuda")
        for v in fusion.inputs
    ]
    try:
        launcher(define(fusion), fusion)(*inputs, sizes=kept["sizes"])
    except UnsupportedError as error:
        return (
            "needs headers" if "nvFuser compiles sorts with" in str(error) else f"refused: {error}"
        )
    except RuntimeError as error:
        return "compiled" if UNWRITTEN in str(error) else f"refused: {error}"
    return "launched"


def main(folder: Path) -> int:
    if "PRETENDED_HEADERS" in os.environ:
        headers.FOLDER = Path(os.environ["PRETENDED_HEADERS"])
    major, minor = torch.cuda.get_device_capability()
    refused = 0
    for path in sorted(folder.glob(f"sm_{major}{minor}-*.json")):
        words, _, why = launch(path).partition(":")
        refused += words == "refused"
        print(words, path.name, why[:3000], flush=True)
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
