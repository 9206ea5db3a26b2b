"""The CUDA headers with which nvFuser compiles sorts: CUB's, from the toolkit in a fixed folder.

Everything else that is written here compiles without a toolkit. If the headers are missing, or of
another major version than the wheel's CUDA, nvFuser fails an assertion with a page of generated
code; so this is checked first. Tried with a wheel for CUDA 12.8: 12.6, 12.8 and 12.9 compile, 13.0
does not.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ...errors import UnsupportedError

FOLDER = Path("/usr/local/cuda/include")
_CUB = "cub/block/block_radix_sort.cuh"


def check_headers() -> None:
    """UnsupportedError if nvFuser finds no matching headers: its wheel is built for the CUDA
    version of the installed torch.
    """
    wanted, version = str(torch.version.cuda), _version(FOLDER)
    if version.split(".")[0] != wanted.split(".")[0]:
        why = f"{FOLDER} has those of CUDA {version}" if version else f"{FOLDER} has none"
        raise UnsupportedError(
            f"nvFuser compiles sorts with the headers of a CUDA toolkit, and {why}",
            expected=f"those of CUDA {wanted}, or of its major version",
            todo="install that toolkit, and point /usr/local/cuda at it",
            where="nvfuser",
        )


def _version(folder: Path) -> str:
    """The version of the toolkit with these headers, "12.8"; "" if some are missing."""
    header = folder / "cuda.h"
    match = (
        re.search(r"^#define CUDA_VERSION (\d+)", header.read_text(errors="replace"), re.M)
        if header.is_file()
        else None
    )
    if match is None or not any((root / _CUB).is_file() for root in (folder, folder / "cccl")):
        return ""
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
